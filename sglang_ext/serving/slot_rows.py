"""Width of the host's table of slots: one row per request, long enough for what a decode step reserves.

The host reserves twice a block of tokens ahead of every request but widens a row by one block only (pages of one
token), so a long block near the context limit would be written past its row, into another request's.
"""

from __future__ import annotations

import functools

ROW_HOOK = "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len"


def room_for_reserve(extra: int) -> int:
    """Return the tokens a row has beyond the context: the host's own number, or the whole reserve (hook)."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return max(extra, get_alloc_reserve_per_decode())


@functools.cache
def install() -> None:
    """Widen the rows in the process that holds the worker, before its pools exist."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ROW_HOOK, room_for_reserve, HookType.AFTER)
    HookRegistry.apply_hooks()
