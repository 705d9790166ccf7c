"""The command line: what it accepts, and that a refusal is one line."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.bench import commands, datasets
from sglang_ext.core.refusal import Refusal
from tests.bench.fake_server import FakeServer, serving


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands.add_parsers(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


def test_defaults_are_the_documented_ones() -> None:
    args = parse()
    assert args.batch == (1, 4, 16)
    assert args.temperature == 0.0
    assert args.data is None
    assert args.datasets == ("gsm8k", "mt_bench")


def test_inner_commands_replace_the_comparison() -> None:
    runs: dict[str, Any] = {name: parse(*name.split()).run for name in ("", "steps", "memory")}
    assert len(set(runs.values())) == 3


def test_server_flags_are_split_like_a_shell_does() -> None:
    assert parse("--server-args", "--dtype float32 --context-length 2048").server_args == [
        "--dtype",
        "float32",
        "--context-length",
        "2048",
    ]


@pytest.mark.parametrize("words", [["--batch", "1,x"], ["--batch", "0"], ["--prompts", "-1"], ["--mode", "fast"]])
def test_a_bad_value_is_refused_by_the_parser(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*words)
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--baseline-url", "http://127.0.0.1:1"], ["--url", "http://127.0.0.1:1"], ["--data", "/no/such/folder"]]
)
def test_what_cannot_work_is_refused_before_anything_starts(words: list[str], tmp_path: Path) -> None:
    args = parse("--out", str(tmp_path), *words)
    with pytest.raises(Refusal, match=words[0]):
        args.run(args)


def test_the_documented_flags_are_the_parsers() -> None:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    commands.add_parsers(subparsers)
    known = {flag for flag in subparsers.choices["bench"]._option_string_actions if flag.startswith("--")}
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    flags = page.split("## Flags", 1)[1].split("## ", 1)[0]
    documented = {
        word.split()[0] for row in flags.splitlines() for word in row.split("`")[1::2] if word.startswith("--")
    }
    assert known - {"--help"} <= documented
    assert documented <= known | {"--speculative-adaptive-config"}


RECORD = {"mode": "parallel", "verify_length": 3, "draft_ids": [2, 3, 4], "accepted": 2, "bonus": 5, "groups": 4,
          "confidence": [0.9, 0.8, 0.7], "step_ms": 30.0, "batch_size": 1}  # fmt: skip


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """A FlexDraft server that commits three tokens a step, or a plain one where the request says so."""
    tokens = body["sampling_params"]["max_new_tokens"]
    options = (body["sampling_params"].get("custom_params") or {}).get("speculative", {})
    meta: dict[str, Any] = {"completion_tokens": tokens, "finish_reason": {"type": "length"}}
    if options.get("mode") != "plain":
        meta["spec_verify_ct"] = tokens // 3
    if options.get("records"):
        meta["speculative"] = [RECORD, None, None]
    return {"output_ids": list(range(tokens)), "text": "x" * tokens, "meta_info": meta}


def test_a_whole_comparison_leaves_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def encode(prompts: dict[str, list[datasets.Prompt]], target: str) -> dict[str, list[datasets.Prompt]]:
        assert target == "/targets/some"
        return {name: [replace(prompt, input_ids=(1, 2, 3)) for prompt in group] for name, group in prompts.items()}

    monkeypatch.setattr(datasets, "encode", encode)
    with serving(FakeServer(answer)) as fake:
        fake.documents["/model_info"] = {"model_path": "/targets/some"}
        fake.documents["/server_info"] = {"internal_states": [{"speculative_plan": {"block_size": 8}}]}
        args = parse("--smoke", "--url", fake.url, "--batch", "1,2", "--prompts", "2", "--rounds", "2",
                     "--max-new-tokens", "9", "--out", str(tmp_path))  # fmt: skip
        assert args.run(args) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [(row["dataset"], row["batch"]) for row in data["rows"]] == [
        (name, batch) for name in ("built-in problems", "built-in questions") for batch in (1, 2)
    ]
    assert all(row["accept_length"] == 3.0 for row in data["rows"])
    assert all(row["texts"]["plain request"]["equal"] == row["texts"]["plain request"]["pairs"] for row in data["rows"])
    assert data["environment"]["server_info"] == {"speculative_plan": {"block_size": 8}}
    for row in data["rows"]:
        assert f"| {row['dataset']}" in printed
    assert (tmp_path / "report.md").read_text(encoding="utf-8").count("draft position") == 2
