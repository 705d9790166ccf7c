"""Bad input to the training commands: one line that names the flag or file, and nothing of the user's is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext import cli
from sglang_ext.core.refusal import Refusal
from sglang_ext.models.target import Target
from sglang_ext.training.config import FlexDraftTrainConfig
from sglang_ext.training.data import load_records
from sglang_ext.training.export import PeriodicExport, load_training_state, refuse_to_replace
from sglang_ext.training.prompts import PromptSource, read_source
from sglang_ext.training.regenerate import RegenerateConfig, read_records
from sglang_ext.training.state import refusal_of_a_worker
from sglang_ext.training.train import CHECKPOINT, train
from tests.training.tiny_targets import SMALL, random_rows, write_rows, write_target

GOOD: dict[str, Any] = {"target": "t", "data": ["d"], "out": "o", "steps": 2, **SMALL}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("bad") / "target")


@pytest.fixture
def run(target: Path, tmp_path: Path) -> Path:
    """A finished tiny run."""
    data = write_rows(tmp_path / "rows.jsonl", random_rows(4))
    out = tmp_path / "run"
    train(FlexDraftTrainConfig.from_dict({**GOOD, "target": str(target), "data": [str(data)], "out": str(out)}, "here"))
    return out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("anchors_per_sequence", 0),
        ("workers", 0),
        ("workers", -1),
        ("blocks_per_step", 0),
        ("block_size", 1),
        ("num_layers", 0),
        ("calibrator_rank", -1),
        ("frequent", -5),
        ("drawn", -1),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("lr_other", -1e-3),
        ("lr", 10**400),
        ("warmup", 1.5),
        ("grad_clip", 0.0),
        ("gamma", 0.0),
        ("threads", -1),
        ("seed", -1),
        ("held_out_percent", 100),
        ("export_seconds", -1.0),
    ],
)
def test_numbers_out_of_range_name_their_flag(name: str, value: float) -> None:
    with pytest.raises(Refusal, match=f"--{name.replace('_', '-')} ") as refused:
        FlexDraftTrainConfig.from_dict({**GOOD, name: value}, "here")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", (b"\xff\xfe", b"{" * 3, b"[" * 100_000, b'{"seed": ' + b"9" * 10_000 + b"}"))
def test_config_files_that_are_no_json(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(Refusal, match="--config"):
        FlexDraftTrainConfig.from_json(path)


@pytest.mark.parametrize("content", (b"", b"junk", b"\x80\x04.", None))
def test_damaged_checkpoints_are_named(run: Path, content: bytes | None) -> None:
    """Junk, a cut file, and a file of something else: for `export` and for a continued run."""
    path = run / CHECKPOINT
    config = load_training_state(run)[0]
    if content is None:
        torch.save({"step": 3}, path)
    else:
        path.write_bytes(content)
    for attempt in (lambda: load_training_state(run), lambda: train(config)):
        with pytest.raises(Refusal, match=CHECKPOINT) as refused:
            attempt()
        assert "\n" not in str(refused.value)


def test_a_cut_checkpoint_is_named(run: Path) -> None:
    path = run / CHECKPOINT
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(Refusal, match="no checkpoint"):
        load_training_state(run)


def test_export_deletes_nothing_but_an_older_drafter(run: Path, tmp_path: Path, capsys: Any) -> None:
    """A folder with anything else, the run itself, and a plain file survive `export --out`."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    for out in (precious, run, precious / "thesis.txt", Path("/")):
        assert cli.main(["export", "--run", str(run), "--out", str(out)]) == 1
        assert "--out" in capsys.readouterr().err
    assert (precious / "thesis.txt").read_text() == "x" and (run / CHECKPOINT).is_file()
    drafter = tmp_path / "drafter"
    for _ in range(2):
        assert cli.main(["export", "--run", str(run), "--out", str(drafter)]) == 0
    refuse_to_replace(drafter)
    (drafter / "notes.txt").write_text("mine")
    with pytest.raises(Refusal, match=r"notes\.txt"):
        refuse_to_replace(drafter)


def test_a_run_learns_at_its_start_that_it_cannot_export(tmp_path: Path) -> None:
    (tmp_path / "export-latest").mkdir()
    (tmp_path / "export-latest" / "mine.txt").write_text("x")
    with pytest.raises(Refusal, match=r"mine\.txt"):
        PeriodicExport(tmp_path)


