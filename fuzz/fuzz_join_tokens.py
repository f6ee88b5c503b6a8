"""Join tokens, as people paste them and as a host that wants to join presents one."""

from __future__ import annotations

from gpulayer.model.errors import InvalidRequest
from gpulayer.wire.join_token import parse_join_token

# Less may be a word of the refusal itself.
SECRET_CHARACTERS = 16


def one(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        token = parse_join_token(text)
    except InvalidRequest as refusal:
        said = str(refusal)
    else:
        said = repr(token)
        assert token.text == text
    # It is a secret, also where one letter of it is wrong.
    assert len(text) < SECRET_CHARACTERS or text not in said
