"""Structured logs of the daemon: one line per thing that happened, on stderr.

Lines are `time level event key=value`, or JSON where no person reads them. Under systemd the journal stamps the time.
"""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(log_format: str, *, least: int = logging.INFO) -> None:
    """`text`, `json`, or `auto`: text on a terminal and in the journal alike. `least`: the lowest level that is
    logged."""
    renderer: structlog.typing.Processor
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
