"""The text of a join token, `gpj_<secret>.<pin>`: what lets a host in, and how it knows whom it gives that to.

The pin is the sha256 of the cluster CA's certificate: a host that joins shows its secret to nobody else. The log has
the digest of the secret only.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from hashlib import sha256

from gpulayer.model.errors import InvalidRequest

SECRET_BYTES = 32
# 32 bytes are 43 letters of base64url; the last of them carries four bits.
_TOKEN = re.compile(r"gpj_([A-Za-z0-9_-]{43})\.([A-Za-z0-9_-]{43})", re.ASCII)
_PIN = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTokenText:
    secret: bytes = field(repr=False)
    """32 bytes of chance."""
    pin: str
    """`sha256:` and the digest of the CA's certificate (DER), in hex."""

    def __post_init__(self) -> None:
        assert len(self.secret) == SECRET_BYTES, f"a secret of {len(self.secret)} bytes"
        assert _PIN.fullmatch(self.pin), f"{self.pin!r} is no pin"

    @property
    def text(self) -> str:
        """What is given to people. Keep it from logs."""
        return f"gpj_{_letters(self.secret)}.{_letters(bytes.fromhex(self.pin.removeprefix('sha256:')))}"

    @property
    def digest(self) -> str:
        """What the log keeps: sha256 of the secret, in hex."""
        return sha256(self.secret).hexdigest()


def parse_join_token(text: str) -> JoinTokenText:
    """The parts of a token. InvalidRequest, which does not repeat it, for any other text."""
    match = _TOKEN.fullmatch(text)
    if match is not None:
        secret, pin = (urlsafe_b64decode(part + "=") for part in match.groups())
        token = JoinTokenText(secret=secret, pin=f"sha256:{pin.hex()}")
        if token.text == text:  # each token has one spelling
            return token
    raise InvalidRequest(
        "this is not a join token", hint="it is one word, gpj_….…, that gpulayer token create --join prints"
    )


def _letters(data: bytes) -> str:
    return urlsafe_b64encode(data).decode("ascii").rstrip("=")
