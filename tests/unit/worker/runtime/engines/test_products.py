from __future__ import annotations

import torch
import torch.nn.functional as F

from echo2.worker.runtime.engines.products import ROW_CLASSES, Products, _by_onednn


def test_whatever_is_chosen_gives_the_same_product() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(96, 64), torch.randn(64, 96)]
    products = Products()
    with torch.inference_mode():
        products.choose(weights)
        for count in (1, 3, 8, 40, 300):
            for weight in weights:
                rows, bias = torch.randn(count, weight.shape[1]), torch.randn(weight.shape[0])
                expected = (rows.double() @ weight.double().T + bias).float()
                for found in (products.product(rows, weight, bias), _by_onednn(rows, weight, bias)):
                    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(products.product(rows, weight), F.linear(rows, weight), rtol=1e-4, atol=1e-4)


def test_each_number_of_rows_falls_into_the_largest_class_that_it_reaches() -> None:
    products = Products()
    seen: list[tuple[int, int]] = []

    def noting(at: int) -> object:
        return lambda rows, weight, bias: seen.append((at, len(rows))) or F.linear(rows, weight, bias)

    products._chosen = [noting(at) for at in range(len(ROW_CLASSES))]  # type: ignore[misc]
    for count in (8, 16, 56, 64, 192, 256, 512):
        products.product(torch.zeros(count, 2), torch.zeros(2, 2))
    last = len(ROW_CLASSES) - 1
    assert seen == [(2, 8), (3, 16), (4, 56), (5, 64), (5, 192), (last, 256), (last, 256), (last, 256)]


def test_shapes_are_filled_up_to_few_different_ones() -> None:
    products = Products()
    seen: set[int] = set()

    def noting(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.add(len(rows))
        return F.linear(rows, weight, bias)

    products._chosen = [noting] * len(ROW_CLASSES)
    weight = torch.randn(3, 2)
    for count in range(1, 600):
        rows = torch.randn(count, 2)
        torch.testing.assert_close(products.product(rows, weight), F.linear(rows, weight))
    assert seen == {8, 16, 24, 32, 40, 48, 56, 64, 128, 192, 256}
