"""The command refuses in one line what it cannot do, before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from demo.commands import add_parsers, run
from sglang_ext.core.refusal import Refusal


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())
    return parser.parse_args(["demo", *words])


def test_only_this_machine_can_open_the_page_unless_told() -> None:
    args = parse()
    assert (args.host, args.port, args.url, args.open) == ("127.0.0.1", 7860, [], False)
    assert parse("--url", "a:1", "--url", "b:2").url == ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--url", "http://host:port"), "no server address"),
        (("--baseline-url", "http://127.0.0.1:9"), "it needs --url"),
        (("--url", "http://127.0.0.1:9", "--server-args=--x"), "--server-args"),
        (("--replay", "no-such-file.json"), "no-such-file.json cannot be read"),
    ],
)
def test_refusals_name_the_flag(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(Refusal, match=said):
        run(parse(*words))


def test_a_file_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(Refusal, match="holds no saved run"):
        run(parse("--replay", str(file)))
