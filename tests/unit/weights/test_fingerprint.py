import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.weights import fingerprint, fingerprint_tensor
from echo2.weights.elements import ELEMENT_TYPES, TensorSpec, bits_of, element_type_of
from echo2.weights.fingerprint import MODULUS, _sum_on_device, header_term
from tests.unit.weights.models import random_tensor

SETTINGS = settings(max_examples=30, deadline=None)
TYPES = st.sampled_from(ELEMENT_TYPES)
COUNTS = st.integers(0, 20_000)
SEEDS = st.integers(0, 1 << 32)


def written_out(name: str, tensor: torch.Tensor, key: int) -> int:
    """The definition, element by element, in Python's integers."""
    from echo2.weights.fingerprint import column_coefficients, row_coefficients

    bits = bits_of(tensor)
    columns = [int(c) for c in column_coefficients(key)]
    rows = [int(r) for r in row_coefficients(key, name, np.arange(bits.size // 4096 + 1, dtype=np.uint64))]
    total = header_term(key, TensorSpec(name, element_type_of(name, tensor), tuple(tensor.shape)))
    for i, value in enumerate(bits.tolist()):
        total += columns[i % 4096] * rows[i // 4096] * value
    return total % MODULUS


@SETTINGS
@given(element=TYPES, count=COUNTS, seed=SEEDS, key=st.integers(0, MODULUS - 1))
def test_fingerprint_is_its_definition_on_cpu_and_in_torch(element, count, seed, key) -> None:  # type: ignore[no-untyped-def]
    tensor = random_tensor(np.random.default_rng(seed), element, (count,))
    expected = written_out("w", tensor, key)
    assert fingerprint({"w": tensor}, key) == expected
    bits = torch.from_numpy(bits_of(tensor).view({1: "u1", 2: "i2", 4: "i4", 8: "i8"}[element.bytes]))
    term = header_term(key, TensorSpec("w", element, (count,)))
    assert (term + _sum_on_device("w", bits, element, key)) % MODULUS == expected


def test_names_types_shapes_keys_and_order_matter_as_they_should() -> None:
    a, b = torch.arange(6.0).bfloat16(), torch.ones(3).bfloat16()
    base = fingerprint({"a": a, "b": b}, 1)
    assert base == fingerprint({"b": b, "a": a}, 1)
    assert base == (fingerprint_tensor("a", a, 1) + fingerprint_tensor("b", b, 1)) % MODULUS
    others = [
        fingerprint({"a": a, "c": b}, 1),
        fingerprint({"a": a.reshape(2, 3), "b": b}, 1),
        fingerprint({"a": a.view(torch.float16), "b": b}, 1),
        fingerprint({"a": a, "b": b}, 2),
        fingerprint({"a": a}, 1),
        fingerprint({"a": a.flip(0), "b": b}, 1),
    ]
    assert len({base, *others}) == 7
