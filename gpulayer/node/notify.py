"""Telling systemd how the daemon is (sd_notify(3)): READY, STATUS, WATCHDOG, STOPPING. Silent where nobody listens."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


class ServiceNotifier:
    """Sends datagrams to $NOTIFY_SOCKET. Never raises and never blocks: a deaf supervisor is not our fault."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        microseconds = environ.get("WATCHDOG_USEC", "")
        pid = environ.get("WATCHDOG_PID", "")
        wanted = microseconds.isdigit() and (not pid or pid == str(os.getpid()))
        # sd_watchdog_enabled(3): notify every half of the time.
        self.watchdog_interval_seconds: float | None = int(microseconds) / 2e6 if wanted and self._address else None

    def send(self, *assignments: str) -> None:
        """`READY=1`, `STATUS=…`: one datagram with a line each."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
                sock.sendto("\n".join(assignments).encode(), self._address)
        except OSError:
            return
