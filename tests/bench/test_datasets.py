"""Prompts are read from files of known formats; everything else is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.bench import datasets
from sglang_ext.core.refusal import Refusal


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"question": "How many?", "answer": "2"}, "How many?"),
        ({"turns": ["First.", "Second."]}, "First."),
        ({"problem": "Prove it.", "solution": ""}, "Prove it."),
        ({"text": "Write a function.", "code": ""}, "Write a function."),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, "u"),
    ],
)
def test_each_known_format_yields_the_users_words(tmp_path: Path, row: dict[str, Any], text: str) -> None:
    (prompt,) = datasets.read(write(tmp_path / "x.jsonl", [row]), "x", 5)
    assert prompt.text == text
    assert prompt.name == "x/1"


def test_a_folder_yields_the_datasets_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "gsm8k_test_part.jsonl", [{"question": f"q{number}"} for number in range(5)])
    write(tmp_path / "mt_bench_all.jsonl", [{"turns": ["t"]}])
    groups = datasets.load(tmp_path, ["gsm8k", "mt_bench"], 3)
    assert {name: len(group) for name, group in groups.items()} == {"gsm8k": 3, "mt_bench": 1}


def test_one_file_is_a_dataset_of_its_own_name(tmp_path: Path) -> None:
    groups = datasets.load(write(tmp_path / "mine.jsonl", [{"question": "q"}]), ["gsm8k"], 3)
    assert list(groups) == ["mine"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "absent", ["--data", "does not exist"]),
        (lambda folder: folder, ["gsm8k_test", "--datasets"]),
        (lambda folder: write(folder / "empty.jsonl", []), ["holds no prompts"]),
        (lambda folder: write(folder / "odd.jsonl", [{"wording": "x"}]), ["odd.jsonl:1", "question"]),
        (lambda folder: write(folder / "list.jsonl", [[1]]), ["list.jsonl:1"]),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, make: Any, words: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        datasets.load(make(tmp_path), ["gsm8k"], 3)
    assert all(word in str(refused.value) for word in words)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text('{"question": "q"}\n{"question": \n', encoding="utf-8")
    with pytest.raises(Refusal, match=r"broken\.jsonl:2"):
        datasets.read(path, "broken", 5)


def test_an_unknown_dataset_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="gsm8k"):
        datasets.load(tmp_path, ["gsm8"], 3)


def test_built_in_prompts_fill_a_batch_of_sixteen_and_are_distinct() -> None:
    groups = datasets.load(None, [], 100)
    problems, questions = groups.values()
    assert len(problems) >= 16
    texts = [prompt.text for prompt in [*problems, *questions]]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    "row", ({"turns": []}, {"turns": 5}, {"messages": []}, {"messages": ["hi"]}, {"messages": [{"content": "x"}]})
)
def test_a_known_field_of_another_form_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"x\.jsonl:1 has no prompt in"):
        datasets.read(write(tmp_path / "x.jsonl", [row]), "x", 5)


@pytest.mark.parametrize("content", (b"\xff\xfe\n", b"[" * 100_000, b'{"question": ' + b"9" * 10_000 + b"}"))
def test_files_that_are_no_json_lines_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(Refusal, match=r"x\.jsonl"):
        datasets.read(path, "x", 5)
