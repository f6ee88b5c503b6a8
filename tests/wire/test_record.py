"""A node's record as bytes, key by key: what is not understood hides nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from gpulayer.model.address import Address
from gpulayer.model.ids import AttemptId, JobId, ReplicaId
from gpulayer.model.node import Accelerator, Capabilities
from gpulayer.model.record import Load, NodeFacts, NodeRecord, ReplicaRecord
from gpulayer.model.replica import DeviceShare, Endpoint, Exit, Reason, ReplicaStatus
from gpulayer.wire.codec import encode
from gpulayer.wire.record import ReadRecord, changes, entries_of, key_of, node_record, read

UUIDS = tuple(f"GPU-ecdd1234-0000-4000-8000-00000000000{n}" for n in range(8))
FACTS = NodeFacts(
    name="rack3-host17",
    advertise="10.20.30.47",
    api=Address("10.20.30.47", 7450),
    gpulayer_version="0.4.0",
    is_voter=True,
    capabilities=Capabilities(
        accelerators=tuple(
            Accelerator(
                uuid=uuid, kind="cuda", vendor="nvidia", model="NVIDIA H100 80GB HBM3", memory_mib=81559, source="nvml",
                index=n, compute_capability="9.0", pci_bus_id=f"00000000:{n + 16:02X}:00.0", numa_node=n // 4,
                nvlink_peers=tuple(peer for peer in UUIDS if peer != uuid),
            )
            for n, uuid in enumerate(UUIDS)
        ),
        cpus_milli=128_000,
        memory_mib=2_000_000,
        labels=(("rack", "3"), ("zone", "eu-1")),
        gpu_detect="ok",
        drivers=(("cuda", "12.4"), ("nvidia", "550.54.15")),
        disk_mib=7_000_000,
    ),
)  # fmt: skip
LOAD = Load(cpu_percent=40, memory_percent=70)


def replica(index: int, restarts: int = 2) -> ReplicaRecord:
    attempt = AttemptId(ReplicaId(JobId("j-abcdefghij"), index), 1)
    return ReplicaRecord(
        status=ReplicaStatus(
            attempt=attempt, state="ready", run=3, pid=4_000_000, port=20417,
            endpoint=Endpoint(address="10.20.30.47", port=20417),
            restarts=restarts, ready_since_utc=1.7e9, started_at_utc=1.7e9,
            last_exit=Exit(run=2, code=1, ended_at_utc=1.7e9, uptime_seconds=61.5),
        ),
        job_name="llama-70b",
        kind="service",
        revision=4,
        devices=(DeviceShare(uuid=UUIDS[index % 8], milli=1000),),
        cpus_milli=8000,
        memory_mib=65536,
    )  # fmt: skip


ENTRIES = entries_of(facts=FACTS, load=LOAD, replicas=[replica(0), replica(1)])


def test_a_record_comes_back_as_it_was() -> None:
    assert node_record(ENTRIES) == NodeRecord(
        facts=FACTS, load=LOAD, replicas={one.status.attempt: one for one in (replica(0), replica(1))}
    )
    assert node_record({}) == NodeRecord()


def test_keys_are_those_that_peers_of_other_versions_know() -> None:
    assert list(ENTRIES) == ["node", "r/j-abcdefghij.0.1", "r/j-abcdefghij.1.1", "load"]


def test_the_usual_values_are_as_small_as_is_counted_on() -> None:
    """A changed phase rides on a probe (600 bytes); a host of eight GPUs and as many replicas fits 8 KB."""
    assert len(ENTRIES[key_of(replica(0).status.attempt)]) < 500
    assert len(ENTRIES["node"]) < 6000
    assert len(ENTRIES["load"]) < 64


def test_changes_turn_one_record_into_the_other() -> None:
    after = entries_of(facts=FACTS, load=replace(LOAD, cpu_percent=50), replicas=[replica(1, restarts=3), replica(2)])
    found = changes(ENTRIES, after)
    assert sorted(found) == ["load", "r/j-abcdefghij.0.1", "r/j-abcdefghij.1.1", "r/j-abcdefghij.2.1"]
    assert found["r/j-abcdefghij.0.1"] is None
    assert changes(after, after) == {}
    merged = {key: value for key, value in (ENTRIES | found).items() if value is not None}
    assert merged == after


def test_a_key_that_cannot_be_read_is_named_and_hides_nothing_else() -> None:
    other = encode(replica(5))
    values = {**ENTRIES, "node": b"\xff", "r/j-abcdefghij.0.1": b"", "r/j-abcdefghij.9.1": other, "later/kind": b"?"}
    found = read(values)
    assert list(found.record.replicas) == [replica(1).status.attempt]
    assert (found.record.facts, found.record.load) == (None, LOAD)
    assert [one.key for one in found.unreadable] == ["node", "r/j-abcdefghij.0.1", "r/j-abcdefghij.9.1"]
    assert "j-abcdefghij.5.1" in found.unreadable[2].why


def test_what_a_later_version_added_to_a_value_is_passed_over() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Load:
        cpu_percent: int
        gpu_percent: int

    assert node_record({"load": encode(Load(cpu_percent=30, gpu_percent=90))}).load == LOAD.__class__(cpu_percent=30)


def test_only_what_differs_is_read_again() -> None:
    before = read(ENTRIES)
    assert read(before.values, before) is before
    again = read(dict(ENTRIES) | {"load": encode(Load()), "r/j-abcdefghij.1.1": encode(replica(1, 9))}, before)
    attempts = [replica(n).status.attempt for n in (0, 1)]
    assert again.record.facts is before.record.facts
    assert again.record.replicas[attempts[0]] is before.record.replicas[attempts[0]]
    assert again.record.replicas[attempts[1]].status.restarts == 9
    assert again.record.load == Load()


def test_what_was_unreadable_before_is_still_named_and_what_went_away_is_gone() -> None:
    before = read({**ENTRIES, "node": b"\xff"})
    again = read({"node": b"\xff", "load": ENTRIES["load"]}, before)
    assert [one.key for one in again.unreadable] == ["node"]
    assert again.record == NodeRecord(load=LOAD)


values_of_peers = st.dictionaries(
    st.sampled_from(["node", "load", "r/", "r/j-abcdefghij.0.1", "other"]) | st.text(max_size=20),
    st.binary(max_size=60) | st.sampled_from(list(ENTRIES.values())),
    max_size=5,
)


@given(values_of_peers, values_of_peers)
def test_whatever_a_peer_says_is_read_the_same_with_and_without_what_was_before(
    first: dict[str, bytes], second: dict[str, bytes]
) -> None:
    assert read(second, read(first)) == read(second)


def test_reasons_travel_too() -> None:
    told = replace(replica(0), status=replace(replica(0).status, state="unready", reason=Reason(code="not_listening")))
    assert node_record(entries_of(replicas=[told])).replicas == {told.status.attempt: told}


def test_nothing_read_is_an_empty_record() -> None:
    assert read({}) == ReadRecord()
