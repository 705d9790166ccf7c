"""A drafter's folder is byte stable, read strictly, and refused in one line that names the file and the fix."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.card import NOT_MEASURED, AcceptanceRow, CardFields
from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.shipped import find_shipped
from sglang_ext.models.vocabulary import vocabulary_digest
from tests.unit.tiny import (
    TARGETS,
    drafter_config,
    random_tensors,
    target_config,
    tokenizer_json,
    write_drafter,
    write_target,
)

FIELDS = CardFields(
    training={"steps": 300, "learning_rate": 1e-3, "prompts": "gsm8k | self-written"},
    acceptance=(AcceptanceRow("gsm8k", 2.375, 20, 1900, "greedy, offline", (0.71, 0.5, 0.33)),),
)


def refusal(path: Path) -> str:
    with pytest.raises(Refusal) as caught:
        checkpoint.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("calibrator", ["vocabulary", "hidden", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_load_then_save_gives_identical_bytes(tmp_path: Path, name: str, calibrator: str, dtype: torch.dtype) -> None:
    config = drafter_config(name, calibrator=calibrator, calibrator_rank=0 if calibrator == "none" else 6)
    tensors = random_tensors(config, dtype)
    checkpoint.save(tmp_path / "a", config, tensors, target_config(name), FIELDS)
    loaded = checkpoint.load(tmp_path / "a")
    assert loaded.config == config
    assert loaded.card_fields == FIELDS
    assert all(torch.equal(loaded.tensors[key], tensors[key]) for key in tensors)
    checkpoint.save(tmp_path / "b", loaded.config, loaded.tensors, loaded.raw_config, loaded.card_fields)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_order_of_tensors_given_does_not_matter(tmp_path: Path) -> None:
    config = drafter_config()
    tensors = random_tensors(config)
    checkpoint.save(tmp_path / "a", config, tensors, target_config())
    checkpoint.save(tmp_path / "b", config, dict(reversed(tensors.items())), target_config())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_view_of_a_larger_tensor_is_written_alone(tmp_path: Path) -> None:
    config = drafter_config()
    tensors = random_tensors(config)
    wide = torch.randn(config.hidden_size, 1000)
    tensors["mask_embedding"] = wide[:, 7]
    checkpoint.save(tmp_path, config, tensors, target_config())
    assert torch.equal(checkpoint.load(tmp_path).tensors["mask_embedding"], wide[:, 7])


def test_the_card_states_what_was_measured_or_that_nothing_was(tmp_path: Path) -> None:
    config = drafter_config(target_name="Tiny-1M")
    checkpoint.save(tmp_path, config, random_tensors(config), target_config(), FIELDS)
    card = (tmp_path / "README.md").read_text()
    assert "Tiny-1M" in card
    assert "| gsm8k | 2.38 | 20 | 1,900 | 0.71, 0.50, 0.33 | greedy, offline |" in card
    assert "| steps | 300 |" in card
    assert NOT_MEASURED not in card
    checkpoint.save(tmp_path, config, random_tensors(config), target_config())
    assert NOT_MEASURED in (tmp_path / "README.md").read_text()


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    write_drafter(tmp_path / "drafter")
    return tmp_path / "drafter"


def unused_copies() -> dict[str, torch.Tensor]:
    names = ["norm.weight"]
    for layer in range(2):
        names += [f"layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        names += [f"layers.{layer}.{part}_layernorm.weight" for part in ("input", "post_attention")]
    return {name: torch.ones(3) for name in names}


def test_unused_copies_in_published_files_are_skipped_and_not_exported(drafter: Path, tmp_path: Path) -> None:
    clean = checkpoint.load(drafter)
    rewrite(drafter, {**clean.tensors, **unused_copies()})
    loaded = checkpoint.load(drafter)
    assert loaded.tensors.keys() == clean.tensors.keys()
    checkpoint.save(tmp_path / "again", loaded.config, loaded.tensors, loaded.raw_config)
    assert checkpoint.load(tmp_path / "again").tensors.keys() == clean.tensors.keys()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("layers.2.mlp.up_proj.weight", ""),
        ("layers.0.mlp.up_proj.bias", ""),
        ("norm.bias", ""),
        ("fc.weight", ""),
        ("mask_embeding", "did you mean 'mask_embedding'"),
        ("layers.0.self_attn.q_norm.weight", "did you mean 'layers.0.self_attn."),
    ],
)
def test_any_other_unknown_tensor_is_refused_with_the_nearest_name(drafter: Path, name: str, hint: str) -> None:
    rewrite(drafter, {**checkpoint.load(drafter).tensors, name: torch.ones(3)})
    message = refusal(drafter)
    assert repr(name) in message
    assert hint in message


def test_a_misspelt_tensor_is_matched_with_the_missing_one(drafter: Path) -> None:
    tensors = checkpoint.load(drafter).tensors
    tensors["layers.0.self_attn.qproj.weight"] = tensors.pop("layers.0.self_attn.q_proj.weight")
    rewrite(drafter, tensors)
    assert "did you mean 'layers.0.self_attn.q_proj.weight'" in refusal(drafter)


@pytest.mark.parametrize("name", sorted(checkpoint.expected_shapes(drafter_config())))
def test_every_missing_or_misshapen_tensor_is_refused(drafter: Path, name: str) -> None:
    tensors = checkpoint.load(drafter).tensors
    shape = list(tensors[name].shape)
    rewrite(drafter, {**tensors, name: torch.ones(*shape[:-1], shape[-1] + 1)})
    message = refusal(drafter)
    assert repr(name) in message
    assert str(shape) in message
    assert str([*shape[:-1], shape[-1] + 1]) in message
    del tensors[name]
    rewrite(drafter, tensors)
    assert f"lacks tensor {name!r}" in refusal(drafter)


def test_types_must_be_one_floating_type_and_the_declared_one(drafter: Path) -> None:
    tensors = checkpoint.load(drafter).tensors
    rewrite(drafter, {**tensors, "mask_embedding": tensors["mask_embedding"].bfloat16()})
    assert "bfloat16" in refusal(drafter)
    rewrite(drafter, {name: tensor.half() for name, tensor in tensors.items()})
    message = refusal(drafter)
    assert "float16" in message
    assert "float32" in message
    rewrite(drafter, {name: tensor.to(torch.int64) for name, tensor in tensors.items()})
    assert "int64" in refusal(drafter)
    edit_config(drafter, dtype="int64")
    assert "dtype 'int64'" in refusal(drafter)


def shard(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    names = sorted(tensors)
    files = {name: f"model-{1 + (i % 2):05d}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        safetensors.torch.save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "model.safetensors").unlink()
    return files


def test_sharded_weights_load_like_one_file_and_are_refused_when_a_shard_is_wrong(drafter: Path) -> None:
    whole = checkpoint.load(drafter).tensors
    files = shard(drafter, whole)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in checkpoint.load(drafter).tensors.items())
    name, file = next(iter(files.items()))
    (drafter / file).rename(drafter / "away")
    assert file in refusal(drafter)
    (drafter / "away").rename(drafter / file)
    index = drafter / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**files, name: "../elsewhere.safetensors"}}))
    assert "elsewhere" in refusal(drafter)
    index.write_text(json.dumps({"weight_map": {**files, "ghost": file}}))
    assert "'ghost'" in refusal(drafter)
    index.write_text(json.dumps({"weight_map": [file]}))
    assert "weight_map" in refusal(drafter)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named_with_what_to_do(drafter: Path, keep: int) -> None:
    file = drafter / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    message = refusal(drafter)
    assert str(file) in message
    assert f"{len(whole[:keep]):,} bytes" in message
    assert "download" in message


def test_corrupt_weights_and_missing_files_are_named(drafter: Path, tmp_path: Path) -> None:
    file = drafter / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert str(file) in refusal(drafter)
    file.unlink()
    assert f"{file} does not exist" in refusal(drafter)
    (drafter / "config.json").unlink()
    assert "config.json does not exist" in refusal(drafter)
    refusal(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "not a folder" in refusal(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "line 1"), ("[1]", "list"), ("", "not valid JSON"), ("\xff", "not valid JSON"), ("null", "NoneType")],
)
def test_config_of_a_wrong_json_type_is_refused(drafter: Path, text: str, words: str) -> None:
    (drafter / "config.json").write_text(text, encoding="utf-8")
    assert words in refusal(drafter)
    (drafter / "config.json").write_bytes(b"\xff\xfe{")
    assert "config.json cannot be read" in refusal(drafter)


def test_acceptance_rows_are_read_strictly(drafter: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    row = FIELDS.acceptance[0].to_json()
    for bad, word in (({**row, "acept": 1}, "acept"), ({**row, "prompts": "many"}, "prompts"), (3, "row 3")):
        config["flexdraft_config"]["acceptance"] = [bad]
        (drafter / "config.json").write_text(json.dumps(config))
        assert word in refusal(drafter)


def test_saving_refuses_what_loading_would(tmp_path: Path) -> None:
    config = drafter_config()
    tensors = random_tensors(config)
    for bad in ({**tensors, "extra": torch.ones(1)}, {**tensors, "mask_embedding": torch.ones(3)}, {}):
        with pytest.raises(Refusal):
            checkpoint.save(tmp_path, config, bad, target_config())
    with pytest.raises(Refusal, match="type"):
        mixed = {**tensors, "mask_embedding": tensors["mask_embedding"].double()}
        checkpoint.save(tmp_path, config, mixed, target_config())
    assert not list(tmp_path.iterdir())


def test_a_short_list_of_draft_tokens_is_kept_and_checked(tmp_path: Path) -> None:
    config = replace(drafter_config(), draft_vocab_size=5)
    tensors = random_tensors(config, torch.bfloat16)
    folder = checkpoint.save(tmp_path / "short", config, tensors, target_config())
    loaded = checkpoint.load(folder)
    assert loaded.config == config
    assert loaded.tensors[checkpoint.DRAFT_TOKENS].tolist() == tensors[checkpoint.DRAFT_TOKENS].tolist()
    assert "| tokens it can propose | 5 |" in (folder / "README.md").read_text()
    limit = config.vocab_size
    for ids in ([1, 1, 2, 3, 4], [-1, 1, 2, 3, 4], [0, 1, 2, 3, limit]):
        bad = {**tensors, checkpoint.DRAFT_TOKENS: torch.tensor(ids, dtype=torch.int32)}
        with pytest.raises(Refusal, match=f"increasing int32 ids from 0 to {limit - 1}"):
            checkpoint.save(tmp_path / "bad", config, bad, target_config())
    with pytest.raises(Refusal, match="draft_vocab_size = 0"):
        replace(config, draft_vocab_size=0)


def test_a_disk_that_fills_up_leaves_the_old_file_and_one_line(drafter: Path) -> None:
    # A file-size limit makes write() fail the way a full disk does.
    before = contents(drafter)
    script = (
        "import resource, sys; from pathlib import Path; from sglang_ext.core.refusal import Refusal\n"
        "from sglang_ext.models.flexdraft import checkpoint\n"
        "c = checkpoint.load(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    checkpoint.save(sys.argv[1], c.config, {k: v + 1 for k, v in c.tensors.items()}, c.raw_config)\n"
        "except Refusal as refusal:\n    print(refusal)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    run = subprocess.run([sys.executable, "-c", script, str(drafter)], capture_output=True, text=True, check=True)
    assert run.stdout.count("\n") == 1
    assert str(drafter / "model.safetensors") in run.stdout
    assert "space" in run.stdout
    assert contents(drafter) == before


@pytest.mark.parametrize("name", TARGETS)
def test_a_drafter_fits_its_own_target(tmp_path: Path, name: str) -> None:
    target = write_target(tmp_path / "target", target_config(name))
    config = drafter_config(name, vocabulary_digest=vocabulary_digest(target))
    checkpoint.validate_against_target(config, target_config(name), target)


@pytest.mark.parametrize(
    ("changes", "label", "values"),
    [
        ({"vocab_size": 62}, "vocabulary", ("61", "62")),
        ({"hidden_size": 64, "head_dim": 8}, "hidden size", ("32", "64")),
        ({"num_hidden_layers": 6}, "layer count", ("5", "6")),
        ({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}, "attention heads", ("4", "2")),
        ({"num_key_value_heads": 4}, "key/value heads", ("2", "4")),
        ({"head_dim": 16}, "head size", ("8", "16")),
        (
            {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8},
            "architecture",
            ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        ),
    ],
)
def test_a_drafter_for_another_target_is_refused_with_both_values_and_the_flag(
    changes: dict[str, Any], label: str, values: tuple[str, str]
) -> None:
    with pytest.raises(Refusal) as caught:
        checkpoint.validate_against_target(drafter_config(), target_config(**changes), flag="--some-flag")
    message = str(caught.value)
    assert f"{label} is {values[0]}; the target's is {values[1]}" in message
    assert "--some-flag" in message
    assert "sglang-ext inspect" in message
    assert "\n" not in message


def test_same_sizes_with_another_vocabulary_are_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", target_config())
    config = drafter_config(vocabulary_digest=vocabulary_digest(target))
    content = tokenizer_json()
    vocabulary = content["model"]["vocab"]
    vocabulary["aa"], vocabulary["ab"] = vocabulary["ab"], vocabulary["aa"]
    (target / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(Refusal, match="vocabulary digest"):
        checkpoint.validate_against_target(config, target_config(), target)


def test_the_digest_depends_on_tokens_and_ids_and_nothing_else(tmp_path: Path) -> None:
    def digest(content: Any) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return vocabulary_digest(tmp_path)

    content = tokenizer_json()
    first = digest(content)
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = dict(reversed(vocabulary.items()))
    assert digest(content) == first
    content["model"]["merges"] = [["a", "b"]]
    content["added_tokens"].append({"id": 0, "content": "aa"})  # listed twice with the same id
    assert digest(content) == first
    content["added_tokens"][-1]["id"] = 5
    with pytest.raises(Refusal, match="'aa'"):
        digest(content)
    content["added_tokens"].pop()
    unigram = [[token, -1.0] for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    content["model"] = {"type": "Unigram", "vocab": unigram}
    assert digest(content) == first
    content["added_tokens"][0]["content"] = "<|stop|>"
    assert digest(content) != first
    for broken in ({}, {"model": {"vocab": 3}}, {"model": {"vocab": {}}, "added_tokens": [{"id": 1}]}):
        with pytest.raises(Refusal, match=r"tokenizer\.json"):
            digest(broken)


def test_a_shipped_drafter_is_found_for_its_target_only(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", target_config())
    assets = tmp_path / "assets"
    assert find_shipped(target, assets) is None
    write_drafter(assets / "other", vocabulary_digest="00" * 32)
    assert find_shipped(target, assets) is None
    write_drafter(assets / "right", vocabulary_digest=vocabulary_digest(target))
    assert find_shipped(target, assets) == assets / "right"
    longer = write_target(tmp_path / "longer", target_config(num_hidden_layers=6))
    assert find_shipped(longer, assets) is None
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    assert find_shipped(foreign, assets) is None
