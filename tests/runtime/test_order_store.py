"""What a node has heard, on a real file: whatever happens to it, no older leader is believed afterwards."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from gpulayer.core.orders.messages import HeardOrders, OrderStamp
from gpulayer.core.replica.messages import Order
from gpulayer.model.errors import StorageFailed
from gpulayer.model.ids import JobId, NodeId, ReplicaId
from gpulayer.model.job import JobSpec
from gpulayer.model.replica import Assignment, DeviceShare
from gpulayer.runtime import failpoints
from gpulayer.runtime.order_store import BLOCK_BYTES, FILE_NAME, RECORDS_AT, OrderStore, Recovered, open_order_store

N1 = NodeId("n-1")


def order(name: str, *, restart_serial: int = 0, env: tuple[tuple[str, str], ...] = ()) -> Order:
    assignment = Assignment(
        replica=ReplicaId(JobId(f"j-{name}"), 0),
        attempt=1,
        node=N1,
        revision=1,
        devices=(DeviceShare(uuid="GPU-8a1f9c1e-5b7e-4c0f-9d43-0a4d4c1a7f11", milli=1000),),
        restart_serial=restart_serial,
    )
    spec = JobSpec(kind="service", name=f"job-{name}", argv=("python", "-m", "server", "--model", name), env=env)
    return Order(assignment=assignment, spec=spec, job_name=spec.name)


def heard(index: int, *orders: Order, term: int = 1, registry: tuple[NodeId, ...] = (N1,)) -> HeardOrders:
    return HeardOrders(stamp=OrderStamp(1, term, index), orders=orders, registry=registry)


@contextmanager
def opened(directory: Path) -> Iterator[tuple[OrderStore, Recovered]]:
    store, recovered = open_order_store(directory)
    try:
        yield store, recovered
    finally:
        store.close()


def recovered(directory: Path) -> Recovered:
    with opened(directory) as (_, found):
        return found


def written(directory: Path, *each: HeardOrders) -> Path:
    with opened(directory) as (store, _):
        for one in each:
            store.persist(one)
    return directory / FILE_NAME


def spoil(path: Path, at: int, data: bytes = b"\xff\xff\xff\xff") -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def by_id(told: HeardOrders | None) -> dict[object, Order]:
    assert told is not None
    return {each.assignment.id: each for each in told.orders}


def test_where_nothing_was_ever_heard_nothing_is_said(tmp_path: Path) -> None:
    assert recovered(tmp_path) == Recovered(heard=None)
    assert list(tmp_path.iterdir()) == []


def test_what_was_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    path = written(tmp_path, heard(7, order("a"), order("b")))
    assert recovered(tmp_path) == Recovered(heard=heard(7, order("a"), order("b")))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == [FILE_NAME]


def test_changes_are_added_to_what_is_there_and_read_as_one(tmp_path: Path) -> None:
    path = written(tmp_path, heard(7, order("a"), order("b")))
    inode = path.stat().st_ino
    written(
        tmp_path,
        heard(8, order("a"), order("b", restart_serial=1)),
        heard(9, order("b", restart_serial=1), order("c"), registry=(N1, NodeId("n-2"))),
        heard(12, order("b", restart_serial=1), order("c"), term=3, registry=(N1, NodeId("n-2"))),
    )
    assert path.stat().st_ino == inode
    found = recovered(tmp_path)
    assert found.warnings == ()
    assert found.heard is not None
    assert found.heard.stamp == OrderStamp(1, 3, 12)
    assert by_id(found.heard) == by_id(heard(0, order("b", restart_serial=1), order("c")))
    assert found.heard.registry == (N1, NodeId("n-2"))


def test_random_histories_are_read_as_they_were_written(tmp_path: Path) -> None:
    rng = Random(4)
    held: dict[str, Order] = {}
    store, _ = open_order_store(tmp_path)
    for index in range(1, 400):
        name = str(rng.randrange(30))
        if rng.random() < 0.3:
            held.pop(name, None)
        else:
            held[name] = order(name, restart_serial=rng.randrange(5), env=(("K", "v" * rng.randrange(3000)),))
        last = heard(index, *held.values(), term=1 + index // 50)
        store.persist(last)
        if rng.random() < 0.1:
            store.close()
            store, found = open_order_store(tmp_path)
            assert found.warnings == ()
            assert found.heard is not None
            assert found.heard.stamp == last.stamp
            assert by_id(found.heard) == by_id(last)
    store.close()
    assert (tmp_path / FILE_NAME).stat().st_size < 2 * 2**20, "it was written anew now and then"


def test_a_record_that_was_not_finished_does_not_count_and_is_written_over(tmp_path: Path) -> None:
    """The power went while it was written: nobody was told that it is durable."""
    path = written(tmp_path, heard(7, order("a")))
    with opened(tmp_path) as (store, _):
        end = store._file.end if store._file is not None else 0
    spoil(path, end, b"\x00\x00\x01\x00 half of it")
    found = recovered(tmp_path)
    assert found.heard == heard(7, order("a"))
    assert "was not finished" in found.warnings[0]
    written(tmp_path, heard(8, order("a"), order("b")))
    assert recovered(tmp_path) == Recovered(heard=heard(8, order("a"), order("b")))


def test_a_damaged_record_costs_orders_and_not_the_term(tmp_path: Path) -> None:
    path = written(tmp_path, heard(7, order("a"), term=2), heard(9, order("b"), term=5))
    with opened(tmp_path) as (store, _):
        assert store._file is not None
        whole = store._file.whole_bytes
    spoil(path, RECORDS_AT + whole + 20)
    found = recovered(tmp_path)
    assert found.heard is not None
    assert (found.heard.stamp, found.heard.is_whole) == (OrderStamp(1, 5, 0), False)
    assert found.heard.orders == (order("a"),), "enough to look after what runs"
    assert any("no orders of term 5" in text for text in found.warnings)
    written(tmp_path, heard(10, order("b"), term=5))
    assert recovered(tmp_path) == Recovered(heard=heard(10, order("b"), term=5))


@pytest.mark.parametrize("block", [0, 1])
def test_one_damaged_block_is_said_and_made_good(tmp_path: Path, block: int) -> None:
    path = written(tmp_path, heard(7, order("a"), term=2))
    spoil(path, block * BLOCK_BYTES + 20)
    found = recovered(tmp_path)
    assert found.heard == heard(7, order("a"), term=2)
    assert f"block {block} is damaged" in found.warnings[0]
    written(tmp_path, heard(8, order("a"), term=2))
    assert recovered(tmp_path).warnings == ()


def test_without_any_orders_the_term_is_known_from_a_block(tmp_path: Path) -> None:
    path = written(tmp_path, heard(7, order("a"), term=6))
    spoil(path, 20)
    spoil(path, RECORDS_AT + 9)
    found = recovered(tmp_path)
    assert found.heard == HeardOrders(stamp=OrderStamp(1, 6, 0), is_whole=False)
    written(tmp_path, heard(8, term=6))
    assert recovered(tmp_path).heard == heard(8, term=6)


@pytest.mark.parametrize("content", [b"", b"\0" * 9000, b"garbage" * 3000])
def test_what_says_nothing_certain_is_refused_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    """Taken for nothing it would let the leader of last year start a batch again."""
    path = tmp_path / FILE_NAME
    path.write_bytes(content)
    with pytest.raises(StorageFailed) as caught:
        open_order_store(tmp_path)
    assert str(path) in caught.value.message
    assert "move the file away" in caught.value.hint


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("/etc/passwd")])
def test_what_is_no_file_is_refused(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / FILE_NAME)
    with pytest.raises(StorageFailed):
        open_order_store(tmp_path)


@pytest.mark.parametrize("cut", range(RECORDS_AT - 2, RECORDS_AT + 1200, 61))
def test_a_file_that_was_cut_anywhere_never_takes_the_term_back(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path, heard(7, order("a"), term=2), heard(9, order("a"), order("b"), term=3))
    os.truncate(path, cut)
    found = recovered(tmp_path)
    assert found.heard is not None
    assert found.heard.stamp >= OrderStamp(1, 3, 0)


def test_single_bits_that_flip_never_take_the_term_back(tmp_path: Path) -> None:
    path = written(tmp_path, heard(7, order("a"), term=2), heard(9, order("a"), order("b"), term=3))
    with opened(tmp_path) as (store, _):
        assert store._file is not None
        end = store._file.end
    good = path.read_bytes()
    rng = Random(1)
    for _ in range(300):
        bad = bytearray(good)
        at = rng.choice([rng.randrange(60), BLOCK_BYTES + rng.randrange(60), RECORDS_AT + rng.randrange(1200)])
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        found = recovered(tmp_path)
        assert found.heard is not None
        assert found.heard.stamp >= OrderStamp(1, 3, 0)
        is_used = at % BLOCK_BYTES < 37 or RECORDS_AT <= at < end
        assert found.warnings or not is_used, f"byte {at}"


def test_what_was_refused_by_the_disk_is_not_known_and_the_next_write_makes_it_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as (store, _):
        store.persist(heard(7, order("a")))
        with monkeypatch.context() as broken:
            broken.setattr(failpoints, "_armed", failpoints.parse("orders.before_sync=error"))
            with pytest.raises(StorageFailed) as caught:
                store.persist(heard(8, order("b")))
        assert "nothing new is begun or stopped here" in caught.value.hint
        store.persist(heard(9, order("c")))
    assert recovered(tmp_path) == Recovered(heard=heard(9, order("c")))


def test_a_full_disk_refuses_no_withdrawal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping what fills it is how it gets empty: room for that is kept."""
    held = {number: order(str(number), env=(("K", "v" * 600),)) for number in range(100)}
    with opened(tmp_path) as (store, _):
        store.persist(heard(1, *held.values()))
        whole = store._file.whole_bytes if store._file is not None else 0

        def full(fd: int, offset: int, size: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        for index in range(2, 99):
            del held[index]
            for number in (0, 1):
                held[number] = order(str(number), restart_serial=index, env=(("K", "v" * 600),))
            store.persist(heard(index, *held.values()))
        assert store._file is not None
        assert store._file.changes_bytes > whole, "enough to write the file anew, if there were room"
    found = recovered(tmp_path)
    assert found.heard is not None
    assert (found.heard.stamp.index, len(found.heard.orders)) == (98, 3)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with opened(tmp_path) as (store, _):
        with pytest.raises(StorageFailed) as caught:
            store.persist(heard(7, order("a")))
        assert caught.value.code == "disk_full"
    assert list(tmp_path.iterdir()) == [], "no half file is left"


def test_more_orders_than_one_record_holds_are_kept_in_several(tmp_path: Path) -> None:
    big = tuple(order(str(number), env=tuple((f"V{i}", "x" * 120_000) for i in range(4))) for number in range(12))
    with opened(tmp_path) as (store, _):
        store.persist(heard(7, *big))
        store.persist(heard(8, *big[1:]))
    found = recovered(tmp_path)
    assert found == Recovered(heard=heard(8, *big[1:]))


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.runtime.test_order_store import heard, order
from gpulayer.runtime.order_store import open_order_store
store, found = open_order_store(Path(sys.argv[1]))
index = found.heard.stamp.index if found.heard else 0
while True:
    index += 1
    orders = [order(str(number), restart_serial=index) for number in range(index % 7)]
    store.persist(heard(index, *orders, term=1 + index // 10))
    print(index, flush=True)
"""


def test_whatever_was_acknowledged_is_there_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    said = 0
    for round_ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parents[2])], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(20 + 13 * round_):
            said = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.stdout.close()
        process.wait()
        said = int(rest[-1]) if rest else said
        found = recovered(tmp_path)
        assert found.heard is not None
        index = found.heard.stamp.index
        assert said <= index <= said + 1
        assert found.heard.stamp.term == 1 + index // 10
        assert {each.assignment.restart_serial for each in found.heard.orders} <= {index}
        assert len(found.heard.orders) == index % 7


def test_a_thousand_orders_take_less_than_a_mebibyte_and_a_change_of_one_is_cheap(tmp_path: Path) -> None:
    held = [order(f"{number:04}") for number in range(1000)]
    with opened(tmp_path) as (store, _):
        store.persist(heard(1, *held))
        assert (tmp_path / FILE_NAME).stat().st_size < 2**20
        began = time.perf_counter()
        for index in range(2, 52):
            held[index] = order(f"{index:04}", restart_serial=1)
            store.persist(heard(index, *held))
        each = (time.perf_counter() - began) / 50
    assert each < 0.25, f"{each * 1000:.1f} ms"
