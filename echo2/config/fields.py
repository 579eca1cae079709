"""Field types that parse what people write (`80ms`, `4MiB`, `300mbit/s`) into SI numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from echo2.base.errors import ConfigError
from echo2.base.units import parse_bytes, parse_duration_s, parse_rate_bytes_per_s


def _parsed(parse: object) -> BeforeValidator:
    def convert(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError("expected a number or a string with a unit")
        try:
            return parse(value)  # type: ignore[operator]
        except ConfigError as error:
            raise ValueError(str(error)) from None  # pydantic names the field

    return BeforeValidator(convert)


Seconds = Annotated[float, _parsed(parse_duration_s), Field(ge=0)]
Bytes = Annotated[int, _parsed(parse_bytes), Field(ge=0)]


def rate_with_unit(value: str | float) -> float:
    """Bytes per second. A bare number is refused, because 300 could be meant as Mbit/s but would be 300 bytes per second; 0
    needs no unit."""
    if not isinstance(value, str) and value != 0:
        raise ConfigError(f"rate: expected a number with a unit, such as 300mbit/s or 37.5MB/s, got {value!r}")
    return parse_rate_bytes_per_s(value)


RATE = _parsed(rate_with_unit)
BytesPerSecond = Annotated[float, RATE, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A frozen group of options; an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
