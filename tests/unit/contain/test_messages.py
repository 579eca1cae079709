"""What hostile bytes may not do to the process that reads them."""

import contextlib
import time

import pytest
from hypothesis import given, strategies as st

from echo2.base.errors import MalformedMessage
from echo2.contain.messages import foreign_object, shown


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[1]", b"1", b"nul", b'"x"', b"\xff\xfe", b'{"value": NaN}', b'{"value": Infinity}', b'{"value": -Infinity}',
        b"[" * 500_000, b'{"a":' * 200_000, b'{"value": ' + b"9" * 900_000 + b"}", b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    ],
)  # fmt: skip
def test_what_is_no_plain_object_is_refused_at_once(body: bytes) -> None:
    began = time.process_time()
    with pytest.raises(MalformedMessage):
        foreign_object(body)
    assert time.process_time() - began < 1.0


@given(st.binary(max_size=2000))
def test_any_bytes_give_an_object_or_malformed_message(body: bytes) -> None:
    with contextlib.suppress(MalformedMessage):
        assert isinstance(foreign_object(body), dict)


@given(st.text())
def test_foreign_text_is_one_short_printable_line(text: str) -> None:
    line = shown(text)
    assert line.isprintable() and len(line) <= 500
