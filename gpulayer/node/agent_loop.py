"""The loop that the agent runs in, with a word after each step: what it has heard may have changed what others read."""

from __future__ import annotations

from collections.abc import Callable

import trio

from gpulayer.core.agent import Agent
from gpulayer.core.replica.messages import AgentEffect, AgentEvent
from gpulayer.model.units import Instant
from gpulayer.runtime.drive import Inbox, drive


class AgentLoop:
    """Takes events from the start; `run` it once what it begins with has been put."""

    def __init__(self, agent: Agent, *, perform: Callable[[AgentEffect], None], on_stepped: Callable[[], None]) -> None:
        """Neither of the two waits."""
        self._agent, self._perform, self._on_stepped = agent, perform, on_stepped
        self._inbox: Inbox[AgentEvent] = Inbox()
        self._turned_at = 0.0

    def put_nowait(self, event: AgentEvent) -> None:
        self._inbox.put_nowait(event)

    async def run(self) -> None:
        """For good."""
        await drive(self, self._inbox, self._perform)

    def waits_seconds(self) -> float:
        """For how long no step was taken, though there is something to take one for."""
        return trio.current_time() - self._turned_at if len(self._inbox) else 0.0

    @property
    def deadline(self) -> Instant:
        return self._agent.deadline

    def step(self, event: AgentEvent, now: Instant) -> list[AgentEffect]:
        effects = self._agent.step(event, now)
        self._turned_at = now
        self._on_stepped()
        return effects
