"""gpulayer: the hosts you have become one machine.

    import gpulayer as gl

    client = gl.connect()
    job = client.submit(gl.service(["python", "serve.py"], replicas=2))
    print(job.endpoints(wait=120))

`gpulayer.aio` has the same for async programs. Public names only. They are imported at first use, so that
`import gpulayer` and the command line stay fast.
"""

from __future__ import annotations

__version__ = "0.1.0"

# typing.TYPE_CHECKING without the import of typing: type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulayer import aio
    from gpulayer.client.logs import LogLine
    from gpulayer.client.requests import JobRequest, Retry, batch, service
    from gpulayer.client.sync import Client, Job, connect
    from gpulayer.client.waits import JobWaits
    from gpulayer.model.errors import (
        GpulayerError,
        InvalidRequest,
        JobEnded,
        NotFound,
        PermissionDenied,
        Refused,
        StorageFailed,
        Unreachable,
        WaitTimeout,
    )

_PUBLIC = {
    "Client": "gpulayer.client.sync",
    "GpulayerError": "gpulayer.model.errors",
    "InvalidRequest": "gpulayer.model.errors",
    "Job": "gpulayer.client.sync",
    "JobEnded": "gpulayer.model.errors",
    "JobRequest": "gpulayer.client.requests",
    "JobWaits": "gpulayer.client.waits",
    "LogLine": "gpulayer.client.logs",
    "NotFound": "gpulayer.model.errors",
    "PermissionDenied": "gpulayer.model.errors",
    "Refused": "gpulayer.model.errors",
    "Retry": "gpulayer.client.requests",
    "StorageFailed": "gpulayer.model.errors",
    "Unreachable": "gpulayer.model.errors",
    "WaitTimeout": "gpulayer.model.errors",
    "aio": "gpulayer.aio",
    "batch": "gpulayer.client.requests",
    "connect": "gpulayer.client.sync",
    "service": "gpulayer.client.requests",
}

__all__ = [
    "Client",
    "GpulayerError",
    "InvalidRequest",
    "Job",
    "JobEnded",
    "JobRequest",
    "JobWaits",
    "LogLine",
    "NotFound",
    "PermissionDenied",
    "Refused",
    "Retry",
    "StorageFailed",
    "Unreachable",
    "WaitTimeout",
    "__version__",
    "aio",
    "batch",
    "connect",
    "service",
]


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'gpulayer' has no attribute {name!r}")
    from importlib import import_module

    found = import_module(module)
    return found if module == f"gpulayer.{name}" else getattr(found, name)


def __dir__() -> list[str]:
    return sorted(__all__)
