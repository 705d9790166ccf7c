"""Starting SGLang in this process tree, and what is asked of it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.serving.plan import resolve_plan

COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "attention_backend": "flashinfer",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.6,
    # A pool of one size for all: memory can be compared, and servers that are started side by side fit.
    "max_total_tokens": 40960,
    "disable_flashinfer_autotune": True,
    "random_seed": 0,
    "log_level": "warning",
}
EAGER: dict[str, Any] = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
GRAPHS: dict[str, Any] = {"cuda_graph_max_bs_decode": 16, "cuda_graph_backend_prefill": "disabled"}
"""Graphs of decoding steps as SGLang makes them by itself, for the batches that are measured; no prefill is timed."""


@dataclass(frozen=True)
class Variant:
    """One way of running steps.

    Attributes:
        name: in results.
        arguments: SGLang's.
        options: ours, for servers that draft.
    """

    name: str
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


PLAIN_VARIANTS = (Variant("graphs", GRAPHS), Variant("eager", EAGER))
DRAFTING_GRAPHS: dict[str, Any] = {"cuda_graph_bs_decode": [1, 2, 4, 8, 16], "cuda_graph_backend_prefill": "disabled"}
"""Passes as this package captures them, for the batches that are measured."""
DRAFTING_VARIANTS = (Variant("graphs", DRAFTING_GRAPHS), Variant("eager", EAGER))
"""A variant here is compared with plain decoding, and timed, for every way of drafting; the first has time first."""


def plain_args(target: Path, variant: Variant, **more: Any) -> dict[str, Any]:
    """Arguments of a server without speculation."""
    return {"model_path": str(target), **COMMON, **variant.arguments, **more}


def drafting_args(
    target: Path, variant: Variant, algorithm: str, drafter: Path, options: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Arguments of a server with one of our algorithms."""
    return plain_args(
        target,
        variant,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(drafter),
        speculative_adaptive_config=json.dumps(options | variant.options),
        **more,
    )


def check_args(args: dict[str, Any]) -> None:
    """Make sure, without a device, that SGLang has every argument and that ours resolve to a plan."""
    from sglang.srt.arg_groups.arg_utils import field_names
    from sglang.srt.server_args import ServerArgs

    unknown = sorted(set(args) - field_names(ServerArgs))
    if unknown:
        raise ValueError(f"SGLang has no arguments {unknown}")
    if "speculative_algorithm" in args:
        resolve_plan(
            args["speculative_algorithm"],
            model_path=args["model_path"],
            drafter_path=args["speculative_draft_model_path"],
            block_size=None,
            options=args["speculative_adaptive_config"],
        )


class Engine:
    """An SGLang engine for the time of a ``with`` block."""

    def __init__(self, args: dict[str, Any]) -> None:
        self._args = args

    def __enter__(self) -> Engine:
        import sglang

        started = time.perf_counter()
        self._engine = sglang.Engine(**self._args)
        self.start_seconds = round(time.perf_counter() - started, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()

    def generate(
        self, prompts: list[list[int]], tokens: int, options: dict[str, Any] | None = None, *, logprobs: bool = False
    ) -> list[dict[str, Any]]:
        """Decode ``tokens`` greedy tokens after each prompt, in one batch, drafting as ``options`` say."""
        params: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        if options is not None:
            params["custom_params"] = {"speculative": options}
        more = {"return_logprob": True, "top_logprobs_num": 2} if logprobs else {}
        found: list[dict[str, Any]] = self._engine.generate(input_ids=prompts, sampling_params=params, **more)
        return found
