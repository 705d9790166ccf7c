"""The `sglang-ext` command: one line and exit code 1 for a refusal, results on stdout, progress on stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from sglang_ext import cli, doctor
from sglang_ext.core.refusal import Refusal
from sglang_ext.models.card import NOT_MEASURED, AcceptanceRow, CardFields
from sglang_ext.models.flexdraft import checkpoint
from tests.unit.tiny import drafter_config, random_tensors, target_config, write_drafter, write_target


def test_the_installed_command_is_this_one() -> None:
    (entry,) = entry_points(group="console_scripts", name="sglang-ext")
    assert entry.load() is cli.main


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    commands = ("doctor", "prepare", "inspect", "serve", "regenerate", "train", "evaluate", "export", "bench", "demo")
    for command in commands:
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--help"])
        assert stop.value.code == 0
        assert "usage: sglang-ext " + command in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["prepair"], ["inspect"], ["prepare", "a", "--outpt", "b"], ["doctor", "x"]])
def test_misuse_is_exit_code_2_with_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: sglang-ext" in capsys.readouterr().err


def test_prepare_prints_the_folder_on_the_last_line_of_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_target(tmp_path / "target", target_config())
    assert cli.main(["prepare", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    assert cli.main(["prepare", str(folder), "--output", str(tmp_path / "copy")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "copy")


@pytest.mark.parametrize("command", [["inspect"], ["prepare"]])
def test_a_refusal_is_one_line_and_exit_code_1(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert "nowhere" in captured.err


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> list[doctor.Check]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_checks", interrupted)
    assert cli.main(["doctor"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_inspect_shows_a_drafter_and_says_when_nothing_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_drafter(tmp_path, "qwen3, gqa, untied, head_dim given")
    assert cli.main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert NOT_MEASURED in text
    assert "Qwen3ForCausalLM" in text
    row = AcceptanceRow("gsm8k", 2.5, 3, 200, "offline")
    tensors = random_tensors(config)
    target = target_config("qwen3, gqa, untied, head_dim given")
    checkpoint.save(tmp_path, config, tensors, target, CardFields({"steps": 5}, (row,)))
    assert cli.main(["inspect", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["acceptance"] == [row.to_json()]
    assert facts["training"] == {"steps": 5}
    assert facts["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert facts["target_layer_ids"] == [3, 4]
    assert cli.main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "2.50 tokens per target step (3 prompts, 200 tokens, offline)" in text
    assert NOT_MEASURED not in text


def test_a_reader_that_leaves_early_sees_no_traceback(tmp_path: Path) -> None:
    write_drafter(tmp_path)
    command = f"{sys.executable} -m sglang_ext.cli inspect {tmp_path} | true"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert run.stderr == ""


def test_inspect_shows_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_target(tmp_path, target_config())
    assert cli.main(["inspect", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["num_layers"], facts["shipped_drafter"]) == ("target", 5, None)


def test_inspect_refuses_a_damaged_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint.save(tmp_path, drafter_config(), random_tensors(drafter_config()), target_config())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rest", "plain", "accelerator", "expected"),
    [
        ([], False, None, ["--model-path", "TARGET", "--speculative-algorithm", "flexdraft", "--device", "cpu"]),
        ([], False, "H200", ["--model-path", "TARGET", "--speculative-algorithm", "flexdraft"]),
        ([], True, None, ["--model-path", "TARGET", "--device", "cpu"]),
        (
            ["--port", "1", "--device=cpu"],
            False,
            None,
            ["--model-path", "TARGET", "--speculative-algorithm", "flexdraft", "--port", "1", "--device=cpu"],
        ),
        (
            ["--model-path", "X", "--speculative-algorithm", "NGRAM"],
            False,
            "H200",
            ["--model-path", "X", "--speculative-algorithm", "NGRAM"],
        ),
    ],
)
def test_serve_fills_in_only_what_is_left_open(
    rest: list[str],
    plain: bool,
    accelerator: str | None,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sglang_ext.targets

    monkeypatch.setattr(cli, "accelerator_name", lambda: accelerator)
    monkeypatch.setattr(sglang_ext.targets, "prepare", lambda: Path("TARGET"))
    assert cli.serve_command(rest, plain=plain) == [sys.executable, "-m", "sglang.launch_server", *expected]


def test_serve_prints_the_command_it_becomes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    became: list[list[str]] = []

    def become(path: str, argv: list[str]) -> None:
        became.append(argv)
        raise Refusal("stop", "here", "please")

    monkeypatch.setattr(cli.os, "execv", become)
    cli.main(["serve", "--plain", "--model-path", "X Y", "--device", "cpu"])
    assert became == [
        [sys.executable, "-m", "sglang.launch_server", "--model-path", "X Y", "--device", "cpu"],
    ]
    assert capsys.readouterr().out.strip().endswith("sglang.launch_server --model-path 'X Y' --device cpu")


def test_doctor_reports_a_broken_check_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def _broken_part() -> list[doctor.Check]:
        raise ImportError("libnothing.so is missing")

    monkeypatch.setattr(doctor, "_CHECKS", (_broken_part, doctor._python))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  broken part" in out
    assert "libnothing.so is missing" in out
    assert "ok    python" in out
    assert "1 of 2 checks failed" in out


@pytest.mark.slow
def test_doctor_is_content_with_this_installation(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor"])
    assert code == 0, capsys.readouterr().out
