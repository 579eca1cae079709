from __future__ import annotations

import numpy as np
import pytest

from echo2.weights.bits import gaps_of_places, places_of_gaps, places_of_marks, word_count
from echo2.weights.bitset import BitSet, listed
from echo2.weights.marks import pick, places_of_larger

SIZES = [1, 63, 64, 65, 1000, 70_001]
SHARES = [0.0, 0.001, 0.03, 0.06, 0.2, 0.7, 1.0]


def marked(size: int, share: float, seed: int = 0) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng(seed).random(size) < share).astype(np.uint32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", SHARES)
def test_marks_are_listed_whatever_share_of_them_is_set(size: int, share: float) -> None:
    places = marked(size, share)
    words = BitSet(size, places.size, places).marks()
    words[size >> 6] |= np.uint64((1 << 64) - (1 << (size & 63)))  # what lies behind the run is not of it
    out = np.full(places.size + 8, 7, np.uint32)
    assert places_of_marks(words, size, out) == places.size
    assert (out[: places.size] == places).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", SHARES[1:])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_places_come_back_from_gaps(size: int, share: float, k: int) -> None:
    places = marked(size, share, seed=1)
    if not places.size:
        return
    quotients, low = np.empty(places.size, np.uint8), np.zeros(word_count(places.size * k), np.uint64)
    long = np.empty(places.size, np.uint32)
    longer = int(gaps_of_places(places, k, (quotients, low, long)))
    out = np.empty_like(places)
    assert places_of_gaps((quotients, low, long[:longer]), k, size, out)
    assert (out == places).all()
    assert not places_of_gaps((quotients, low, long[:longer]), k, int(places[-1]), out), (
        "the last one is not below that"
    )
    more = np.append(long[:longer], np.uint32(1))
    assert not places_of_gaps((quotients, low, more), k, size, out), "one long gap is left"
    if longer:
        assert not places_of_gaps((quotients, low, long[: longer - 1]), k, size, out), "one long gap is missing"


@pytest.mark.parametrize("share", SHARES[2:])
@pytest.mark.parametrize("of_these", [0.01, 0.3, 1.0])
def test_larger_changes_are_found_by_their_ranks(share: float, of_these: float) -> None:
    size = 70_001
    places = marked(size, share)
    ranks = marked(places.size, of_these, seed=2)
    changed, larger = BitSet(size, places.size, places), BitSet(places.size, ranks.size, ranks)
    out, picked = np.empty(ranks.size + 8, np.uint32), np.empty(ranks.size, np.uint32)
    places_of_larger(changed.marks(), size, larger.marks(), out)
    pick(places, ranks, picked)
    assert (out[: ranks.size] == places[ranks]).all() and (picked == places[ranks]).all()
    assert (listed(larger.marks(), places.size, ranks.size) == ranks).all()
