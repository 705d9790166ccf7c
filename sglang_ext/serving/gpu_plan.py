"""What the host's arguments must look like on a GPU, and what this package sets there.

The host has resolved its own choices (attention backend, graphs, page size) before it asks an algorithm; so the
backend is the one that will run, and graphs are switched off in the resolved record.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_ext.core.pass_sizes import batch_sizes
from sglang_ext.core.refusal import Refusal

logger = logging.getLogger(__name__)

DEVICE = "cuda"
BACKENDS = ("flashinfer", "triton")
FLASHINFER_KV = ("auto", "bfloat16", "bf16", "fp8_e4m3", "fp8_e5m2")
TRITON_KV = ("auto", "bfloat16", "bf16")


def check_gpu_args(args: Any) -> None:
    """Refuse what this release does not serve on a GPU.

    Raises:
        Refusal: one readable line naming the flag.
    """
    from sglang.srt.arg_groups.model_override_base import attention_backends_of

    algorithm = f"--speculative-algorithm {args.speculative_algorithm.lower()}"
    if args.device != DEVICE:
        raise Refusal(f"--device {args.device}", f"{algorithm} supports cpu and {DEVICE}", f"use --device {DEVICE}")
    prefill, decode = attention_backends_of(args)
    if prefill != decode:
        raise Refusal(
            f"attention backends {prefill} (prefill) and {decode} (decode)",
            f"{algorithm} supports one backend for both, {' or '.join(BACKENDS)}",
            "use --attention-backend alone",
        )
    if decode not in BACKENDS:
        raise Refusal(
            f"the attention backend is {decode}",
            f"{algorithm} supports {' and '.join(BACKENDS)}",
            "add --attention-backend flashinfer (for GPT-OSS targets, triton)",
        )
    allowed = FLASHINFER_KV if decode == "flashinfer" else TRITON_KV
    if args.kv_cache_dtype not in allowed:
        raise Refusal(
            f"--kv-cache-dtype {args.kv_cache_dtype}",
            f"{algorithm} with --attention-backend {decode} supports {', '.join(allowed)}",
            "use --kv-cache-dtype auto",
        )
    for flag, asked in _asked_graphs(args):
        raise Refusal(
            f"{flag} {asked}",
            f"{algorithm} captures decode passes itself, and whole ones (full)",
            "leave the flag out, or give it the value disabled",
        )
    for flag, on in (
        ("--enable-deterministic-inference", args.enable_deterministic_inference),
        ("--enable-torch-compile", args.enable_torch_compile),
        ("--enable-unified-memory", args.enable_unified_memory),
        ("--enable-hisparse", args.enable_hisparse),
    ):
        if on:
            raise Refusal(f"{flag} was given", f"{algorithm} does not support it on a GPU", "leave the flag out")


def _asked_graphs(args: Any) -> list[tuple[str, str]]:
    """Graph backends the user asked for by name that do not capture what this package captures."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase

    served = {Phase.DECODE: (None, Backend.DISABLED, Backend.FULL), Phase.PREFILL: (None, Backend.DISABLED)}
    given = {Phase.DECODE: args.cuda_graph_backend_decode, Phase.PREFILL: args.cuda_graph_backend_prefill}
    asked = [(f"--cuda-graph-backend-{phase}", value) for phase, value in given.items() if value not in served[phase]]
    # What --cuda-graph-config or an environment of the host fixed is only in the resolved record.
    resolved = {phase: getattr(args.cuda_graph_config, phase).backend for phase in Phase.ALL}
    fixed = [phase for phase in Phase.ALL if (phase, "backend") in args._cuda_graph_config_locked]
    asked += [
        (f"--cuda-graph-config, {phase} backend", str(resolved[phase]))
        for phase in fixed
        if resolved[phase] not in served[phase] and given[phase] is None
    ]
    return asked


def apply_gpu_defaults(args: Any) -> None:
    """Leave to the worker what only it can capture, and switch off what nobody can.

    The host cannot make up a verification to capture for an algorithm of a plugin, nor capture mask rows or taps; the
    legacy switches for graphs have been read by the time an algorithm may set anything.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = args.cuda_graph_config
    args.cuda_graph_config = with_phase(config, Phase.PREFILL, backend=Backend.DISABLED)
    # The host tunes kernels with a dummy verification, which it cannot make up for an algorithm of a plugin.
    args.disable_flashinfer_autotune = True
    logger.warning(
        "--speculative-algorithm %s on a GPU: CUDA graphs of prefills are off in this release",
        args.speculative_algorithm.lower(),
    )


def plan_graphs(args: Any, *, captures: bool) -> None:
    """Move the numbers of requests that decode passes are captured for from the host to the worker.

    The host then captures none itself. :func:`graph_batches` finds them in the record again, in the worker's process.

    Args:
        args: the host's resolved record.
        captures: whether decode passes can be captured on this device.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = args.cuda_graph_config
    decode = config.decode
    batches: list[int] = []
    if captures and decode.backend != Backend.DISABLED:
        largest = args.max_running_requests
        chosen = (Phase.DECODE, "bs") in args._cuda_graph_config_locked or args.cuda_graph_bs_decode is not None
        batches = decode.bs if chosen and decode.bs else batch_sizes(min(largest, decode.max_bs or largest))
        batches = sorted({min(size, largest) for size in batches})
    args.cuda_graph_config = with_phase(config, Phase.DECODE, backend=Backend.DISABLED, bs=batches)


def graph_batches(args: Any) -> list[int]:
    """Return the numbers of requests that the worker captures decode passes for, ascending; none for eager decoding."""
    return list(args.cuda_graph_config.decode.bs or [])
