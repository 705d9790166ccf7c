"""Where the time of a step goes, measured inside the worker when the option ``profile`` is on.

Sections nest; each is charged its own time only, so the sections of a step add up to the step. What no section claims
stays with ``other``: the plugin's own bookkeeping. When the option is off every call returns one shared empty context.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

OTHER = "other"
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass
class _Totals:
    """Sums over the steps of one mode and batch size; milliseconds."""

    steps: int = 0
    ms: dict[str, float] = field(default_factory=dict)


class StepProfile:
    """Accumulates section times by mode and batch size.

    Args:
        enabled: the option ``profile``.
        device: the worker's device; on an accelerator every section boundary waits for it, so that time is charged to
            the section that caused it (and steps get slower).
    """

    def __init__(self, enabled: bool, device: str) -> None:
        self.enabled = enabled
        self._on_cpu = torch.device(device).type == "cpu"
        self._totals: dict[tuple[str, int], _Totals] = {}
        self._step: dict[str, float] = {}
        self._key: tuple[str, int] | None = None
        self._open: list[_Section] = []

    def step(self) -> AbstractContextManager[None]:
        """Return the context of one whole step; :meth:`label` must be called inside it for the step to count."""
        return self._timed_step() if self.enabled else _NOTHING

    def section(self, name: str) -> AbstractContextManager[None]:
        """Return the context of one part of a step."""
        return self._timed(name) if self.enabled else _NOTHING

    def label(self, modes: list[str]) -> None:
        """Say what the open step is: the modes of its requests."""
        if self.enabled:
            self._key = (modes[0] if len(set(modes)) == 1 else "mixed", len(modes))

    def watch(self, module: torch.nn.Module, name: str) -> None:
        """Charge every call of ``module`` to ``name``; nothing is attached when the option is off."""
        if self.enabled:
            module.register_forward_pre_hook(lambda *_: self._enter(name))
            module.register_forward_hook(lambda *_: self._leave())

    def to_dict(self) -> list[dict[str, Any]]:
        """Return ``[{"mode", "batch", "steps", "ms": {section: total milliseconds}}]``, JSON types only."""
        return [
            {"mode": mode, "batch": batch, "steps": totals.steps, "ms": dict(totals.ms)}
            for (mode, batch), totals in self._totals.items()
        ]

    @contextmanager
    def _timed_step(self) -> Iterator[None]:
        self._step, self._key = {}, None
        self._open.clear()  # a step that failed half-way left its sections open
        self._enter(OTHER)
        yield
        self._leave()
        if self._key is None:
            return
        totals = self._totals.setdefault(self._key, _Totals())
        totals.steps += 1
        for name, ms in self._step.items():
            totals.ms[name] = totals.ms.get(name, 0.0) + ms

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._enter(name)
        yield
        self._leave()

    def _enter(self, name: str) -> None:
        self._open.append(_Section(name, self._now()))

    def _leave(self) -> None:
        section = self._open.pop()
        elapsed = self._now() - section.started
        self._step[section.name] = self._step.get(section.name, 0.0) + elapsed - section.inner
        if self._open:
            self._open[-1].inner += elapsed

    def _now(self) -> float:
        # Nothing may wait for a device that is recording a pass; what is timed then is no step.
        if not self._on_cpu and not torch.cuda.is_current_stream_capturing():
            torch.accelerator.synchronize()
        return time.perf_counter() * 1000.0


@dataclass
class _Section:
    """An open section: when it began, and how much of its time belongs to sections inside it; milliseconds."""

    name: str
    started: float
    inner: float = 0.0
