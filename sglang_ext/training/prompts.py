"""Prompt sources: which rows of which JSONL file become chat prompts of which domain."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sglang_ext.core.refusal import Refusal, refuse_unknown

Message = dict[str, str]


@dataclass(frozen=True)
class PromptSource:
    """One JSONL file of prompts.

    ``field`` names the text column; ``messages`` as field means chat turns, of which each user turn is taken with the
    turns before it. ``exclude`` is ``column:first-last`` (inclusive integers). ``strip`` is a regular expression
    removed from every text before duplicates are dropped. ``limit`` 0 means all rows.
    """

    domain: str
    path: str
    field: str
    limit: int = 0
    max_new_tokens: int = 160
    exclude: str = ""
    strip: str = ""

    @classmethod
    def parse(cls, text: str) -> PromptSource:
        """Parse ``domain=NAME,path=FILE,field=COLUMN[,limit=N][,max_new_tokens=N][,exclude=COL:A-B][,strip=REGEX]``."""
        pairs = dict(part.split("=", 1) if "=" in part else (part, "") for part in text.split(","))
        flag = f"--source {text}"
        refuse_unknown(flag, pairs, [item.name for item in fields(cls)])
        for name in ("domain", "path", "field"):
            if not pairs.get(name):
                raise Refusal(f"{flag} has no {name}", "domain, path and field are required", f"add {name}=...")
        typed: dict[str, Any] = dict(pairs)
        for name in ("limit", "max_new_tokens"):
            if name in pairs:
                if not pairs[name].isdigit():
                    raise Refusal(f"{flag}: {name}={pairs[name]}", "a whole number", "correct the number")
                typed[name] = int(pairs[name])
        return cls(**typed)


@dataclass(frozen=True)
class Prompt:
    """A chat prompt waiting for the target's answer; ``key`` identifies it across resumed runs."""

    key: str
    domain: str
    messages: tuple[Message, ...]
    max_new_tokens: int


def _excluded(row: dict[str, Any], rule: str) -> bool:
    if not rule:
        return False
    match = re.fullmatch(r"(\w+):(\d+)-(\d+)", rule)
    if match is None:
        raise Refusal(f"exclude={rule}", "column:first-last with whole numbers", "for example exclude=task_id:11-510")
    column, first, last = match.groups()
    return int(first) <= int(row[column]) <= int(last)


def _chats(row: dict[str, Any], field: str, strip: re.Pattern[str] | None) -> Iterator[tuple[Message, ...]]:
    clean = (lambda text: strip.sub("", text).strip()) if strip else (lambda text: text.strip())
    if field != "messages":
        yield ({"role": "user", "content": clean(row[field])},)
        return
    turns = [{"role": turn["role"], "content": clean(turn["content"])} for turn in row["messages"]]
    for index, turn in enumerate(turns):
        if turn["role"] == "user":
            yield tuple(turns[: index + 1])


def read_source(source: PromptSource, seed: int = 0) -> list[Prompt]:
    """Read, deduplicate and (when limited) sample one source; the order is a fixed shuffle of ``seed``.

    Raises:
        Refusal: missing file, missing column, or a row that is not JSON.
    """
    path = Path(source.path)
    if not path.is_file():
        raise Refusal(f"path={source.path}", "an existing JSONL file", "correct the path of the source")
    try:
        strip = re.compile(source.strip) if source.strip else None
    except re.error as error:
        raise Refusal(f"strip={source.strip} ({error})", "a regular expression", "correct it") from error
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"path={source.path} cannot be read ({error})", "a JSONL file", "correct the path") from error
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if _excluded(row, source.exclude):
                continue
            chats = list(_chats(row, source.field, strip))
        except Refusal:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Refusal(
                f"{path}:{number}: {type(error).__name__}: {error}",
                f"one JSON object a line with the column {source.field!r}",
                "correct the file or the field= of the source",
            ) from error
        for messages in chats:
            key = json.dumps([source.domain, messages], ensure_ascii=False)
            if key not in seen:
                seen.add(key)
                prompts.append(Prompt(key, source.domain, messages, source.max_new_tokens))
    random.Random(seed).shuffle(prompts)
    return prompts[: source.limit] if source.limit else prompts


def interleave(groups: Iterable[list[Prompt]], seed: int = 0) -> list[Prompt]:
    """Mix the sources so that every prefix holds each domain in about its final share."""
    placed = [
        ((index + random.Random(f"{seed}/{prompt.key}").random()) / len(group), prompt)
        for group in groups
        for index, prompt in enumerate(group)
    ]
    return [prompt for _, prompt in sorted(placed, key=lambda pair: (pair[0], pair[1].key))]
