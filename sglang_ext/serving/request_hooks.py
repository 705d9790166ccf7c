"""Two corrections in the host's front end: bad requests get 400, and proposed drafts are counted as verified.

Both run in the server's main process and only for our algorithms; on any other server they do nothing.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_spec

from sglang_ext.core.config import parse_request_options
from sglang_ext.core.schedule import Mode
from sglang_ext.testing.scripts import SCRIPTS, TRANSCRIPT_KEY

VALIDATE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
METRICS = "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics"


def check_prompt(input_ids: list[int] | None, vocab_size: int) -> None:
    """Refuse a prompt that would only fail in the scheduler, where a failure ends the server.

    Raises:
        ValueError: there is no token, or one that the target does not have; the server answers 400 with this message.
    """
    if not input_ids:
        raise ValueError("the prompt has no tokens; at least one is needed")
    for token in (min(input_ids), max(input_ids)):
        if not 0 <= token < vocab_size:
            raise ValueError(f"the prompt has token id {token}; ids from 0 to {vocab_size - 1} are allowed")


def check_embeds(rows: Any, hidden_size: int, dtype: torch.dtype) -> None:
    """Refuse embeddings that do not fit the target; the host hands them to it as bfloat16, unseen.

    Raises:
        ValueError: the server answers 400 with this message.
    """
    if dtype != torch.bfloat16:
        raise ValueError(f"input_embeds need a server with --dtype bfloat16; this one has {dtype}")
    numbers = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == hidden_size and all(isinstance(x, int | float) for x in row)
        for row in rows
    )
    if not numbers or not rows:
        raise ValueError(f"input_embeds is one list of {hidden_size} numbers, the hidden size, for every token")


def check_logprobs(top_logprobs_num: int | None, vocab_size: int) -> None:
    """Refuse to report more tokens per position than there are: the scheduler would end over it.

    Raises:
        ValueError: the server answers 400 with this message.
    """
    if top_logprobs_num is not None and not 0 <= top_logprobs_num <= vocab_size:
        raise ValueError(f"top_logprobs_num is {top_logprobs_num}; 0 to {vocab_size}, the vocabulary, is allowed")


def check_options(params: Any, scripted: bool) -> None:
    """Refuse sampling parameters that the host stumbles over, and bad overrides.

    Raises:
        ValueError: the server answers 400 with this message.
    """
    if not isinstance(params, dict):
        raise ValueError(f"sampling_params is a {type(params).__name__}; one object for one prompt is allowed")
    patterns = params.get("stop_regex") or []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            re.compile(pattern)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"stop_regex has {pattern!r}, which is no regular expression ({error})") from error
    custom = params.get("custom_params")
    options = parse_request_options(custom)
    if scripted and custom is not None:
        _check_transcript(custom.get(TRANSCRIPT_KEY))
    if options.script is None:
        return
    if not scripted:
        raise ValueError("custom_params['speculative'].script needs a server with --speculative-algorithm scripted")
    if options.script not in SCRIPTS:
        raise ValueError(f"custom_params['speculative'].script is {options.script!r}; allowed: {', '.join(SCRIPTS)}")


def check_mode(params: dict[str, Any]) -> None:
    """Refuse a request in parallel mode to a drafter that never joins the target's pass.

    Raises:
        ValueError: the server answers 400 with this message.
    """
    if parse_request_options(params.get("custom_params")).mode == Mode.PARALLEL.value:
        raise ValueError(
            f"custom_params['speculative'].mode is {Mode.PARALLEL.value!r}; a server with --speculative-algorithm "
            "dflare allows auto, sequential and plain"
        )


def _check_transcript(transcript: Any) -> None:
    if transcript is None:
        return
    if not isinstance(transcript, list) or not all(type(token) is int and 0 <= token < 2**31 for token in transcript):
        raise ValueError(f"custom_params[{TRANSCRIPT_KEY!r}] is no list of token ids")


@functools.cache
def install(algorithms: tuple[str, ...]) -> None:
    """Attach the hooks in this process; ``algorithms`` are the names they act for."""

    from sglang.srt.managers.io_struct import GenerateReqInput

    def ours() -> bool:
        return get_spec().speculative_algorithm in algorithms

    def validate(manager: Any, obj: Any, input_ids: Any) -> None:
        if ours() and isinstance(obj, GenerateReqInput):
            config = manager.model_config
            if obj.input_embeds is None:
                check_prompt(input_ids, config.vocab_size)
            else:
                check_embeds(obj.input_embeds, config.hidden_size, config.dtype)
            check_logprobs(obj.top_logprobs_num, config.vocab_size)
            check_options(obj.sampling_params, scripted=get_spec().speculative_algorithm == "SCRIPTED")
            if get_spec().speculative_algorithm == "DFLARE":
                check_mode(obj.sampling_params)

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
