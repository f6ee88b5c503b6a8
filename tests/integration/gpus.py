"""What tests of GPUs ask a daemon and its host, in few words."""

from __future__ import annotations

from typing import Any

from tests.integration.daemon import Daemon, environment, wait_for

SLEEP = ["sleep", "1000"]


def node(daemon: Daemon) -> dict[str, Any]:
    return dict(daemon.call("GET", "/v1/nodes")[0])


def devices(daemon: Daemon) -> dict[str, dict[str, Any]]:
    return {device["uuid"]: device for device in node(daemon)["devices"]}


def wait_device(daemon: Daemon, uuid: str, what: str, *, seconds: float = 10.0, **wanted: Any) -> dict[str, Any]:
    """Until the device's key `what` holds the text, or is null where that is empty."""

    def look() -> dict[str, Any] | None:
        device = devices(daemon).get(uuid)
        if device is None:
            return None
        text = wanted["text"]
        said = device[what]
        return device if (text in said if text and said else not text and said is None) else None

    found = wait_for(look, seconds, lambda: f"{devices(daemon).get(uuid)}\n{daemon.log_tail()}")
    assert found is not None
    return found


def held(daemon: Daemon, job: str) -> str:
    """The UUIDs that the job's process sees, as the host says it."""
    replica = daemon.wait_replica(job, lambda replica: replica["pid"] is not None)
    found = dict(line.split(b"=", 1) for line in environment(replica["pid"]) if b"=" in line)
    assert found[b"CUDA_DEVICE_ORDER"] == b"PCI_BUS_ID"
    return found[b"CUDA_VISIBLE_DEVICES"].decode()


def ready(daemon: Daemon, **spec: Any) -> str:
    job = daemon.submit(SLEEP, port=False, spread="any", **spec)
    daemon.wait_ready(job)
    return job
