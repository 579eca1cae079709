from __future__ import annotations

import pytest

from echo2.base.errors import MalformedMessage
from echo2.base.ids import GroupId
from echo2.base.rollout import GroupSpec, SamplingParams
from echo2.wire.coordinator import offer_from_message
from echo2.wire.gen.echo2.v1 import coordinator_pb2 as pb
from echo2.wire.rollout import group_to_message

SPECS = [GroupSpec(GroupId(name), (1, 2), 2, SamplingParams(max_new_tokens=4, seed=1), 0) for name in ("g1", "g2")]


@pytest.mark.parametrize("held", [(), (0, 7)])
def test_an_offer_counts_nothing_or_each_of_its_groups(held: tuple[int, ...]) -> None:
    message = pb.OfferGroups(groups=map(group_to_message, SPECS), held_tokens=held)
    assert offer_from_message(message, "the learner") == (tuple(SPECS), held)


@pytest.mark.parametrize("held", [(7,), (1, 2, 3)])
def test_an_offer_that_counts_other_groups_is_refused(held: tuple[int, ...]) -> None:
    message = pb.OfferGroups(groups=map(group_to_message, SPECS), held_tokens=held)
    with pytest.raises(
        MalformedMessage, match=f"held_tokens of the learner: expected none or one .* 2 groups, got {len(held)}"
    ):
        offer_from_message(message, "the learner")
