"""What a starting daemon makes of files that anything may have happened to: something, and never an exception."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.core.replica import lifecycle
from gpulayer.core.replica.messages import FoundAttempt, Order, Report
from gpulayer.model.ids import AttemptId, JobId, NodeId, ReplicaId
from gpulayer.model.job import JobSpec
from gpulayer.model.replica import Assignment, Outcome
from gpulayer.model.units import Instant
from gpulayer.runtime.found import OnDisk, found_dead_run, found_run, not_executed
from gpulayer.shim.notes import RunRecord, parse
from gpulayer.wire.codec import decode, encode

ATTEMPT = AttemptId(ReplicaId(JobId("j-aaaaaaaaaa"), 0), 1)
BOOT = "a boot"
SPEC = JobSpec(kind="service", name="x", argv=("x",), timeout_seconds=60.0)
ORDER = Order(
    assignment=Assignment(replica=ATTEMPT.replica, attempt=1, node=NodeId("n-1"), revision=1), spec=SPEC, job_name="x"
)
# As json.loads() gives them: also NaN, Infinity, and integers without end.
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = (
    *("run", "boot_id", "port", "restart_serial", "started_at_utc", "started_boottime", "note", "pid", "start_time"),
    *("attempt_started_boottime", "code", "signal", "ended_by", "ended_at_utc", "uptime_seconds", "left_background"),
    *("left_names", "error", "message", "last_run", "last_exit", "stopping", "gone", "restarts", "failures", "cgroup"),
)
file = st.dictionaries(st.sampled_from(KEYS), anything | st.just(BOOT) | st.just("spawn_failed"))


def on_disk(records: list[RunRecord], content: dict[str, Any] | None = None) -> OnDisk:
    return OnDisk(attempt=ATTEMPT, content=content or {}, shim=None, is_certain=False, records=records)


@given(marker=file, counts=file, note=st.none() | file, hello=st.none() | file, content=file, alive=st.booleans())
def test_garbage_is_taken_up_as_something(
    marker: dict[str, Any],
    counts: dict[str, Any],
    note: dict[str, Any] | None,
    hello: dict[str, Any] | None,
    content: dict[str, Any],
    alive: bool,
) -> None:
    """One torn or strange file in one sandbox kept the whole daemon from starting."""
    disk = on_disk([RunRecord(run=1, marker={**marker, "note": counts}, exit=note)], content)
    disk.leftovers()
    last = found_run(disk, hello) if alive else found_dead_run(disk, BOOT, gone=True)
    ago = disk.first_started_seconds_ago(BOOT)
    found = FoundAttempt(attempt=ATTEMPT, shim_alive=alive, first_started_seconds_ago=ago, last=last)
    life, effects = lifecycle.adopt(ORDER, found, Instant(1000.0), advertise="127.0.0.1")
    lifecycle.status(life)
    for effect in effects:
        if isinstance(effect, Report):
            assert decode(Outcome, encode(effect.outcome)) == effect.outcome, "what is reported goes into the log"


@pytest.mark.parametrize(
    "told", [b'{"message": "\\ud800\\ud83d\\ude00"}', b'{"message": "\xed\xa0\x80\xf0\x9f\x98\x80"}']
)
def test_what_a_shim_tells_is_text(told: bytes) -> None:
    """A lone surrogate is valid JSON; the entry of the log that it came into could not be written."""
    parsed = parse(told)
    assert parsed is not None
    assert parsed["message"].encode().decode().endswith("\U0001f600")


@pytest.mark.parametrize("cgroup", ["/sys/fs/cgroup", "/sys/fs/cgroup/j-aaaaaaaaaa.0.10", 5, None])
def test_only_the_attempts_own_cgroup_is_believed(cgroup: object) -> None:
    """All that is in it is ended when its shim is dead: with the host's root there, that would be everything."""
    assert on_disk([RunRecord(1, {}, None)], {"cgroup": cgroup}).leftovers().cgroup is None
    own = f"/sys/fs/cgroup/gpulayer-n-1/{ATTEMPT}"
    assert on_disk([RunRecord(1, {}, None)], {"cgroup": own}).leftovers().cgroup == own


def test_the_time_of_an_attempt_counts_within_one_boot() -> None:
    marker = {"boot_id": BOOT, "attempt_started_boottime": 0.0}
    disk = on_disk([RunRecord(1, marker, None)])
    assert (disk.first_started_seconds_ago(BOOT) or 0.0) > 0.0
    assert disk.first_started_seconds_ago("another boot") is None
    assert on_disk([]).first_started_seconds_ago(BOOT) is None


def test_why_a_run_was_not_executed_is_known_from_its_note() -> None:
    told = not_executed({"ended_by": "spawn_failed", "error": "bad_command", "message": "no such thing"})
    assert told is not None
    assert (told.code, told.text, bool(told.hint)) == ("bad_command", "no such thing", True)
    older = not_executed({"ended_by": "spawn_failed", "message": "no such thing"})
    assert older is not None
    assert older.code == "spawn_failed"
    assert not_executed({"ended_by": "itself", "code": 0}) is None
