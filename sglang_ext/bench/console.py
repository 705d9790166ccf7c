"""Progress on stderr: one line rewritten in place on a terminal, a line every so often elsewhere."""

from __future__ import annotations

import sys
import time

QUIET_S = 20.0
_last_s = -QUIET_S


def status(text: str) -> None:
    """Show where a long task is; the next status replaces it."""
    global _last_s
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif time.monotonic() - _last_s >= QUIET_S:
        print(text, file=sys.stderr, flush=True)
        _last_s = time.monotonic()


def finished(text: str) -> None:
    """Show the end of a task and keep it."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}{text}", file=sys.stderr, flush=True)
