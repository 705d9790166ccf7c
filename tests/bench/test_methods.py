"""``--methods``: what it accepts, and the flags each method's server gets."""

from __future__ import annotations

import argparse

import pytest

from sglang_ext.bench import commands
from sglang_ext.bench.methods import ServedMethod, parse_method, parse_methods
from sglang_ext.core.refusal import Refusal


def test_the_drafter_flag_belongs_to_the_first_method() -> None:
    assert parse_methods(["flexdraft"], None) == [ServedMethod("flexdraft")]
    assert parse_methods(["flexdraft", "dflash=/d", "ngram"], "/f") == [
        ServedMethod("flexdraft", "/f"),
        ServedMethod("dflash", "/d"),
        ServedMethod("ngram"),
    ]


@pytest.mark.parametrize(
    ("words", "drafter", "message"),
    (
        (["flexdarft"], None, "flexdraft"),
        ([""], None, "--methods"),
        (["flexdraft", "flexdraft=/d"], None, "twice"),
        (["dflash"], None, "dflash=DIR"),
        (["dflare="], None, "behind ="),
        (["ngram=/d"], None, "no drafter for ngram"),
        (["dflare=/d"], "/e", "--drafter /e"),
        (["ngram"], "/e", "--drafter /e"),
    ),
)
def test_what_cannot_be_served_is_refused(words: list[str], drafter: str | None, message: str) -> None:
    with pytest.raises(Refusal, match=message) as refused:
        parse_methods(words, drafter)
    assert "\n" not in str(refused.value)


def test_one_method_has_its_modes_and_is_ours() -> None:
    assert parse_method("flexdraft", "/d").modes == ("parallel", "sequential")
    assert parse_method("dflash=/d", None).modes == ("sequential",)
    with pytest.raises(Refusal, match="flexdraft, dflare, dflash"):
        parse_method("ngram", None)


def test_flags_of_each_server() -> None:
    assert ServedMethod("flexdraft").arguments(None) == ["--speculative-algorithm", "flexdraft"]
    assert ServedMethod("dflash", "/d").arguments("{}") == [
        *("--speculative-algorithm", "dflare"),
        *("--speculative-draft-model-path", "/d"),
        *("--speculative-adaptive-config", "{}"),
    ]
    assert "--speculative-adaptive-config" not in ServedMethod("ngram").arguments("{}")


@pytest.mark.parametrize(
    "words",
    (
        ["--url", "http://127.0.0.1:1", "--methods", "flexdraft,dflare"],
        ["--url", "http://127.0.0.1:1", "--methods", "ngram"],
        ["--no-baseline", "--methods", "flexdraft,dflare"],
        ["--no-baseline", "--methods", "ngram"],
        ["--mode", "parallel", "--methods", "flexdraft,dflare"],
    ),
)
def test_methods_that_cannot_be_compared_so_are_refused_before_a_server_starts(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    commands.add_parsers(parser.add_subparsers())
    args = parser.parse_args(["bench", *words])
    with pytest.raises(Refusal, match="--methods"):
        args.run(args)
