"""Kinds by the names that drivers and providers give them."""

from __future__ import annotations

import pytest

from echo2.coordinator.money.market import built_in_catalogue
from echo2.cost_model.machines import kind_of_name

KINDS = tuple(built_in_catalogue())


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("1 x NVIDIA GeForce RTX 4090", "RTX4090", 1),
        ("2 x NVIDIA H100 80GB HBM3", "H100", 2),
        ("8 x NVIDIA A100-SXM4-80GB", "A100-80G", 8),
        ("1 x NVIDIA A100-PCIE-40GB", "A100-40G", 1),
        ("NVIDIA RTX A6000", "A6000", 1),
        ("1 x NVIDIA RTX 6000 Ada Generation", "RTX6000Ada", 1),
        ("NVIDIA L40S", "L40S", 1),
        ("NVIDIA L4", "L4", 1),
        ("A100-80G", "A100-80G", 1),
        ("NVIDIA A100", "", 1),  # of which size?
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "", 1),
        ("1 x NVIDIA L4 + 1 x NVIDIA H100", "", 1),
        ("Tesla V100-SXM2-16GB", "", 1),
        ("0 x NVIDIA L4", "", 1),
        ("", "", 1),
        ("cpu", "cpu", 1),
    ],
)
def test_a_name_gives_its_kind_and_how_many(text: str, kind: str, count: int) -> None:
    assert kind_of_name(text, KINDS) == (kind, count)
