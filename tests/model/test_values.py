"""The vocabulary refuses nonsense, with the value and what to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.model import units
from gpulayer.model.errors import InvalidRequest
from gpulayer.model.ids import checked_name, job_id, name_from_command
from gpulayer.model.job import JobSpec, Requirements


def spec(**changes: object) -> JobSpec:
    return JobSpec(**{"kind": "service", "name": "web", "argv": ("serve",), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"argv": ()}, "empty"),
        ({"argv": ("",)}, "empty"),
        ({"argv": ("a\0b",)}, "NUL"),
        ({"argv": ("x" * 200_000,)}, "128 KiB"),
        ({"argv": tuple(["y" * 100_000] * 6)}, "512 KiB"),
        ({"argv": ("\udc80",)}, "UTF-8"),
        ({"env": (("A B", "1"),)}, "not a variable"),
        ({"env": (("", "1"),)}, "not a variable"),
        ({"env": (("PORT", "1"),)}, "PORT is set by gpulayer"),
        ({"env": (("HOST", "0.0.0.0"),)}, "HOST is set by gpulayer"),
        ({"env": (("GPULAYER_REPLICA", "1"),)}, "reserved"),
        ({"env": (("NOTIFY_SOCKET", "/x"),)}, "reserved"),
        ({"name": "Web"}, "not a name"),
        ({"name": "x" * 64}, "not a name"),
        ({"workdir": "relative"}, "absolute"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 10_001}, "replicas"),
        ({"restart": "sometimes"}, "restart"),
        ({"max_restarts": -1}, "max-restarts"),
        ({"priority": 101}, "priority"),
        ({"timeout_seconds": 0.0}, "timeout"),
        ({"timeout_seconds": float("nan")}, "timeout"),
        ({"stop_grace_seconds": -1.0}, "stop-grace"),
        ({"stop_signal": "STOP"}, "stop-signal"),
        ({"kind": "batch"}, "restart"),
        ({"kind": "batch", "restart": "never", "start_timeout_seconds": 3.0}, "start-timeout"),
    ],
)
def test_a_specification_that_cannot_be_meant_is_refused_with_words(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        spec(**changes)
    assert words in str(caught.value)
    assert caught.value.hint


def test_without_a_port_its_variables_are_the_users() -> None:
    assert spec(port=False, env=(("HOST", "db"), ("PORT", "5432"))).env


@pytest.mark.parametrize(
    "changes",
    [
        {"accelerator": "tpu"},
        {"gpus_milli": -1},
        {"gpus_milli": 1500},
        {"gpu_models": ("A100",)},
        {"gpu_memory_mib": 1},
        {"accelerator": "cuda"},
        {"accelerator": "cpu", "gpus_milli": 1000},
        {"cpus_milli": -5},
        {"memory_mib": -5},
    ],
)
def test_requirements_that_contradict_themselves_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Requirements(**changes)  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1h30m", 5400), ("250ms", 0.25), ("1d", 86400)]
)
def test_durations_are_read_in_every_unit(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "90", "-1s", "1w", "1h30", "s", "1e9h", "99999999d", "1 s 2", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidRequest, match="90s"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "mib"), [("24GiB", 24576), ("512MiB", 512), ("80GB", 76294), ("1k", 1), ("1TiB", 2**20)]
)
def test_sizes_are_read_as_mebibytes(text: str, mib: int) -> None:
    assert units.parse_size(text) == mib


@given(st.integers(0, units.MIB_MAX))
def test_a_size_is_never_shown_as_more_than_it_is(mib: int) -> None:
    """24564 MiB were shown as 24.0GiB, which was then refused."""
    shown = units.parse_size(units.format_size(mib))
    assert mib - 103 <= shown <= mib


@pytest.mark.parametrize("text", ["", "24", "-1GiB", "GiB", "1PiB", "9999999999TiB", "9" * 400 + "GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidRequest, match="24GiB"):
        units.parse_size(text)


@pytest.mark.parametrize(("value", "milli"), [("1", 1000), ("0.5", 500), (2, 2000), (0, 0), ("0.125", 125)])
def test_gpus_are_read_as_thousandths(value: str | int, milli: int) -> None:
    assert units.parse_gpus(value) == milli


@pytest.mark.parametrize(
    "value", ["1.5", "-1", "nan", "inf", "x", "0.0001", "0.0", "2000", pytest.param(10**400, id="400 digits")]
)
def test_what_is_no_number_of_gpus(value: str | int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        units.parse_gpus(value)
    assert caught.value.hint


@given(st.text())
def test_no_text_makes_a_parser_fail_otherwise(text: str) -> None:
    for parse in (units.parse_duration, units.parse_size, units.parse_gpus):
        try:
            parse(text)
        except InvalidRequest:
            pass


@given(st.floats(min_value=0, max_value=1e9))
def test_a_formatted_duration_is_short_and_says_its_unit(seconds: float) -> None:
    assert len(units.format_duration(seconds)) <= 10


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_a_name_made_from_a_command_is_a_name(argv: list[str]) -> None:
    checked_name(name_from_command(tuple(argv)))


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (("python", "serve.py"), "serve"),
        (("python3.11", "-m", "http.server"), "http-server"),
        (("/opt/bin/vllm", "serve"), "vllm"),
        (("sh", "-c", "exec x"), "sh"),
        (("bash", "./run_all.sh", "x"), "run-all"),
    ],
)
def test_a_job_is_named_after_its_program(argv: tuple[str, ...], name: str) -> None:
    assert name_from_command(argv) == name


def test_job_ids_are_ten_base32_letters() -> None:
    assert checked_name(job_id(b"\xff" * 8)) == "j-" + "7" * 10
    assert job_id(b"\x00" * 8) == "j-aaaaaaaaaa"
