"""Training: overfitting reaches the block size, killed and resumed runs equal uninterrupted ones, strict options."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.card import CardFields
from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.target import Target
from sglang_ext.training.config import FlexDraftTrainConfig
from sglang_ext.training.data import Chunk, collate, load_records
from sglang_ext.training.evaluate import Acceptance, evaluate
from sglang_ext.training.export import (
    PeriodicExport,
    load_training_state,
    restore,
    with_draft_tokens,
    write_drafter,
)
from sglang_ext.training.flexdraft import StateStore
from sglang_ext.training.methods import load_drafter
from sglang_ext.training.optimizer import learning_scale, orthogonalise
from sglang_ext.training.train import CHECKPOINT, LOG, dry_run, frequent_tokens, next_progress, train
from tests.training.tiny_targets import EOS, SMALL, random_rows, write_rows, write_target


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("train")
    return write_target(folder / "target"), write_rows(folder / "rows.jsonl", random_rows(12))


def make_config(prepared: tuple[Path, Path], out: Path, **changes: Any) -> FlexDraftTrainConfig:
    options = {"target": str(prepared[0]), "data": (str(prepared[1]),), "out": str(out), "steps": 6, **SMALL, **changes}
    return FlexDraftTrainConfig(**options)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / CHECKPOINT, weights_only=True)["model"]


@pytest.mark.parametrize(("family", "calibrator"), [("llama-gqa-tied", "hidden"), ("qwen3-gqa-untied", "vocabulary")])
def test_overfitting_one_response_accepts_whole_blocks(tmp_path: Path, family: str, calibrator: str) -> None:
    """The training layout is the decoding layout: after overfitting, replayed decoding commits K tokens a step."""
    target_dir = write_target(tmp_path / "target", family)
    response = [*torch.randperm(80, generator=torch.Generator().manual_seed(9))[:24].add(5).tolist(), EOS]
    data = write_rows(tmp_path / "rows.jsonl", [([5, 6, 7], response)])
    config = make_config(
        (target_dir, data),
        tmp_path / "run",
        steps=120,
        lr=0.02,
        lr_other=0.02,
        calibrator=calibrator,
        calibrator_rank=32,
        blocks_per_step=24,
        anchors_per_sequence=24,
    )
    train(config)
    target = Target.load(config.target)
    found = evaluate(restore(target, *load_training_state(config.out)), load_records(config.data))["all"]
    # 25 response tokens: 24 after the first are committed in 24 / K = 6 steps of K when every draft is accepted.
    assert found.by_position == (1.0, 1.0, 1.0)
    assert found.accept_length == config.block_size


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_is_bit_equal(prepared: tuple[Path, Path], tmp_path: Path, optimizer: str) -> None:
    whole = make_config(prepared, tmp_path / "whole", optimizer=optimizer, frequent=20, drawn=10)
    train(whole)
    part = replace(whole, out=str(tmp_path / "part"), checkpoint_seconds=0.0)

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


def test_killed_run_on_the_clock_replays_its_logged_schedule(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    """kill -9 between checkpoints: the lost steps are redone with the logged schedule fractions, to the bit."""
    out = tmp_path / "run"
    config = make_config(prepared, out, steps=0, stop_at=time.time() + 3600, checkpoint_seconds=1e9)
    script = (
        "import json, sys; from sglang_ext.training.config import FlexDraftTrainConfig\n"
        "from sglang_ext.training.train import *\n"
        "config = FlexDraftTrainConfig.from_dict(json.loads(sys.argv[1]), 'argv')\n"
        "save = lambda t: t.step_number == 3 and save_atomically(Path(config.out) / CHECKPOINT, t.state_dict())\n"
        "train(config, save)\n"
    )
    given = json.dumps({**vars(config), "data": list(config.data), "export_seconds": 0.0})
    child = subprocess.Popen(
        [sys.executable, "-c", script, given], env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.time() + 120
        while not (out / LOG).exists() or (out / LOG).read_bytes().count(b"\n") < 12:
            assert child.poll() is None and time.time() < deadline
            time.sleep(0.05)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    log = [json.loads(line) for line in (out / LOG).read_text().split("\n")[:-1]]
    assert torch.load(out / CHECKPOINT, weights_only=True)["step"] == 3

    class Reached(Exception):
        pass

    seen: dict[str, torch.Tensor] = {}

    def until_logged(trainer: Any) -> None:
        if trainer.step_number == len(log):
            seen.update({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
            raise Reached

    resumed = replace(config, export_seconds=0.0)
    with pytest.raises(Reached):
        train(resumed, until_logged)
    assert [json.loads(line) for line in (out / LOG).read_text().splitlines()] == log
    # An uninterrupted run with the same fractions, from the start.
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / LOG).write_text("".join(f"{json.dumps(row)}\n" for row in log))
    interrupted = dict(seen)
    with pytest.raises(Reached):
        train(replace(resumed, out=str(fresh)), until_logged)
    for name, tensor in seen.items():
        assert torch.equal(tensor, interrupted[name]), name


def test_two_workers_follow_one(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    """Two processes that share each step's blocks take the steps of one, up to the rounding of sums."""
    one = make_config(prepared, tmp_path / "one", steps=4, lr=1e-4, lr_other=1e-4)
    train(one)
    train(replace(one, out=str(tmp_path / "two"), workers=2))
    losses = []
    for name in ("one", "two"):
        losses.append([json.loads(line)["loss"] for line in (tmp_path / name / LOG).read_text().splitlines()])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-4)


