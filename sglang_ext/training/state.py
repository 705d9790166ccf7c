"""What a run reads back, its checkpoint and its workers' refusals, so that nothing bad ends in a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sglang_ext.core.refusal import Refusal

KEYS = ("step", "progress", "model", "optimizer", "config", "records")


def read_state(path: Path) -> dict[str, Any]:
    """Return the state that a training run wrote to ``path``.

    Raises:
        Refusal: if the file cannot be read or holds something else.
    """
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # what a damaged pickle makes torch raise has no end
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _damaged(path, reason) from error
    if not isinstance(state, dict):
        raise _damaged(path, f"it holds a {type(state).__name__}")
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise _damaged(path, f"it has no {missing[0]!r}")
    return state


def refusal_of_a_worker(trace: str) -> Refusal | None:
    """The refusal that a worker's traceback ends with, or None if it failed otherwise."""
    where, _, message = trace.strip().rpartition("\n")[2].partition("Refusal: ")
    if where != f"{Refusal.__module__}.":
        return None
    given, _, rest = message.partition("; ")
    allowed, _, fix = rest.rpartition(": ")
    return Refusal(given, allowed, fix)


def _damaged(path: Path, reason: str) -> Refusal:
    return Refusal(
        f"{path} is no checkpoint of a training run ({reason})",
        "a whole file written by `sglang-ext train` is needed",
        "restore it, or delete it to begin that run again",
    )
