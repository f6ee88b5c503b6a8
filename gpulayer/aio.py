"""The async client: `gpulayer.aio.connect()` is what `gpulayer.connect()` is elsewhere. Public names only."""

from __future__ import annotations

from gpulayer.client.aio import Client, Job, connect

__all__ = ["Client", "Job", "connect"]
