from __future__ import annotations

import pytest

from echo2.base.errors import ConfigError
from echo2.worker.price import PRICE_VARIABLE, Price, price_of


def test_a_flag_beats_the_environment_and_that_beats_the_provider() -> None:
    environment = {PRICE_VARIABLE: "0.31"}
    assert price_of(0.5, environment, "0.2") == Price(0.5, "worker.price_usd_per_hour")
    assert price_of(0.0, environment, "0.2") == Price(0.31, PRICE_VARIABLE)
    assert price_of(0.0, {}, " 0.2\n") == Price(0.2, "provider metadata")
    assert price_of(0.0, {}, None).usd_per_hour == 0.0
    assert price_of(0.0, {PRICE_VARIABLE: ""}, "").usd_per_hour == 0.0


@pytest.mark.parametrize("text", ["cheap", "-1", "nan", "1e9"])
def test_what_is_no_price_is_refused_with_its_source(text: str) -> None:
    with pytest.raises(ConfigError, match=PRICE_VARIABLE):
        price_of(0.0, {PRICE_VARIABLE: text})
    with pytest.raises(ConfigError, match="provider's tag"):
        price_of(0.0, {}, text)
