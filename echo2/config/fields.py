"""Field types that parse what people write (`80ms`, `4MiB`, `300mbit/s`) into SI numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from echo2.base.errors import ConfigError
from echo2.base.units import parse_bytes, parse_duration_s, parse_rate_bytes_per_s


def _parsed(parse: object) -> BeforeValidator:
    def convert(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError("expected a number or a text with a unit")
        try:
            return parse(value)  # type: ignore[operator]
        except ConfigError as error:
            raise ValueError(str(error)) from None  # pydantic names the field

    return BeforeValidator(convert)


Seconds = Annotated[float, _parsed(parse_duration_s), Field(ge=0)]
Bytes = Annotated[int, _parsed(parse_bytes), Field(ge=0)]
BytesPerSecond = Annotated[float, _parsed(parse_rate_bytes_per_s), Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A frozen group of options; an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
