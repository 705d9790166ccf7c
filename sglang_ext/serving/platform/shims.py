"""Torch bodies for the few Triton or CUDA helpers that every speculative algorithm calls, and their installation.

Three go through public seams of the host (platform methods, the attention registry); the others are hooks and one
patched tensor method. All of them are in place only where :class:`~.cpu.SglangExtCpuPlatform` is active.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_ext.serving.platform import seeded_sampling
from sglang_ext.serving.platform.activation import BACKEND_NAME, threads_are_bound

PADDING_HOOK = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"
THREADS_HOOK = "sglang.srt.utils.numa_utils.init_threads_binding"
REQ_TO_TOKEN_HOOK = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"


def write_request_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write each request's new slots into columns ``start..end-1`` of its row of the slot table."""
    counts = (end_offset - start_offset).long()
    rows = torch.repeat_interleave(req_pool_indices.long(), counts)
    first = torch.repeat_interleave(start_offset.long() - (counts.cumsum(0) - counts), counts)
    columns = first + torch.arange(rows.numel())
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def block_cache_locs(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """Return the slots ``[B * draft_token_num]`` (int64) of each request's next positions from ``start_offset`` on."""
    columns = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], columns].long().view(-1)


def share_cpus(stock: Callable[..., str], *, numa_index: int, world_size: int) -> str:
    """Return the CPUs of one process of a server, comma-separated (hook around the host's own choice).

    The host wants a memory node for every process and refuses to start where there are fewer. Then the CPUs this server
    may use are dealt out instead; processes beyond their number share them.
    """
    from sglang.srt.utils.common import get_cpu_ids_by_node

    if threads_are_bound() or world_size <= len(get_cpu_ids_by_node()):
        return stock(numa_index=numa_index, world_size=world_size)
    cpus = sorted(os.sched_getaffinity(0))
    own = cpus[numa_index::world_size] or [cpus[numa_index % len(cpus)]]
    return ",".join(map(str, own))


def keep_heads(stock: Callable[..., Any], model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Return a target's config as it is (hook around the host's own choice).

    The host pads the heads of a target that do not divide by ``--tp-size`` on a CPU. Its loader fills the padding with
    its own CPU kernels only; here key/value heads are repeated instead, as on a GPU.
    """
    return stock(model_config, load_config, tp_size) if tp_size == 1 else model_config


def make_attention_backend(model_runner: Any) -> Any:
    """Factory the host calls for ``--attention-backend torch_native``."""
    from sglang_ext.serving.attention.sdpa import SdpaBackend

    return SdpaBackend(model_runner)


def allow_draft_backend() -> None:
    """Let the host accept our backend for drafters and deterministic inference; runs before arguments are parsed."""
    from sglang.srt.arg_groups import choices

    if BACKEND_NAME not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([BACKEND_NAME])
    if BACKEND_NAME not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.add_deterministic_attention_backend_choices([BACKEND_NAME])


def hook_thread_binding() -> None:
    """Let :func:`share_cpus` choose the CPUs of each process; the host asks before it imports anything of a model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(THREADS_HOOK, share_cpus, HookType.AROUND)


@functools.cache
def install_worker_shims() -> None:
    """Put everything in place in a process that runs a model; other processes never import what it touches.

    The host calls this while it imports its model runner. In a scheduler process that is before it loads plugins, and
    it applies all hooks afterwards; where plugins were loaded earlier the hook is applied here.
    """
    from sglang.srt import plugins
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ATTENTION_BACKENDS[BACKEND_NAME] = make_attention_backend
    # GPT-OSS is accepted with a few backend names only; there is no Triton here that this one could mean.
    ATTENTION_BACKENDS["triton"] = make_attention_backend
    allow_draft_backend()
    _tolerate_record_stream()
    HookRegistry.register(REQ_TO_TOKEN_HOOK, write_request_slots, HookType.REPLACE)
    HookRegistry.register(PADDING_HOOK, keep_heads, HookType.AROUND)
    HookRegistry.register(seeded_sampling.SAMPLE_HOOK, seeded_sampling.multinomial_with_seed, HookType.REPLACE)
    HookRegistry.register(seeded_sampling.BATCH_INVARIANT_HOOK, seeded_sampling.keep_torch_kernels, HookType.REPLACE)
    if plugins._plugins_loaded:
        HookRegistry.apply_hooks()


def _tolerate_record_stream() -> None:
    stock = torch.Tensor.record_stream

    @functools.wraps(stock)
    def record_stream(self: Tensor, stream: Any) -> None:
        # Some workers pin tensors to the forward stream without asking for the device; a CPU has one stream.
        if self.device.type != "cpu":
            stock(self, stream)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]


def assert_installed() -> None:
    """Check that the registry entry and the hook are in place.

    Raises:
        RuntimeError: naming what is missing and how to fix it.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache import allocation

    fix = "run `sglang-ext doctor`; if SGLANG_PLUGINS is set, add sglang_ext and sglang_ext_cpu to it"
    if ATTENTION_BACKENDS[BACKEND_NAME] is not make_attention_backend:
        raise RuntimeError(f"another plugin replaced the {BACKEND_NAME} attention backend of sglang_ext: {fix}")
    hooked = allocation.assign_req_to_token_pool_func
    if not hasattr(hooked, "__wrapped__"):
        raise RuntimeError(f"the CPU hook on {REQ_TO_TOKEN_HOOK} is not in place: {fix}")
