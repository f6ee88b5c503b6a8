"""Bodies of the HTTP API: specifications survive the way there and back, nonsense is named, errors keep their class."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.model.errors import (
    BY_CODE,
    GpulayerError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Refused,
    StorageFailed,
    Unreachable,
)
from gpulayer.model.job import JobSpec, Requirements, sorted_pairs
from gpulayer.wire import http

text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
names = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=63)
pairs = st.dictionaries(text.filter(lambda key: key and "=" not in key), text, max_size=3).map(sorted_pairs)
variables = st.dictionaries(
    st.text("ABCDEFGHIJ_abcé0123", min_size=1, max_size=8).filter(lambda name: name not in ("PORT", "HOST")),
    text,
    max_size=3,
).map(sorted_pairs)
seconds = st.none() | st.floats(0.001, 1e8, allow_nan=False)


@st.composite
def requirements(draw: st.DrawFn) -> Requirements:
    gpus_milli = draw(st.integers(0, 1000) | st.integers(1, 64).map(lambda number: number * 1000))
    return Requirements(
        accelerator=draw(st.sampled_from([None, "cuda", "rocm"]))
        if gpus_milli
        else draw(st.sampled_from([None, "cpu"])),
        gpus_milli=gpus_milli,
        gpu_models=tuple(draw(st.lists(text.filter(bool), max_size=2))) if gpus_milli else (),
        gpu_memory_mib=draw(st.integers(0, 2**40)) if gpus_milli else 0,
        vendor=draw(st.none() | text.filter(bool)) if gpus_milli else None,
        cpus_milli=draw(st.integers(0, 100_000_000)),
        memory_mib=draw(st.integers(0, 2**40)),
        labels=draw(pairs),
    )


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    kind = draw(st.sampled_from(["service", "batch"]))
    is_service = kind == "service"
    return JobSpec(
        kind=kind,  # type: ignore[arg-type]
        name=draw(names),
        argv=(draw(text.filter(bool)), *draw(st.lists(text, max_size=3))),
        env=draw(variables),
        workdir=draw(st.none() | text.map(lambda path: "/" + path)),
        replicas=draw(st.integers(1, 10_000)),
        requirements=draw(requirements()),
        port=draw(st.booleans()) if is_service else False,
        restart=draw(st.sampled_from(["always", "on_failure", "never"])) if is_service else "never",  # type: ignore[arg-type]
        max_restarts=draw(st.none() | st.integers(0, 1_000_000)) if is_service else None,
        retry_max_attempts=draw(st.integers(0, 1_000_000)),
        spread=draw(st.sampled_from(["node", "any"])),  # type: ignore[arg-type]
        priority=draw(st.integers(0, 100)),
        on_replica_end=draw(st.sampled_from(["stop", "keep"])),  # type: ignore[arg-type]
        timeout_seconds=draw(seconds),
        start_timeout_seconds=draw(seconds) if is_service else None,
        stop_signal=draw(st.sampled_from(["TERM", "INT", "KILL"])),
        stop_grace_seconds=draw(st.floats(0, 1e6, allow_nan=False)),
    )


def refusal(call: Callable[[], object]) -> InvalidRequest | None:
    try:
        call()
    except InvalidRequest as error:
        return error
    return None


@given(specs())
def test_a_specification_survives_the_way_there_and_back(spec: JobSpec) -> None:
    sent = http.dump(http.spec_to_json(spec))
    asked = http.parse_submit(sent)
    assert asked.spec == spec
    assert not asked.name_is_derived
    assert http.spec_from_json(json.loads(sent)) == spec
    assert set(http.spec_to_json(spec)) == set(http.SPEC_KEYS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(http.SPEC_KEYS) | st.text(max_size=8), json_values, max_size=6))
def test_whatever_is_sent_is_a_specification_or_refused_in_words(document: dict[str, object]) -> None:
    error = refusal(lambda: http.parse_submit(json.dumps(document).encode()))
    if error is not None:
        assert error.message
        assert error.hint
        assert len(error.message) < 1000
        http.dump(http.error_to_json(error)).decode()


@given(st.binary(max_size=200))
def test_any_bytes_are_json_or_refused_in_words(body: bytes) -> None:
    error = refusal(lambda: http.parse_json(body))
    if error is None:
        assert http.parse_json(body) == json.loads(body)
    else:
        assert error.hint


@given(json_values)
def test_what_is_read_is_what_was_written(document: object) -> None:
    try:
        body = json.dumps(document, allow_nan=False).encode()
        assert http.parse_json(body) == document
    except (ValueError, InvalidRequest):
        pass  # a number out of range


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_the_depth_is_counted_in_levels_and_not_in_brackets() -> None:
    http.parse_json(nested(32))
    http.parse_json(b"[" + b"[]," * 10_000 + b'"' + b"[" * 1000 + b'"]')
    for body in (nested(33), b'{"a":' * 33 + b"1" + b"}" * 33, b"[1," + nested(32) + b"]"):
        with pytest.raises(InvalidRequest, match="levels"):
            http.parse_json(body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 2**20,
        b'{"a":' * 200_000,
        b'"\\"' * 300_000,
        b"[" + b'"\\"' * 300_000,
        b"[]" * 500_000,
        b"[[" + b"[]," * 300_000,
        b"[" * 100 + b'"' + b"\\" * 900_000,
    ],
)
def test_the_largest_hostile_bodies_are_refused_in_no_time(body: bytes) -> None:
    started = time.process_time()
    with pytest.raises(InvalidRequest):
        http.parse_json(body)
    assert time.process_time() - started < 1


def test_a_hundred_mebibytes_are_not_looked_at() -> None:
    body = b"[" * (100 * 2**20)
    started = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        http.parse_json(body)
    assert caught.value.code == "too_large"
    assert time.process_time() - started < 0.1


def test_a_batch_has_no_port_and_is_not_retried_unless_asked_for() -> None:
    spec = http.parse_submit(b'{"command": ["python", "train.py"]}').spec
    assert (spec.kind, spec.port, spec.restart, spec.retry_max_attempts) == ("batch", False, "never", 0)
    spec = http.parse_submit(b'{"kind": "service", "command": ["a"]}').spec
    assert (spec.port, spec.restart, spec.retry_max_attempts) == (True, "always", 10)


def test_a_name_is_made_from_the_command_where_none_is_given() -> None:
    asked = http.parse_submit(b'{"command": ["python", "train.py"]}')
    assert (asked.spec.name, asked.name_is_derived) == ("train", True)
    asked = http.parse_submit(b'{"command": ["python", "train.py"], "name": "mine"}')
    assert (asked.spec.name, asked.name_is_derived) == ("mine", False)


def test_equal_requests_have_equal_digests_however_they_are_written() -> None:
    one = http.parse_submit(b'{"command":["a"],"gpus":1,"gpu_model":"X"}')
    same = http.parse_submit(b' {"gpu_model": ["X"], "gpus": 1.0, "command": ["a"], "vendor": null}')
    other = http.parse_submit(b'{"command":["a"],"gpus":2,"gpu_model":"X"}')
    assert one.digest == same.digest
    assert one.digest != other.digest


def test_a_long_value_is_shown_short() -> None:
    with pytest.raises(InvalidRequest) as caught:
        http.parse_submit(json.dumps({"command": ["a"], "stop_signal": "x" * 10_000}).encode())
    assert len(caught.value.message) < 150


@pytest.mark.parametrize("kind", sorted(BY_CODE.values(), key=lambda kind: kind.__name__))
def test_an_error_is_of_the_same_class_on_the_other_side(kind: type[GpulayerError]) -> None:
    error = kind("what happened", hint="what to do")
    found = http.error_from_json(http.error_to_json(error), http.status_of(error))
    assert type(found) is kind
    assert (found.code, found.message, found.hint) == (error.code, "what happened", "what to do")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (409, "idempotency_conflict", Refused),
        (413, "too_large", InvalidRequest),
        (415, "unsupported_media_type", InvalidRequest),
        (507, "disk_full", StorageFailed),
        (401, "permission_denied", PermissionDenied),
        (404, None, NotFound),
        (503, None, Unreachable),
        (500, "internal", GpulayerError),
    ],
)
def test_a_code_without_a_class_of_its_own_goes_by_the_status(
    status: int, code: str | None, kind: type[GpulayerError]
) -> None:
    found = http.error_from_json({"code": code, "message": "m"}, status)
    assert type(found) is kind
    if code:
        assert found.code == code


@given(json_values, st.integers(100, 599))
def test_whatever_a_proxy_answers_is_an_error_in_words(document: object, status: int) -> None:
    assert http.error_from_json(document, status).message


@pytest.mark.parametrize("patterns", [["x" * 129], ["x"] * 33])
def test_model_patterns_are_bounded(patterns: list[str]) -> None:
    """Each is compared with every model, whenever somebody asks why the job waits."""
    with pytest.raises(InvalidRequest, match="gpu_model"):
        http.parse_submit(json.dumps({"command": ["a"], "gpus": 1, "gpu_model": patterns}).encode())
