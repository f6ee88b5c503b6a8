"""A join token has one spelling, says what it pins, and is never repeated by an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.model.errors import InvalidRequest
from gpulayer.wire.join_token import JoinTokenText, parse_join_token

PIN = "sha256:" + "0f" * 32
TOKEN = JoinTokenText(secret=b"\xfb" * 32, pin=PIN)


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_a_token_is_read_as_it_was_written(secret: bytes, pin: bytes) -> None:
    token = JoinTokenText(secret=secret, pin=f"sha256:{pin.hex()}")
    assert parse_join_token(token.text) == token
    assert len(token.text) == 4 + 43 + 1 + 43


@given(st.one_of(st.text(max_size=200), st.from_regex(r"gpj_[A-Za-z0-9_-]{43}\.[A-Za-z0-9_-]{43}", fullmatch=True)))
def test_any_text_is_a_token_or_refused(text: str) -> None:
    refused: InvalidRequest | None = None
    try:
        assert parse_join_token(text).text == text
    except InvalidRequest as error:
        refused = error
    assert refused is None or len(text) < 8 or text not in str(refused)


@pytest.mark.parametrize(
    "text",
    [
        "",
        TOKEN.text + " ",
        TOKEN.text[:-1],
        TOKEN.text.replace("gpj_", "gpl_"),
        TOKEN.text.replace(".", "="),
        # The last letter carries four bits; another one that gives the same bytes is no second spelling.
        TOKEN.text[:-1] + chr(ord(TOKEN.text[-1]) + 1),
        TOKEN.text.replace("g", "ｇ", 1),
    ],
)
def test_what_is_nearly_a_token_is_none(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_join_token(text)


def test_its_secret_is_not_shown() -> None:
    assert "fb" not in repr(TOKEN)
    assert TOKEN.text not in repr(TOKEN)
    assert TOKEN.digest not in TOKEN.text
