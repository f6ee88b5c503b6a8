"""Bodies of HTTP requests, as anyone with a token may send them."""

from __future__ import annotations

from gpulayer.model.errors import GpulayerError
from gpulayer.model.job import JobSpec
from gpulayer.wire.codec import decode, encode
from gpulayer.wire.http import (
    error_from_json,
    parse_empty,
    parse_json,
    parse_leave,
    parse_restart,
    parse_submit,
    parse_token,
    spec_from_json,
    spec_to_json,
)

PARSERS = (parse_submit, parse_empty, parse_restart, parse_token, parse_leave)


def one(data: bytes) -> None:
    for parse in PARSERS:
        try:
            parse(data)
        except GpulayerError as error:
            refusal = error
        else:
            continue
        assert refusal.message
    try:
        spec = parse_submit(data).spec
    except GpulayerError:
        pass
    else:
        # What was accepted can be shown, logged and read again.
        assert spec_from_json(spec_to_json(spec)) == spec
        assert decode(JobSpec, encode(spec)) == spec
    try:
        document = parse_json(data)
    except GpulayerError:
        return
    error_from_json(document, 500)
