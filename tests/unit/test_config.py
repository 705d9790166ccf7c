"""A drafter's config.json is read strictly and means what the target's architecture says it means."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.card import CardFields
from sglang_ext.models.families import target_shape
from sglang_ext.models.flexdraft.checkpoint import expected_shapes
from sglang_ext.models.flexdraft.config import FlexDraftConfig, origin_fields
from tests.unit.tiny import LAYERS, TARGETS, VOCABULARY, drafter_config, hf_model, target_config


def drafter_json(name: str = "llama, gqa, tied, head_dim derived") -> dict[str, Any]:
    return drafter_config(name).to_hf_dict(target_config(name))


@pytest.mark.parametrize("name", TARGETS)
def test_drafter_projections_have_the_shapes_of_the_target_layers_they_join(name: str) -> None:
    config = drafter_config(name)
    weights = {key: tuple(value.shape) for key, value in hf_model(target_config(name)).state_dict().items()}
    shapes = expected_shapes(config)
    for draft_layer, target_layer in enumerate(config.target_layer_ids):
        prefix = f"model.layers.{target_layer}.self_attn."
        attention = {key.removeprefix(prefix): shape for key, shape in weights.items() if key.startswith(prefix)}
        for key, shape in attention.items():
            assert shapes[f"layers.{draft_layer}.self_attn.{key}"] == shape
        assert sum(key.startswith(f"layers.{draft_layer}.") for key in shapes) == len(attention)
    assert shapes["mask_embedding"] == (config.hidden_size,)
    assert shapes["anchor_bias_mlp.2.weight"] == (weights["model.embed_tokens.weight"][0], config.calibrator_rank)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("calibrator", ["vocabulary", "hidden", "none"])
def test_config_survives_json_and_a_second_export_changes_nothing(name: str, calibrator: str) -> None:
    rank = 0 if calibrator == "none" else 6
    config = drafter_config(
        name, calibrator=calibrator, calibrator_rank=rank, target_name="tiny", vocabulary_digest="ab" * 32
    )
    written = config.to_hf_dict(target_config(name))
    assert FlexDraftConfig.from_hf_dict(written) == config
    assert config.to_hf_dict(written) == written
    assert config.split == LAYERS - 2


@pytest.mark.parametrize("name", TARGETS)
def test_hugging_face_accepts_the_drafters_config_as_the_targets_family(name: str) -> None:
    # SGLang reads a drafter folder's HF configuration before any of our code runs.
    import transformers

    config = transformers.AutoConfig.for_model(**drafter_json(name))
    assert config.num_hidden_layers == 2
    assert config.model_type == TARGETS[name]["model_type"]


def test_released_key_and_class_names_are_read() -> None:
    released = drafter_json("qwen3, gqa, untied, head_dim given")
    released["dflash_config"] = {**released.pop("flexdraft_config"), "mask_token_id": 3}
    del released["dflash_config"]["anchor_bias_form"]
    released["architectures"] = ["DFlashDraftModel"]
    config = FlexDraftConfig.from_hf_dict(released)
    assert config == drafter_config("qwen3, gqa, untied, head_dim given")
    assert "dflash_config" not in config.to_hf_dict(released)


def test_no_machine_path_or_foreign_code_is_exported() -> None:
    target = target_config(_name_or_path="/home/someone/model", auto_map={"AutoModel": "x.Y"})
    assert not {"_name_or_path", "auto_map"} & set(drafter_config().to_hf_dict(target))


REFUSALS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("unknown key", {"flexdraft_config.anchor_bias_rnk": 3}, ["anchor_bias_rnk", "did you mean 'anchor_bias_rank'"]),
    ("no nested object", {"flexdraft_config": None}, ["flexdraft_config", "dflash_config"]),
    ("nested list", {"flexdraft_config": [1]}, ["flexdraft_config", "JSON object"]),
    ("no block size", {"block_size": None}, ["block_size"]),
    ("block of one", {"block_size": 1}, ["block_size = 1", "at least 2"]),
    ("block size as text", {"block_size": "4"}, ["block_size = '4'", "whole number"]),
    ("block size as bool", {"block_size": True}, ["block_size = True"]),
    ("gap in ids", {"flexdraft_config.target_layer_ids": [2, 4]}, ["[2, 4]", "contiguous", str(LAYERS - 1)]),
    ("ids end early", {"flexdraft_config.target_layer_ids": [2, 3]}, ["[2, 3]", f"last layer, {LAYERS - 1}"]),
    ("ids reversed", {"flexdraft_config.target_layer_ids": [4, 3]}, ["[4, 3]"]),
    ("ids negative", {"flexdraft_config.target_layer_ids": [-2, -1]}, ["[-2, -1]"]),
    ("ids as text", {"flexdraft_config.target_layer_ids": "3,4"}, ["'3,4'", "list"]),
    ("no ids", {"flexdraft_config.target_layer_ids": None}, ["target_layer_ids"]),
    ("other depth", {"num_hidden_layers": 3}, ["num_hidden_layers = 3", "2 target_layer_ids"]),
    ("no target depth", {"num_target_layers": None}, ["num_target_layers"]),
    ("no calibrator switch", {"flexdraft_config.enable_anchor_bias_logits": None}, ["enable_anchor_bias_logits"]),
    ("switch as text", {"flexdraft_config.enable_anchor_bias_logits": "yes"}, ["'yes'", "true or false"]),
    ("no rank", {"flexdraft_config.anchor_bias_rank": None}, ["anchor_bias_rank"]),
    ("rank zero", {"flexdraft_config.anchor_bias_rank": 0}, ["anchor_bias_rank = 0"]),
    ("form", {"flexdraft_config.anchor_bias_form": "logits"}, ["'logits'", "vocabulary, hidden"]),
    ("digest", {"flexdraft_config.vocabulary_digest": 5}, ["vocabulary_digest = 5"]),
    ("family", {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, ["Mixtral", "LlamaForCausalLM"]),
    ("family of a known type", {"architectures": ["FooForCausalLM"]}, ["FooForCausalLM", "Qwen3ForCausalLM"]),
    ("type against class", {"model_type": "qwen3"}, ["qwen3", "llama"]),
    ("heads", {"num_key_value_heads": 3}, ["4 attention heads", "3 key/value heads"]),
    ("hidden size", {"hidden_size": 30}, ["30", "4 attention heads", "head_dim"]),
    ("bias", {"attention_bias": True}, ["attention_bias"]),
    ("quantised", {"quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
]


@pytest.mark.parametrize(("changes", "words"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS])
def test_every_fault_is_refused_in_one_line_that_names_it(changes: dict[str, Any], words: list[str]) -> None:
    content = copy.deepcopy(drafter_json())
    for path, value in changes.items():
        place = content
        *parents, key = path.split(".")
        for parent in parents:
            place = place[parent]
        if value is None:
            place.pop(key)
        else:
            place[key] = value
    with pytest.raises(Refusal) as caught:
        FlexDraftConfig.from_hf_dict(content, "DIR/config.json")
    message = str(caught.value)
    assert "\n" not in message
    assert "DIR/config.json" in message
    for word in words:
        assert word in message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(data=st.data(), name=st.sampled_from(sorted(TARGETS)))
@settings(max_examples=150, deadline=None)
def test_any_json_value_anywhere_is_read_or_refused_and_never_a_crash(data: st.DataObject, name: str) -> None:
    content = drafter_json(name)
    place = data.draw(st.sampled_from([content, content["flexdraft_config"]]))
    place[data.draw(st.sampled_from(sorted([*place, "attention_bias", "training", "acceptance"])))] = data.draw(JSON)
    try:
        config = FlexDraftConfig.from_hf_dict(content)
        training, acceptance = origin_fields(content)
        CardFields.from_json(training, acceptance, "config.json")
    except Refusal as refusal:
        assert "\n" not in str(refusal)
    else:
        assert FlexDraftConfig.from_hf_dict(config.to_hf_dict(content)) == config


def test_both_names_of_the_nested_object_must_agree() -> None:
    content = drafter_json()
    content["dflash_config"] = {**content["flexdraft_config"], "anchor_bias_rank": 99}
    with pytest.raises(Refusal, match=r"99.*dflash_config"):
        FlexDraftConfig.from_hf_dict(content)
    content["dflash_config"]["anchor_bias_rank"] = content["flexdraft_config"]["anchor_bias_rank"]
    assert FlexDraftConfig.from_hf_dict(content) == drafter_config()


@pytest.mark.parametrize("layers", [0, LAYERS + 1])
def test_a_drafter_has_between_one_and_all_layers_of_its_target(layers: int) -> None:
    with pytest.raises(Refusal, match=str(LAYERS)):
        drafter_config(num_layers=layers)


@pytest.mark.parametrize(("calibrator", "rank"), [("none", 4), ("hidden", 0), ("hidden", -1), ("logits", 4)])
def test_calibrator_and_rank_must_agree(calibrator: str, rank: int) -> None:
    with pytest.raises(Refusal):
        drafter_config(calibrator=calibrator, calibrator_rank=rank)


def test_training_and_acceptance_have_their_json_types() -> None:
    content = drafter_json()
    assert origin_fields(content) == ({}, [])
    content["flexdraft_config"]["acceptance"] = {"gsm8k": 2}
    with pytest.raises(Refusal, match="acceptance"):
        origin_fields(content)


def test_a_target_shape_is_read_from_the_targets_own_file() -> None:
    shape = target_shape(target_config(), "config.json")
    assert (shape.num_layers, shape.vocab_size, shape.head_dim, shape.qk_norm) == (LAYERS, VOCABULARY, 8, False)
