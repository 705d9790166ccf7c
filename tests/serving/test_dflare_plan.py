"""Start-up of dflare servers: what cannot work is refused in one line, before any weight is loaded where possible."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from safetensors.torch import load_file, save_file

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.tapped import checkpoint
from sglang_ext.serving.algorithm import check_drafter, validate_server_args
from sglang_ext.serving.plan import SpecPlan, resolve_plan
from sglang_ext.serving.request_hooks import check_mode
from sglang_ext.serving.taps import TapRecorder
from sglang_ext.testing.drafters import edit_config
from sglang_ext.testing.tapped_drafters import untrained_tapped_drafter
from tests.serving.test_plan import ALLOWED
from tests.unit.tiny import LAYERS, target_config, write_drafter, write_target

FLAG = "--speculative-draft-model-path"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), target_config(rope_theta=10000.0))


@pytest.fixture(params=("dflare", "dflash"))
def drafter(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> Path:
    return untrained_tapped_drafter(target, tmp_path / "drafter", method=request.param, block_size=6)


def plan(target: Path, drafter: Path | None, *, block_size: int | None = None, options: str | None = None) -> SpecPlan:
    return resolve_plan(
        "DFLARE",
        model_path=str(target),
        drafter_path=None if drafter is None else str(drafter),
        block_size=block_size,
        options=options,
    )


def assert_refuses(words: tuple[str, ...], act: Any) -> None:
    with pytest.raises(Refusal) as error:
        act()
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, (word, message)


def edit_taps(folder: Path, ids: list[int]) -> Path:
    def edit(raw: dict[str, Any]) -> None:
        raw["dflash_config"]["target_layer_ids"] = ids

    return edit_config(folder, edit)  # type: ignore[arg-type]


def test_both_methods_are_planned_by_their_tensors(target: Path, drafter: Path) -> None:
    check_drafter("DFLARE", str(drafter))
    for asked, size in ((None, 6), (6, 6), (3, 3)):
        resolved = plan(target, drafter, block_size=asked)
        assert (resolved.algorithm, resolved.drafter_path, resolved.block_size) == ("DFLARE", str(drafter), size)


@pytest.mark.parametrize("asked", (1, 7, -2))
def test_a_larger_block_than_trained_is_refused(target: Path, drafter: Path, asked: int) -> None:
    words = (f"--speculative-num-draft-tokens is {asked}", "2 to 6")
    assert_refuses(words, lambda: plan(target, drafter, block_size=asked))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, LAYERS], ("target_layer_ids", f"0 to {LAYERS - 1}")),
        ([-1, 2], ("target_layer_ids",)),
        ([2, 1], ("target_layer_ids", "increasing")),
        ([1, LAYERS - 1], (f"[1, {LAYERS - 1}]", f"0 to {LAYERS - 2}", FLAG)),
    ],
)
def test_taps_outside_the_target_are_refused(target: Path, drafter: Path, ids: list[int], words: Any) -> None:
    assert_refuses(words, lambda: plan(target, edit_taps(drafter, ids)))


def test_other_numbers_of_taps_or_layers_than_the_tensors_are_refused(drafter: Path) -> None:
    edit_taps(drafter, [1, 2, 3])
    assert_refuses(("model.safetensors", "shape"), lambda: checkpoint.load(drafter))
    edit_taps(drafter, [1, 2])
    edit_config(drafter, lambda raw: raw.update(num_hidden_layers=3))
    assert_refuses(("layers.2.",), lambda: checkpoint.load(drafter))
    edit_config(drafter, lambda raw: raw.update(num_hidden_layers=1))
    assert_refuses(("layers.1.",), lambda: checkpoint.load(drafter))


def test_a_missing_tensor_is_refused(drafter: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    del tensors["hidden_norm.weight"]
    save_file(tensors, drafter / "model.safetensors")
    assert_refuses(("hidden_norm.weight",), lambda: checkpoint.load(drafter))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, ("model.safetensors", "asks for")),
        ({"num_target_layers": 9}, ("layer count is 9", str(LAYERS), FLAG)),
        ({"vocab_size": 99}, ("vocabulary is 99", "61", FLAG)),
    ],
)
def test_a_drafter_of_another_target_is_refused(target: Path, drafter: Path, changes: Any, words: Any) -> None:
    assert_refuses(words, lambda: plan(target, edit_config(drafter, lambda raw: raw.update(changes))))


def test_a_target_that_cannot_be_tapped_is_refused(tmp_path: Path, drafter: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    assert_refuses(("MambaForCausalLM", "LlamaForCausalLM", "GptOssForCausalLM"), lambda: plan(tmp_path, drafter))
    blind = torch.nn.Module()
    blind.model = torch.nn.Linear(2, 2)
    assert_refuses(("hidden states", FLAG), lambda: TapRecorder(blind, [0], FLAG))


def test_a_flexdraft_drafter_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "flexdraft")
    words = (str(tmp_path / "flexdraft"), "layer_fusion_weights", "fc.weight")
    assert_refuses(words, lambda: plan(target, tmp_path / "flexdraft"))
    assert_refuses(words, lambda: check_drafter("DFLARE", str(tmp_path / "flexdraft")))


def test_no_drafter_is_refused(target: Path) -> None:
    assert_refuses((FLAG, "DFlare or DFlash"), lambda: plan(target, None))


def test_parallel_mode_is_refused_at_start_and_per_request(target: Path, drafter: Path) -> None:
    assert_refuses(("parallel", "sequential"), lambda: plan(target, drafter, options='{"mode": "parallel"}'))
    for mode in ("auto", "sequential", "plain"):
        assert plan(target, drafter, options=json.dumps({"mode": mode})).options.mode == mode
        check_mode(asking(mode))
    check_mode({})
    with pytest.raises(ValueError, match="allows auto, sequential and plain"):
        check_mode(asking("parallel"))


OWN_POOL = (
    "enable_unified_memory",
    "enable_hisparse",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "enable_torch_compile",
)


@pytest.mark.parametrize("flag", OWN_POOL)
def test_pools_whose_slots_move_are_refused(flag: str) -> None:
    given = {**ALLOWED, **dict.fromkeys(OWN_POOL, False)}
    validate_server_args(SimpleNamespace(**{**given, "speculative_algorithm": "DFLARE"}))
    args = SimpleNamespace(**{**given, "speculative_algorithm": "DFLARE", flag: True})
    assert_refuses(("--" + flag.replace("_", "-"), "dflare"), lambda: validate_server_args(args))


def asking(mode: str) -> dict[str, Any]:
    """Sampling parameters that choose a mode."""
    return {"custom_params": {"speculative": {"mode": mode}}}
