"""What the keeper of the feed takes of what other nodes tell it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpulayer.model.event import Event
from gpulayer.model.ids import NodeId
from gpulayer.node.event_relay import keep_events
from gpulayer.runtime.event_store import open_event_store
from gpulayer.wire.peer import EventsKept, EventsTold

GOOD = Event(source="n-1", epoch=1, seq=1, at_utc=1.0, kind="replica.ready", text="it is ready")


async def test_what_a_node_tells_is_kept_once(tmp_path: Path) -> None:
    store = await open_event_store(tmp_path / "events.db")
    for _ in range(2):
        assert keep_events(store, NodeId("n-1"), EventsTold(events=(GOOD,))) == EventsKept(epoch=1, seq=1)
    assert [event for _, event in await store.read()] == [GOOD]
    await store.close()


@pytest.mark.parametrize(
    ("node", "event"),
    [
        ("n-2", GOOD),
        ("n.1", replace(GOOD, source="n.1")),
        ("n-1", replace(GOOD, seq=-1)),
        ("n-1", replace(GOOD, epoch=10**18)),
    ],
)
async def test_what_the_store_does_not_take_is_passed_over(tmp_path: Path, node: str, event: Event) -> None:
    """A node may say anything; that ends nobody's daemon."""
    store = await open_event_store(tmp_path / "events.db")
    assert keep_events(store, NodeId(node), EventsTold(events=(event,))) == EventsKept(epoch=0, seq=0)
    assert await store.read() == []
    await store.close()
