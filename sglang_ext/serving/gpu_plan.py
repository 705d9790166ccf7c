"""What the host's arguments must look like on a GPU, and what this package sets there.

The host has resolved its own choices (attention backend, graphs, page size) before it asks an algorithm; so the
backend is the one that will run, and graphs are switched off in the resolved record.
"""

from __future__ import annotations

import logging
from typing import Any

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
            f"{algorithm} runs without CUDA graphs in this release",
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
    """Graph backends the user asked for by name."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase

    given = {
        "--cuda-graph-backend-decode": args.cuda_graph_backend_decode,
        "--cuda-graph-backend-prefill": args.cuda_graph_backend_prefill,
    }
    asked = [(flag, value) for flag, value in given.items() if value not in (None, "disabled")]
    # What --cuda-graph-config or an environment of the host fixed is only in the resolved record.
    resolved = {phase: getattr(args.cuda_graph_config, phase).backend for phase in Phase.ALL}
    fixed = [phase for phase in Phase.ALL if (phase, "backend") in args._cuda_graph_config_locked]
    asked += [
        (f"--cuda-graph-config, {phase} backend", str(resolved[phase]))
        for phase in fixed
        if resolved[phase] != Backend.DISABLED and given[f"--cuda-graph-backend-{phase}"] is None
    ]
    return asked


def apply_gpu_defaults(args: Any) -> None:
    """Switch off what the worker cannot run under yet, and say so.

    Graphs: mask rows and taps are part of no captured graph, and the legacy switch for graphs has been read by the time
    an algorithm may set anything.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = args.cuda_graph_config
    for phase in Phase.ALL:
        config = with_phase(config, phase, backend=Backend.DISABLED)
    args.cuda_graph_config = config
    # The host tunes kernels with a dummy verification, which it cannot make up for an algorithm of a plugin.
    args.disable_flashinfer_autotune = True
    logger.warning(
        "--speculative-algorithm %s on a GPU: CUDA graphs are off in this release",
        args.speculative_algorithm.lower(),
    )
