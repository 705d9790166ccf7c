"""Published DFlare and DFlash folders load unchanged, ours have the same form, anything odd is refused in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang_ext import cli
from sglang_ext.core.refusal import Refusal
from sglang_ext.models.card import NOT_MEASURED, AcceptanceRow, CardFields
from sglang_ext.models.drafters import method_of_folder
from sglang_ext.models.flexdraft import checkpoint as flexdraft
from sglang_ext.models.shipped import find_shipped
from sglang_ext.models.tapped import checkpoint
from sglang_ext.models.tapped.checkpoint import METHODS, expected_shapes
from sglang_ext.models.tapped.config import spread_taps
from sglang_ext.models.vocabulary import vocabulary_digest
from sglang_ext.models.weights import DRAFT_TOKENS
from tests.unit import tiny
from tests.unit.tiny_tapped import (
    LAYERS,
    PUBLISHED_DFLARE,
    TAPS,
    own_config,
    own_tensors,
    published_shapes,
    random_tensors,
    write_own,
    write_published,
)

FIELDS = CardFields({"steps": 3}, (AcceptanceRow("maths", 2.5, 4, 90, "replay", (0.7, 0.5, 0.4)),))
ARCHITECTURES = ["QwenDFlareDraftModel", "DFlareQwen3Model", "QwenDFlashDraftModel"]
methods = pytest.mark.parametrize("method", sorted(METHODS))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_published_dflare_folders_load_unchanged(tmp_path: Path, architecture: str) -> None:
    loaded = checkpoint.load(write_published(tmp_path, "dflare", architectures=[architecture]))
    assert loaded.config.METHOD == method_of_folder(tmp_path) == "dflare"
    assert loaded.config.target_layer_ids == tuple(TAPS) and loaded.config.separate_context_projections
    assert loaded.config.mask_token_id == 60 and loaded.config.num_target_layers == LAYERS
    assert {name: tuple(tensor.shape) for name, tensor in loaded.tensors.items()} == published_shapes("dflare")


def test_published_dflash_folders_load_unchanged(tmp_path: Path) -> None:
    loaded = checkpoint.load(write_published(tmp_path, "dflash"))
    assert loaded.config.METHOD == method_of_folder(tmp_path) == "dflash"
    assert not loaded.config.separate_context_projections
    assert {name: tuple(tensor.shape) for name, tensor in loaded.tensors.items()} == published_shapes("dflash")


@methods
def test_export_of_a_published_drafter_has_its_names_and_keys(tmp_path: Path, method: str) -> None:
    """What published loaders read is there under the same name with the same value; nothing is added to the object."""
    published = checkpoint.load(write_published(tmp_path / "a", method))
    checkpoint.save(tmp_path / "b", published.config, published.tensors)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert after["dflash_config"] == before["dflash_config"]
    read_by_loaders = (
        "block_size",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "layer_types",
    )
    read_by_loaders += ("num_hidden_layers", "num_key_value_heads", "num_target_layers", "rms_norm_eps", "rope_theta")
    read_by_loaders += ("vocab_size", "model_type", "hidden_act", "attention_bias", "rope_scaling", "dtype")
    for key in read_by_loaders:
        assert after[key] == before[key], key
    tensors = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in published.tensors.items())
    assert checkpoint.load(tmp_path / "b").config == published.config


@methods
@pytest.mark.parametrize("changes", [{}, {"mask_token_id": 7}, {"separate_context_projections": True}])
def test_folders_are_byte_stable(tmp_path: Path, method: str, changes: dict[str, Any]) -> None:
    config = own_config(method, target_name="tiny", vocabulary_digest="ab" * 32, **changes)
    checkpoint.save(tmp_path / "a", config, own_tensors(config), FIELDS)
    loaded = checkpoint.load(tmp_path / "a")
    assert (loaded.config, loaded.card_fields) == (config, FIELDS)
    checkpoint.save(tmp_path / "b", loaded.config, loaded.tensors, loaded.card_fields)
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@methods
def test_a_short_list_of_draft_tokens_is_kept(tmp_path: Path, method: str) -> None:
    config = own_config(method).with_draft_vocabulary(5)
    checkpoint.save(tmp_path, config, own_tensors(config))
    assert checkpoint.load(tmp_path).tensors[DRAFT_TOKENS].tolist() == list(range(5))
    bad = {**own_tensors(config), DRAFT_TOKENS: torch.tensor([3, 2, 4, 5, 61], dtype=torch.int32)}
    with pytest.raises(Refusal, match="increasing int32 ids"):
        checkpoint.save(tmp_path, config, bad)


@methods
def test_every_missing_or_unexpected_tensor_is_refused(tmp_path: Path, method: str) -> None:
    tensors = random_tensors(published_shapes(method), torch.bfloat16)
    telltale = "layer_fusion_weights" if method == "dflare" else "fc.weight"
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        wanted = "neither 'layer_fusion_weights' nor 'fc.weight'" if name == telltale else f"lacks tensor '{name}'"
        with pytest.raises(Refusal, match=wanted):
            checkpoint.load(write_published(tmp_path / "missing", method, rest))
    for name, near in (("layers.0.self_attn.k_proj_targt.weight", "did you mean"), ("embed_tokens.weight", "unknown")):
        with pytest.raises(Refusal, match=near):
            checkpoint.load(write_published(tmp_path / "more", method, {**tensors, name: torch.ones(2).bfloat16()}))


def test_tensors_of_both_methods_are_refused(tmp_path: Path) -> None:
    both = random_tensors(published_shapes("dflare") | published_shapes("dflash"), torch.bfloat16)
    with pytest.raises(Refusal, match=r"unknown tensor 'fc\.weight'"):
        checkpoint.load(write_published(tmp_path, "dflare", both))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 3, 5, 9]}}, "0 to 8"),
        ({"dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 3, 5]}}, r"\[3, 4\]"),
        ({"dflash_config": {"mask_token_id": 60, "target_layer_ids": [3, 1, 5, 6]}}, "increasing"),
        ({"dflash_config": {"mask_token_id": 61, "target_layer_ids": TAPS}}, "0 to 60"),
        ({"dflash_config": {"target_layer_ids": TAPS}}, "neither mask_token_id"),
        ({"dflash_config": {"mask_token_id": 6, "mask_embedding": "learned", "target_layer_ids": TAPS}}, "both"),
        ({"dflash_config": {"mask_token_id": 60, "target_layers_ids": TAPS}}, "did you mean 'target_layer_ids'"),
        ({"num_hidden_layers": 4}, "lacks tensor 'layers.3"),
        ({"num_hidden_layers": 2}, "unknown tensor 'layers.2"),
        ({"hidden_size": 31}, r"config.json asks for \[3?\d"),
        ({"block_size": None}, "block_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["sliding_attention"] * 3}, "full attention"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": "x"}, "positive number"),
        ({"rope_scaling": "yarn"}, "rope_scaling = 'yarn'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "no factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2.0}}, "positive number"),
        ({"layer_types": 5}, "full attention"),
        ({"block_size": 8, "dflash_config": {"mask_token_id": 60, "target_layer_ids": TAPS, "block_size": 6}}, "has 6"),
        ({"dtype": "float32"}, "config.json says float32"),
    ],
)
def test_wrong_configurations_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_published(tmp_path, "dflare", **changes)
    with pytest.raises(Refusal, match=message) as refusal:
        checkpoint.load(folder)
    assert "\n" not in str(refusal.value)
    if "dtype" not in changes:  # the launcher reads no weights, and refuses the rest all the same
        with pytest.raises(Refusal, match=message):
            checkpoint.load_config(folder)


def test_the_block_size_may_lie_among_the_methods_fields(tmp_path: Path) -> None:
    method = {"mask_token_id": 60, "target_layer_ids": TAPS, "block_size": 6}
    folder = write_published(tmp_path, "dflare", block_size=None, dflash_config=method)
    assert checkpoint.load(folder).config.block_size == 6


@methods
def test_only_the_targets_own_drafter_fits(tmp_path: Path, method: str) -> None:
    raw = tiny.target_config(num_hidden_layers=LAYERS, rope_theta=5000.0)
    target = tiny.write_target(tmp_path / "target", raw)
    config = write_own(tmp_path / "drafter", method, vocabulary_digest=vocabulary_digest(target))
    checkpoint.validate_against_target(config, raw, target)
    for changes in ({"vocab_size": 62}, {"hidden_size": 64}, {"num_hidden_layers": 8}, {"architectures": ["Other"]}):
        with pytest.raises(Refusal, match=r"the target's is .*--some-flag must name"):
            checkpoint.validate_against_target(config, {**raw, **changes}, flag="--some-flag")
    (target / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"other": 0}}}))
    with pytest.raises(Refusal, match="digest"):
        checkpoint.validate_against_target(config, raw, target)


def test_each_method_finds_its_own_shipped_drafter(tmp_path: Path) -> None:
    raw = tiny.target_config(num_hidden_layers=LAYERS, rope_theta=5000.0)
    target = tiny.write_target(tmp_path / "target", raw)
    digest, assets = vocabulary_digest(target), tmp_path / "assets"
    write_own(assets / "b", "dflare", vocabulary_digest=digest)
    assert find_shipped(target, assets) is None
    ours = tiny.FlexDraftConfig.for_target(raw, num_layers=2, block_size=4, calibrator="none", vocabulary_digest=digest)
    flexdraft.save(assets / "a", ours, tiny.random_tensors(ours), raw)
    assert find_shipped(target, assets) == assets / "a"
    assert find_shipped(target, assets, "dflare") == assets / "b"
    assert find_shipped(target, assets, "dflash") is None


def test_taps_are_spread_as_in_published_drafters() -> None:
    assert spread_taps(36, 9) == (1, 5, 9, 13, 17, 21, 25, 29, 33)
    assert spread_taps(36, 5) == (1, 9, 17, 25, 33)
    assert spread_taps(28, 9) == (1, 4, 7, 10, 13, 16, 19, 22, 25)
    assert spread_taps(30, 1) == (15,)
    with pytest.raises(Refusal, match="1 to 6 are allowed"):
        spread_taps(9, 7)


@methods
def test_inspect_shows_a_drafter(tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_published(tmp_path / "published", method)
    write_own(tmp_path / "own", method)
    for name in ("published", "own"):
        assert cli.main(["inspect", str(tmp_path / name)]) == 0
        text = capsys.readouterr().out
        assert METHODS[method].TITLE in text and NOT_MEASURED in text
    assert cli.main(["inspect", "--json", str(tmp_path / "own")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == sum(
        torch.Size(shape).numel() for shape in expected_shapes(own_config(method)).values()
    )


def test_older_and_newer_rotary_fields_mean_the_same() -> None:
    old = METHODS["dflare"].from_hf_dict({**PUBLISHED_DFLARE, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    given = {"rope_theta": 1000000, "rope_type": "yarn", "factor": 4.0}
    new = METHODS["dflare"].from_hf_dict({**PUBLISHED_DFLARE, "rope_theta": None, "rope_parameters": given})
    assert old == new
