"""Prompts to measure on: JSON-lines files given by ``--data``, or a few of our own.

A row is recognised by its fields, so any file in one of these formats works: ``question`` (GSM8K), ``turns`` (MT-Bench,
first turn), ``problem`` (MATH), ``prompt`` (HumanEval), ``text`` (MBPP), ``messages`` (conversations, first user turn).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.bench.prompts import OPEN_QUESTIONS, WORD_PROBLEMS
from sglang_ext.core.refusal import Refusal, nearest

DATA_FLAG = "--data"
FILES = {
    "gsm8k": "gsm8k_test*.jsonl",
    "mt_bench": "mt_bench*.jsonl",
    "math500": "math500*.jsonl",
    "humaneval": "humaneval*.jsonl",
    "mbpp": "mbpp*.jsonl",
}
DEFAULT_DATASETS = ("gsm8k", "mt_bench")
BUILT_IN = "built-in"


@dataclass(frozen=True)
class Prompt:
    """One user message.

    Attributes:
        dataset: where it comes from.
        name: unique within the dataset.
        text: what the user says.
        input_ids: the token ids that are sent: chat template, user turn, start of the assistant's turn.
    """

    dataset: str
    name: str
    text: str
    input_ids: tuple[int, ...] = ()


def load(data: Path | None, names: Sequence[str], count: int) -> dict[str, list[Prompt]]:
    """Return up to ``count`` prompts of each dataset.

    Args:
        data: folder with the files of :data:`FILES`, one JSON-lines file, or None for the built-in prompts.
        names: datasets wanted from a folder.
        count: prompts per dataset.

    Raises:
        Refusal: missing folder, file or field, or an unknown dataset name.
    """
    if data is None:
        return {name: prompts[:count] for name, prompts in built_in().items()}
    if data.is_file():
        return {data.stem: read(data, data.stem, count)}
    if not data.is_dir():
        raise Refusal(
            f"{DATA_FLAG} {data} does not exist",
            "a folder of JSON-lines files or one such file is allowed",
            f"correct the path, or leave {DATA_FLAG} out for the built-in prompts",
        )
    return {name: read(_find(data, name), name, count) for name in names}


def read(path: Path, dataset: str, count: int) -> list[Prompt]:
    """Return the first ``count`` prompts of a JSON-lines file.

    Raises:
        Refusal: on a line that is not a JSON object with a known field, or an empty file.
    """
    prompts: list[Prompt] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if len(prompts) == count:
                    break
                if line.strip():
                    prompts.append(Prompt(dataset, f"{dataset}/{number}", _text(line, path, number)))
    except UnicodeDecodeError as error:
        raise Refusal(f"{DATA_FLAG}: {path} is no text ({error})", "UTF-8 is allowed", "check the file") from error
    if not prompts:
        raise Refusal(f"{DATA_FLAG}: {path} holds no prompts", "one JSON object a line is allowed", "check the file")
    return prompts


def encode(prompts: dict[str, list[Prompt]], target: str) -> dict[str, list[Prompt]]:
    """Apply the target's own chat template; ``target`` is its folder or hub id."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)

    def ids(text: str) -> tuple[int, ...]:
        turns = [{"role": "user", "content": text}]
        return tuple(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False))

    return {
        name: [Prompt(prompt.dataset, prompt.name, prompt.text, ids(prompt.text)) for prompt in group]
        for name, group in prompts.items()
    }


def _find(folder: Path, name: str) -> Path:
    if name not in FILES:
        raise Refusal(
            f"--datasets names {name!r}{nearest(name, FILES)}", f"allowed: {', '.join(FILES)}", "correct the name"
        )
    found = sorted(folder.glob(FILES[name]))
    if not found:
        raise Refusal(
            f"{DATA_FLAG} {folder} has no file {FILES[name]}",
            f"--datasets asks for {name}",
            "add the file or name other datasets",
        )
    return found[0]


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "question": lambda value: value,
    "turns": lambda value: value[0],
    "problem": lambda value: value,
    "prompt": lambda value: f"Complete this Python function:\n\n{value}",
    "text": lambda value: value,
    "messages": lambda value: next(turn["content"] for turn in value if turn["role"] == "user"),
}


def _text(line: str, path: Path, number: int) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"{path}:{number} is not JSON ({error})", "one JSON object a line is allowed", "correct it"
        ) from error
    for field, extract in _FIELDS.items():
        if isinstance(row, dict) and field in row:
            try:
                return str(extract(row[field]))
            except (LookupError, TypeError, StopIteration) as error:
                raise Refusal(
                    f"{path}:{number} has no prompt in {field} = {str(row[field])[:60]!r}",
                    "turns is a list of texts, messages a list of objects with role and content, one the user's",
                    "correct the row",
                ) from error
    raise Refusal(
        f"{path}:{number} has none of the fields a prompt is read from",
        f"allowed: {', '.join(_FIELDS)}",
        "rename the field",
    )


def built_in() -> dict[str, list[Prompt]]:
    """Return the built-in prompts: word problems and open questions."""
    groups = {f"{BUILT_IN} problems": WORD_PROBLEMS, f"{BUILT_IN} questions": OPEN_QUESTIONS}
    return {
        name: [Prompt(name, f"{name}/{number}", text) for number, text in enumerate(texts, start=1)]
        for name, texts in groups.items()
    }
