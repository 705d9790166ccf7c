"""The host's KV pool without the Triton kernel it warms up when a speculative algorithm is on."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuKVPool(MHATokenToKVPool):
    """Moves cached rows with torch indexing; everything else is the host's."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
