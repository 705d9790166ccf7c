"""Start-up: flags become one frozen plan, and whatever cannot work is refused in one line that names the flag."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.core.refusal import Refusal
from sglang_ext.serving.algorithm import validate_server_args
from sglang_ext.serving.plan import SCRIPTED_BLOCK, resolve_plan

ALLOWED: dict[str, Any] = {
    "speculative_algorithm": "FLEXDRAFT",
    "pp_size": 1,
    "tp_size": 1,
    "dp_size": 1,
    "dcp_size": 1,
    "attn_cp_size": 1,
    "enable_layernorm_sp": False,
    "enable_attn_tp_input_scattered": False,
    "tokenizer_worker_num": 1,
    "enable_dp_attention": False,
    "disaggregation_mode": "null",
    "enable_two_batch_overlap": False,
    "enable_lora": None,
    "lora_paths": None,
    "enable_hierarchical_cache": False,
    "enable_pdmux": False,
    "enable_mixed_chunk": False,
    "enable_return_hidden_states": False,
    "enable_watermark": False,
    "quantization": None,
    "speculative_adaptive": False,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_use_rejection_sampling": False,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "speculative_token_map": None,
    "speculative_draft_window_size": None,
    "speculative_dflash_block_size": None,
}


def test_the_plain_command_line_is_accepted() -> None:
    validate_server_args(SimpleNamespace(**ALLOWED))


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("pp_size", 2, "--pp-size"),
        ("dcp_size", 2, "--dcp-size"),
        ("attn_cp_size", 2, "--attn-cp-size"),
        ("enable_layernorm_sp", True, "--enable-layernorm-sp"),
        ("enable_attn_tp_input_scattered", True, "--enable-attn-tp-input-scattered"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode"),
        ("enable_lora", True, "--enable-lora"),
        ("lora_paths", ["a"], "--enable-lora"),
        ("enable_mixed_chunk", True, "--enable-mixed-chunk"),
        ("enable_return_hidden_states", True, "--enable-return-hidden-states"),
        ("quantization", "fp8", "--quantization"),
        ("speculative_adaptive", True, "--speculative-adaptive"),
        ("speculative_num_steps", 3, "--speculative-num-steps"),
        ("speculative_accept_threshold_acc", 0.9, "--speculative-accept-threshold-acc"),
        ("speculative_use_rejection_sampling", True, "--speculative-use-rejection-sampling"),
        ("speculative_dflash_block_size", 8, "--speculative-dflash-block-size"),
    ],
)
def test_unsupported_flags_are_named(field: str, value: Any, flag: str) -> None:
    with pytest.raises(Refusal) as refused:
        validate_server_args(SimpleNamespace(**{**ALLOWED, field: value}))
    assert str(refused.value).startswith(f"{flag} was given")
    assert "\n" not in str(refused.value)


def test_no_drafter_for_an_unknown_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal, match="--speculative-draft-model-path"):
        resolve_plan("FLEXDRAFT", model_path=str(tmp_path), drafter_path=None, block_size=None, options=None)


def test_a_drafter_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="--speculative-draft-model-path"):
        resolve_plan(
            "FLEXDRAFT", model_path=str(tmp_path), drafter_path=str(tmp_path / "no"), block_size=None, options=None
        )


def test_scripted_plan_needs_no_drafter() -> None:
    plan = resolve_plan("SCRIPTED", model_path="anything", drafter_path=None, block_size=None, options=None)
    assert plan.block_size == SCRIPTED_BLOCK
    assert plan.to_dict()["options"]["mode"] == "auto"
