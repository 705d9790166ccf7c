"""Training DFlare and DFlash: overfitting reaches the block size, resumed runs keep their bits, taps have files."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.card import CardFields
from sglang_ext.models.dflare.loss import gamma_at
from sglang_ext.models.loss import slot_weights
from sglang_ext.models.tapped import checkpoint
from sglang_ext.models.target import Target
from sglang_ext.training.config import CONFIGS, FlexDraftTrainConfig, TrainConfig
from sglang_ext.training.data import Chunk, collate, load_records
from sglang_ext.training.evaluate import evaluate
from sglang_ext.training.export import PeriodicExport, load_training_state, restore, with_draft_tokens, write_drafter
from sglang_ext.training.methods import load_drafter
from sglang_ext.training.taps import TapFile, TapStore, compute_taps, kept_keys, kept_layers
from sglang_ext.training.train import CHECKPOINT, Trainer, dry_run, frequent_tokens, train
from tests.training.tiny_targets import EOS, make_model, random_rows, write_rows, write_target

SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_layers": 2,
    "num_taps": 1,
    "blocks_per_step": 8,
    "anchors_per_sequence": 4,
    "frequent": 0,
    "threads": 1,
    "held_out_percent": 0,
}
methods = pytest.mark.parametrize("method", ["dflare", "dflash"])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tapped")
    return write_target(folder / "target"), write_rows(folder / "rows.jsonl", random_rows(12))


def make_config(method: str, prepared: tuple[Path, Path], out: Path, **changes: Any) -> TrainConfig:
    options = {"target": str(prepared[0]), "data": (str(prepared[1]),), "out": str(out), "steps": 6, **SMALL, **changes}
    return CONFIGS[method](**options)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / CHECKPOINT, weights_only=True)["model"]


@methods
@pytest.mark.parametrize(("family", "start"), [("llama-gqa-tied", "random"), ("qwen3-gqa-untied", "spread")])
def test_overfitting_one_response_accepts_whole_blocks(tmp_path: Path, method: str, family: str, start: str) -> None:
    """The training layout is the decoding layout: after overfitting, replayed decoding commits K tokens a step."""
    target_dir = write_target(tmp_path / "target", family)
    response = [*torch.randperm(80, generator=torch.Generator().manual_seed(9))[:24].add(5).tolist(), EOS]
    data = write_rows(tmp_path / "rows.jsonl", [([5, 6, 7], response)])
    config = make_config(
        method,
        (target_dir, data),
        tmp_path / "run",
        steps=150,
        lr=0.01,
        lr_other=0.01,
        start=start,
        blocks_per_step=24,
        anchors_per_sequence=24,
    )
    train(config)
    target = Target.load(config.target)
    found = evaluate(restore(target, *load_training_state(config.out)), load_records(config.data))["all"]
    assert found.by_position == (1.0, 1.0, 1.0)
    assert found.accept_length == config.block_size


@methods
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_is_bit_equal(
    prepared: tuple[Path, Path], tmp_path: Path, method: str, cached: bool, optimizer: str
) -> None:
    """Also when the first half computed its taps and the second finds them in the file."""
    whole = make_config(method, prepared, tmp_path / "whole", frequent=20, drawn=10, optimizer=optimizer)
    train(whole)
    cache = str(tmp_path / "taps") if cached else ""
    part = replace(whole, out=str(tmp_path / "part"), checkpoint_seconds=0.0, tap_cache=cache)

    class Stop(Exception):
        pass

    def stop(trainer: Any) -> None:
        if trainer.step_number == 4:
            raise Stop

    with pytest.raises(Stop):
        train(replace(part, export_seconds=0.0), stop)
    assert torch.load(tmp_path / "part" / CHECKPOINT, weights_only=True)["step"] == 4
    train(part)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "part")[name]), name


@methods
def test_a_block_sees_nothing_after_its_anchor_and_nothing_of_its_batch(method: str, tmp_path: Path) -> None:
    """Other tokens after the bonus, other sequences and other blocks beside it change no logit of a block."""
    seed = int(torch.seed() % 10_000)
    print(f"seed {seed}")
    target = Target(make_model("llama-gqa-tied", seed))
    config = make_config(method, (tmp_path, tmp_path), tmp_path)
    torch.manual_seed(seed)
    from sglang_ext.training.methods import METHODS

    model = METHODS[method].new_model(target, config)
    rows = random_rows(2, seed)
    # The same prompt with another response from its third token on.
    rows.append((rows[0][0], [*rows[0][1][:2], *reversed(rows[0][1][2:])]))
    records = load_records([write_rows(tmp_path / "rows.jsonl", rows)])
    first = records[0].anchors[0]
    store = METHODS[method].store(model)
    chunks = [Chunk(0, (first, first + 3)), Chunk(1, (records[1].anchors[0], records[1].anchors[-1]))]
    with torch.no_grad():
        together = model.logits(collate(store, records, chunks, 4).context)
        alone = model.logits(collate(store, records, [Chunk(0, (first,))], 4).context)
        other = model.logits(collate(store, records, [Chunk(2, (first,))], 4).context)
    torch.testing.assert_close(together[0, 0], alone[0, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other, alone, atol=1e-4, rtol=1e-4)


def test_taps_are_the_targets_hidden_states(tmp_path: Path) -> None:
    model = make_model("qwen3-gqa-untied")
    ids = [5, 9, 17, 33, 8]
    states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    taps = compute_taps(Target(model), ids, [0, 1, 2])
    for place, layer in enumerate([0, 1, 2]):
        torch.testing.assert_close(taps[:, place], states[layer + 1][0], atol=1e-5, rtol=1e-5)


def _fill(target_dir: str, data: str, cache: str) -> None:
    store = TapStore(Target.load(target_dir), [0, 1, 2], cache)
    for record in load_records([data]):
        store.read(record)


def test_a_tap_file_has_the_bits_of_the_computation(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    """Two processes fill it at once; fewer layers may be read from it; other layers and targets are refused."""
    cache = str(tmp_path / "taps")
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_fill, args=(*map(str, prepared), cache)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    target, records = Target.load(prepared[0]), load_records([prepared[1]])
    kept = TapFile(cache, target, [0, 2])
    assert not kept.may_grow
    for record in records:
        expected = compute_taps(target, record.token_ids[:-1], [0, 2])
        found = kept.read(record)
        assert found is not None and torch.equal(found, expected)
    rows = sum(len(record.token_ids) - 1 for record in records)
    assert Path(cache).stat().st_size == rows * 3 * target.shape.hidden_size * 2
    with pytest.raises(Refusal, match=r"holds layers \[0, 1, 2\]"):
        TapFile(cache, target, [0, 3])
    with pytest.raises(Refusal, match="of target"):
        TapFile(cache, Target(make_model("llama-gqa-tied", seed=5).bfloat16()), [0, 2])


def test_a_file_that_is_not_one_of_taps_is_refused_and_left(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    """By a run, by its dry run and by who asks what is kept; a missing or empty file is a new one."""
    target = Target.load(prepared[0])
    header = '{"target": "a", "dtype": "torch.float32", "layers": [1]}\n'
    contents: dict[str, tuple[str | None, str | None, str]] = {
        "data.jsonl": ("rows of somebody\n", None, "is not empty and has no index"),
        "emptied": ("rows of somebody\n", "", "is not empty and has no index"),
        "prose": (None, "no JSON\n", "damaged or foreign"),
        "object": (None, '{"a": 1}\n', "damaged or foreign"),
        "list": ("", "[1, 2]\n", "damaged or foreign"),
        "layers": ("", header.replace("[1]", '"12"'), "damaged or foreign"),
        "binary": ("", "\x00\x01", "damaged or foreign"),
        "nested": ("", "[" * 100_000 + "\n", "damaged or foreign"),
        "cut": ("", header[:-1], "damaged or foreign"),
    }
    for name, (data, index, message) in contents.items():
        for path, text in ((tmp_path / name, data), (tmp_path / f"{name}.json", index)):
            if text is not None:
                path.write_text(text)
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        config = make_config("dflare", prepared, tmp_path / "run", tap_cache=str(tmp_path / name))
        for use in (kept_keys, kept_layers, lambda path: TapFile(path, target, [1])):
            with pytest.raises(Refusal, match=message) as refused:
                use(tmp_path / name)
            assert f"--tap-cache {tmp_path / name}" in str(refused.value) and "\n" not in str(refused.value)
        with pytest.raises(Refusal, match=message):
            dry_run(config)
        after = {path: path.read_bytes() for path in before}
        assert after == before and (index is not None or not (tmp_path / f"{name}.json").exists()), name
    (tmp_path / "new").touch()
    assert kept_keys(tmp_path / "new") == kept_keys(tmp_path / "none") == set()
    assert kept_layers(tmp_path / "new") is None
    TapFile(tmp_path / "new", target, [1])
    assert kept_layers(tmp_path / "new") == (1,) and kept_keys(tmp_path / "new") == set()


def test_a_damaged_row_of_a_tap_file_is_refused(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    target, records = Target.load(prepared[0]), load_records([prepared[1]])
    cache = tmp_path / "taps"
    TapStore(target, [1], str(cache)).read(records[0])
    index = Path(f"{cache}.json")
    good = index.read_text()
    for bad in ('{"key": "x"}\n', '{"key": "x", "first": -1, "count": 2}\n', "x\n", '{"key": "x", "first": 0'):
        index.write_text(good + bad)
        with pytest.raises(Refusal, match="damaged or foreign"):
            kept_keys(cache)
        with pytest.raises(Refusal, match="damaged or foreign"):
            TapFile(cache, target, [1]).read(records[1])
    index.write_text(good)
    cache.write_bytes(cache.read_bytes()[:-1])
    with pytest.raises(Refusal, match="rows that the file does not have"):
        TapFile(cache, target, [1]).read(records[0])


def test_a_path_where_no_tap_file_can_be_is_refused(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    target = Target.load(prepared[0])
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "beside.json").mkdir()
    for path in (tmp_path / "file" / "taps", tmp_path / "folder", tmp_path / "beside", tmp_path / ("n" * 300)):
        for use in (kept_keys, kept_layers, lambda path: TapFile(path, target, [1])):
            with pytest.raises(Refusal, match="cannot be used") as refused:
                use(path)
            assert f"--tap-cache {path}" in str(refused.value) and "\n" not in str(refused.value)
        with pytest.raises(Refusal, match="cannot be used"):
            dry_run(make_config("dflare", prepared, tmp_path / "run", tap_cache=str(path)))


def test_gamma_grows_or_stays(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    assert [gamma_at(progress, 2.0, 6.0) for progress in (0.0, 0.5, 1.0)] == [2.0, 4.0, 6.0]
    target, records = Target.load(prepared[0]), load_records([prepared[1]])
    growing = make_config("dflare", prepared, tmp_path, gamma_start=1.0, gamma_end=3.0)
    for config, ends in ((growing, (1.0, 3.0)), (replace(growing, gamma=2.0), (2.0, 2.0))):
        trainer = Trainer(config, target, records)
        for progress, gamma in zip((0.0, 1.0), ends, strict=True):
            torch.testing.assert_close(trainer.slot_weights(progress), slot_weights(4, gamma))
    assert make_config("dflash", prepared, tmp_path).gamma == 4.0  # type: ignore[attr-defined]


@methods
def test_export_is_the_run_and_can_be_trained_further(prepared: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    config = make_config(method, prepared, tmp_path / "run", steps=3, held_out_percent=30)
    train(config, PeriodicExport(config.out))
    folder, target = tmp_path / "run" / "export-latest", Target.load(config.target)
    saved = checkpoint.load(folder)
    for name, tensor in restore(target, *load_training_state(config.out)).state_dict().items():
        assert torch.equal(saved.tensors[name].float(), tensor.bfloat16().float()), name
    assert method == saved.config.METHOD and saved.config.mask_token_id is None
    assert saved.card_fields.training["steps"] == 3 and [row.dataset for row in saved.card_fields.acceptance] == [
        "test"
    ]
    more = make_config(method, prepared, tmp_path / "more", start_from=str(folder), steps=1, lr=0.0, lr_other=0.0)
    train(more)
    assert all(
        torch.equal(tensor.bfloat16(), saved.tensors[name]) for name, tensor in weights(tmp_path / "more").items()
    )
    with pytest.raises(Refusal, match=r"--start-from .* has layer.* of shape"):
        train(replace(more, num_layers=3, out=str(tmp_path / "other")))
    other = {"dflare": "dflash", "dflash": "dflare"}[method]
    with pytest.raises(Refusal, match=f"holds a {method} drafter"):
        train(make_config(other, prepared, tmp_path / "wrong", start_from=str(folder)))


@methods
def test_a_short_list_of_draft_tokens_is_all_that_is_proposed(
    prepared: tuple[Path, Path], tmp_path: Path, method: str
) -> None:
    train(make_config(method, prepared, tmp_path / "run"))
    target, records = Target.load(str(prepared[0])), load_records([prepared[1]])
    full = restore(target, *load_training_state(tmp_path / "run"))
    ids = frequent_tokens(records, 20, target.shape.vocab_size)
    short = load_drafter(write_drafter(tmp_path / "short", with_draft_tokens(full, ids), CardFields()), target)
    others = [token for token in range(target.shape.vocab_size) if token not in ids.tolist()]
    context = collate(TapStore(target, short.config.target_layer_ids), records[:1], [Chunk(0, (8,))], 4).context
    assert torch.isneginf(short.logits(context)[..., others]).all()


def test_a_run_of_another_method_is_refused(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    train(make_config("dflare", prepared, tmp_path / "run", steps=2))
    with pytest.raises(Refusal, match="is a dflare run"):
        train(make_config("dflash", prepared, tmp_path / "run", steps=2))


def test_checkpoints_that_name_no_method_are_flexdrafts(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    options = {name: SMALL[name] for name in SMALL if name != "num_taps"}
    config = FlexDraftTrainConfig(
        target=str(prepared[0]),
        data=(str(prepared[1]),),
        out=str(tmp_path / "run"),
        steps=2,
        calibrator_rank=8,
        **options,
    )
    train(config)
    path = tmp_path / "run" / CHECKPOINT
    state = torch.load(path, weights_only=True)
    older = {name: value for name, value in state.items() if name != "method"} | {"progress": 0.5}
    older["config"] = {name: value for name, value in state["config"].items() if name != "start_from"}
    torch.save(older, path)
    found, _ = load_training_state(tmp_path / "run")
    assert asdict(found) == asdict(config)
    train(replace(config, steps=3))
    assert torch.load(path, weights_only=True)["step"] == 3


def test_dry_run_prints_the_bytes_of_the_taps(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    config = make_config("dflare", prepared, tmp_path / "run", tap_cache=str(tmp_path / "taps"), steps=40)
    text = dry_run(config)
    assert not (tmp_path / "taps").exists()
    tokens = sum(len(record.token_ids) - 1 for record in load_records([prepared[1]]))
    assert f"target states of 12 responses (0 already on disk): {1 * 32 * 2 * tokens / 1e6:.1f} MB" in text
    train(config)
    assert "target states of 12 responses (12 already on disk)" in dry_run(config)


def test_options_are_strict() -> None:
    good = {"target": "t", "data": ["d"], "out": "o", "steps": 1}
    for changes, message in (
        ({"start": "middle"}, "--start middle"),
        ({"context_projections": "none"}, "--context-projections none"),
        ({"gamma": -1.0}, "--gamma -1"),
        ({"num_taps": 0}, "--num-taps 0"),
        ({"calibrator": "hidden"}, "calibrator"),
    ):
        with pytest.raises(Refusal, match=message):
            CONFIGS["dflare"].from_dict({**good, **changes}, "here")
    assert json.loads(json.dumps(asdict(CONFIGS["dflash"].from_dict(good, "here"))))["context_projections"] == "shared"
