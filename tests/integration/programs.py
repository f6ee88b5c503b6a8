"""Small programs that the tests submit. Each is the standard library only and starts in some ten milliseconds."""

from __future__ import annotations

import sys
from pathlib import Path

# -I -S: nothing of the environment, no site packages: twice as fast.
PYTHON = [sys.executable, "-I", "-S"]
HERE = Path(__file__).parent


def serve(*options: str) -> list[str]:
    """An HTTP server on $HOST:$PORT; see serve.py."""
    return [*PYTHON, str(HERE / "serve.py"), *options]


def sh(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def python(source: str) -> list[str]:
    return [*PYTHON, "-c", source]
