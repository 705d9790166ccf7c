"""The command line: what it accepts, and that a refusal is one line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.bench import commands
from sglang_ext.core.refusal import Refusal


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