def test_other_rows_or_options_are_refused(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    config = make_config(prepared, tmp_path / "run", steps=2)
    train(config)
    other = write_rows(tmp_path / "other.jsonl", random_rows(3, seed=5))
    with pytest.raises(Refusal, match="other rows"):
        train(replace(config, data=(str(other),)))
    with pytest.raises(Refusal, match="--gamma"):
        train(replace(config, gamma=2.0))


def test_export_has_the_trained_weights_and_a_measured_card(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    config = make_config(prepared, tmp_path / "run", steps=3, held_out_percent=30)
    train(config, PeriodicExport(config.out))
    target = Target.load(config.target)
    exported = load_drafter(tmp_path / "run" / "export-latest", target).state_dict()
    for name, tensor in restore(target, *load_training_state(config.out)).state_dict().items():
        assert torch.equal(exported[name], tensor.bfloat16().float()), name
    fields = checkpoint.load(tmp_path / "run" / "export-latest").card_fields
    assert fields.training["steps"] == 3 and [row.dataset for row in fields.acceptance] == ["test"]


def test_a_drafter_trained_further_starts_with_its_weights(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    train(make_config(prepared, tmp_path / "run"), PeriodicExport(tmp_path / "run"))
    folder = tmp_path / "run" / "export-latest"
    config = make_config(prepared, tmp_path / "more", start_from=str(folder), steps=1, lr=0.0, lr_other=0.0)
    train(config)
    saved = checkpoint.load(folder).tensors
    assert {name: tensor.bfloat16().tolist() for name, tensor in weights(tmp_path / "more").items()} == {
        name: tensor.tolist() for name, tensor in saved.items()
    }
    with pytest.raises(Refusal, match=r"--start-from .* has anchor_bias_mlp.0.bias of shape \(8,\)"):
        train(replace(config, calibrator_rank=4, out=str(tmp_path / "other")))


def test_a_short_list_of_draft_tokens_is_all_that_is_proposed(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    train(make_config(prepared, tmp_path / "run"))
    target, records = Target.load(str(prepared[0])), load_records([prepared[1]])
    full = restore(target, *load_training_state(tmp_path / "run"))
    ids = frequent_tokens(records, 20, target.shape.vocab_size)
    short = load_drafter(write_drafter(tmp_path / "short", with_draft_tokens(full, ids), CardFields()), target)
    batch = collate(StateStore(target, 2), records[:1], [Chunk(0, (records[0].anchors[0],))], 4)
    whole, listed = full.logits(batch.context), short.logits(batch.context)
    others = [token for token in range(target.shape.vocab_size) if token not in ids.tolist()]
    assert torch.isneginf(listed[..., others]).all()
    torch.testing.assert_close(listed[..., ids], whole[..., ids], atol=0.1, rtol=0.05)  # exported in bfloat16
    assert evaluate(short, records[:2])["all"].steps >= evaluate(full, records[:2])["all"].steps > 0


def test_dry_run_prints_the_bytes(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    text = dry_run(make_config(prepared, tmp_path / "run"))
    tokens = sum(len(record.token_ids) - 1 for record in load_records([prepared[1]]))
    # 2 layers, keys and values, 2 heads of 8, two bytes each
    assert f"target states of 12 responses (0 already on disk): {2 * 2 * 2 * 8 * 2 * tokens / 1e6:.1f} MB" in text
    assert not (tmp_path / "run").exists()


def test_replay_counts_steps_and_positions() -> None:
    """Ten tokens after the first: matches 3, 0, 2 from places 0, 4, 5, then 1 with one label left."""
    found = Acceptance(block_size=4)
    matches = [3, 9, 9, 9, 0, 2, 9, 9, 1, 9]
    found.add(matches, rooms=[3, 3, 3, 3, 3, 3, 3, 3, 2, 1])
    assert (found.steps, found.tokens, found.prompts) == (4, 10, 1)
    assert found.reached == [4, 3, 2] and found.accepted == [3, 2, 1]


def test_configuration_is_strict(tmp_path: Path) -> None:
    good = {"target": "t", "data": ["d"], "out": "o", "steps": 1}
    assert FlexDraftTrainConfig.from_dict(good, "here").data == ("d",)
    for changes, message in (
        ({"block_sise": 4}, "block_size"),
        ({"lr": "fast"}, "lr"),
        ({"steps": True}, "steps"),
        ({"optimizer": "sgd"}, "--optimizer sgd"),
        ({"stop_at": 5.0}, "--stop-at"),
        ({"steps": 0}, "--steps 0"),
        ({"blocks_per_step": 20}, "--blocks-per-step 20"),
        ({"data": []}, "no data"),
    ):
        with pytest.raises(Refusal, match=message):
            FlexDraftTrainConfig.from_dict({**good, **changes}, "here")
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(Refusal, match="JSON object"):
        FlexDraftTrainConfig.from_json(path)


def test_schedule_ends_at_zero() -> None:
    assert learning_scale(0.04, 0.04) == pytest.approx(1.0) and learning_scale(1.0, 0.04) == pytest.approx(0.0)
    config = FlexDraftTrainConfig(target="t", data=("d",), out="o", stop_at=1000.0)
    progress, now = 0.0, 900.0
    steps = 0
    while progress < 1.0:
        seconds = 3.0 if steps % 2 else 1.0
        new = next_progress(config, steps, progress, seconds, now)
        assert new > progress
        progress, now, steps = new, now + seconds, steps + 1
    assert 995 <= now <= 1005


def test_orthogonalised_heads_have_singular_values_near_one() -> None:
    torch.manual_seed(2)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(6, 8, 40) * 1e-3))
    assert values.min() > 0.6 and values.max() < 1.3
