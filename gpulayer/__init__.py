"""gpulayer: the hosts you have become one machine.

Public names only. They are imported at first use, so that `import gpulayer` and the command line stay fast.
"""

from __future__ import annotations

__version__ = "0.1.0"

_PUBLIC = {
    "connect": "gpulayer.client.sync",
    "service": "gpulayer.client.requests",
    "batch": "gpulayer.client.requests",
    "Retry": "gpulayer.client.requests",
    "GpulayerError": "gpulayer.model.errors",
    "WaitTimeout": "gpulayer.model.errors",
}

__all__ = ["GpulayerError", "Retry", "WaitTimeout", "__version__", "batch", "connect", "service"]


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'gpulayer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)
