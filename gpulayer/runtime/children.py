"""What a process of gpulayer's own inherits, so that the programs of its user do not change what it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import gpulayer


def without_users_modules(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the PYTHONPATH that is for the user's programs: a secrets.py there would be taken for Python's own. It
    stays where gpulayer itself is found by it."""
    environment = dict(environ)
    home = Path(gpulayer.__file__).resolve().parent.parent
    if home not in [Path(entry).resolve() for entry in environment.get("PYTHONPATH", "").split(os.pathsep)]:
        environment.pop("PYTHONPATH", None)
    return environment
