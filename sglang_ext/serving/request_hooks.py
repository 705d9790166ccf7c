"""Two corrections in the host's front end: bad overrides get 400, and proposed drafts are counted as verified.

Both run in the server's main process and only for our algorithms; on any other server they do nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_spec

from sglang_ext.core.config import parse_request_options
from sglang_ext.testing.scripts import SCRIPTS

VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
METRICS = "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics"


@functools.cache
def install(algorithms: tuple[str, ...]) -> None:
    """Attach the hooks in this process; ``algorithms`` are the names they act for."""

    def ours() -> bool:
        return get_spec().speculative_algorithm in algorithms

    def validate(manager: Any, obj: Any, input_ids: Any) -> None:
        params = obj.sampling_params
        if not ours() or not isinstance(params, dict):
            return
        options = parse_request_options(params.get("custom_params"))
        if options.script is None:
            return
        if get_spec().speculative_algorithm != "SCRIPTED":
            raise ValueError("custom_params['speculative'].script needs a server with --speculative-algorithm scripted")
        if options.script not in SCRIPTS:
            raise ValueError(
                f"custom_params['speculative'].script is {options.script!r}; allowed: {', '.join(SCRIPTS)}"
            )

    def count_verified(result: None, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
        # The host assumes that every step verifies the whole block; selective verification and plain steps do not.
        if not ours() or "spec_num_proposed_drafts" not in meta_info:
            return
        proposed = recv_obj.spec_num_cap_tokens[i]
        meta_info["spec_num_proposed_drafts"] = proposed
        meta_info["spec_accept_rate"] = meta_info["spec_num_correct_drafts"] / proposed if proposed else 0.0

    HookRegistry.register(VALIDATE, validate, HookType.BEFORE)
    HookRegistry.register(METRICS, count_verified, HookType.AFTER)
    HookRegistry.apply_hooks()