@pytest.mark.parametrize("row", ([5, "six"], "text", [5, -1], [5, 1.5], [True], None))
def test_rows_without_token_ids_are_refused(tmp_path: Path, row: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"key": "a", "domain": "d", "prompt_ids": [5], "response_ids": row}) + "\n")
    with pytest.raises(Refusal, match=r"rows\.jsonl:1"):
        load_records([path])


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(Refusal, match="cannot be read"):
        load_records([path])
    with pytest.raises(Refusal, match="cannot be read"):
        read_source(PromptSource("a", str(path), "text"))


def test_rows_of_another_target_are_refused(target: Path, run: Path, tmp_path: Path, capsys: Any) -> None:
    data = write_rows(tmp_path / "foreign.jsonl", [([5, 6], [7, 8, 1000, 9])])
    config = {**GOOD, "target": str(target), "data": [str(data)], "out": str(tmp_path / "other")}
    with pytest.raises(Refusal, match="token 1000"):
        train(FlexDraftTrainConfig.from_dict(config, "here"))
    argv = ["evaluate", "--target", str(target), "--drafter", str(run), "--data", str(data)]
    assert cli.main(argv) == 1 and "token 1000" in capsys.readouterr().err
    rows = str(write_rows(tmp_path / "rows2.jsonl", random_rows(2)))
    argv = ["evaluate", "--target", str(target), "--drafter", str(run), "--data", rows, "--held-out-percent", "0"]
    assert cli.main(argv) == 1 and "--held-out-percent 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ("--limit -1", "--threads -2", "--draft-vocabulary -5", "--draft-vocabulary 1.5", "--limit x")
)
def test_negative_counts_are_misuse(flag: str) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", "--run", "r", "--out", "o", *flag.split()])
    assert stop.value.code == 2


def test_a_damaged_target_is_named(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "config.json").write_bytes((target / "config.json").read_bytes())
    weights = (target / "model.safetensors").read_bytes()
    for content in (weights[:1000], b""):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(Refusal, match=r"--target .*cannot be loaded"):
            Target.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(Refusal, match=r"--target .*cannot be loaded"):
        Target.load(folder)


@pytest.mark.parametrize(
    "content", (b"my notes", b"notes\nof mine\n", b'{"a": 1}\n', b"[1]\n", b'{"minified": "json"}', b"\xff\xfe\n")
)
def test_regenerate_leaves_foreign_files_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(Refusal, match="--out"):
        read_records(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("cut", (b'{"key": "b', b"{", b'{"ke'))
def test_regenerate_drops_only_its_own_cut_row(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"key": "a"}\n' + cut)
    assert read_records(path) == [{"key": "a"}]
    assert path.read_bytes() == b'{"key": "a"}\n'


@pytest.mark.parametrize("changes", ({"slots": 0}, {"capacity": -1}, {"state_layers": -1}, {"self_written": -1}))
def test_regenerate_numbers_name_their_flag(changes: dict[str, int]) -> None:
    with pytest.raises(Refusal, match=f"--{next(iter(changes)).replace('_', '-')} "):
        RegenerateConfig("t", "o", **changes)


@pytest.mark.parametrize("row", ("[1]", '{"text": null}', '{"text": 5}', '"x"', "[" * 100_000))
def test_source_rows_of_another_form_are_refused(tmp_path: Path, row: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(Refusal, match=r"a\.jsonl:1"):
        read_source(PromptSource("a", str(path), "text"))
    with pytest.raises(Refusal, match="regular expression"):
        read_source(PromptSource("a", str(path), "text", strip="(("))


@pytest.mark.parametrize("workers", (1, 2))
def test_a_worker_refuses_in_one_line(target: Path, tmp_path: Path, workers: int) -> None:
    config = {**GOOD, "target": str(target), "data": ["/nowhere.jsonl"], "out": str(tmp_path / "run")}
    with pytest.raises(Refusal, match=r"--data /nowhere\.jsonl; .*: correct the path") as refused:
        train(FlexDraftTrainConfig.from_dict({**config, "workers": workers}, "here"))
    assert "\n" not in str(refused.value)


def test_a_worker_that_fails_otherwise_is_no_refusal() -> None:
    assert refusal_of_a_worker("Traceback\n  Refusal: x\nValueError: a; b: c") is None


def test_an_out_that_cannot_be_written_is_named(target: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    config = {**GOOD, "target": str(target), "data": ["d"], "out": str(tmp_path / "file")}
    with pytest.raises(Refusal, match=r"--out .*file cannot be written"):
        train(FlexDraftTrainConfig.from_dict(config, "here"))
