"""Adds the resolved plan and what was measured so far to ``/server_info``.

They appear in ``internal_states[0]`` as ``speculative_plan``, ``speculative_drafter_bytes``,
``speculative_drafter_kv_bytes_per_token``, ``speculative_pace`` (step times by mode and batch size, mean accept
length) and, if asked for, ``speculative_profile``.
"""

from __future__ import annotations

import functools
from typing import Any

STATE_HOOK = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative"


def add_plan(result: None, controller: Any, state: dict[str, Any]) -> None:
    """Add our worker's plan and profile to the scheduler's state (hook after the host's own entries)."""
    worker = controller.scheduler.draft_worker
    state["speculative_plan"] = worker.plan.to_dict()
    state["speculative_drafter_bytes"] = worker.drafter_bytes
    state["speculative_drafter_kv_bytes_per_token"] = worker.drafter_kv_bytes_per_token
    state["speculative_pace"] = worker.pace.to_dict()
    if worker.profile.enabled:
        state["speculative_profile"] = worker.profile.to_dict()


@functools.cache
def install() -> None:
    """Attach :func:`add_plan` in the process that holds the worker; other processes never import the scheduler."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(STATE_HOOK, add_plan, HookType.AFTER)
    HookRegistry.apply_hooks()
