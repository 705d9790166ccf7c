"""``sglang-ext regenerate``: let the target answer prompts, as append-only JSONL that resumes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.target import KVCache, Target
from sglang_ext.training.generate import BatchedGenerator, GenerationRequest
from sglang_ext.training.prompts import Prompt, PromptSource, interleave, read_source

#: Prompts of this many consecutive requests run shortest first, so that the rows in flight have similar lengths.
SORT_WINDOW = 256


@dataclass(frozen=True)
class RegenerateConfig:
    """``self_written`` instructions are sampled from an empty user turn first and answered like the others.

    ``state_layers`` D > 0 also keeps the keys and values of the target's last D layers, which generation has computed
    anyway, in ``<out>.states`` (raw, in the target's dtype); training then needs no target forward. Process ``shard``
    of ``shards`` answers every ``shards``-th prompt; each process has its own ``out``.
    """

    target: str
    out: str
    sources: tuple[PromptSource, ...] = ()
    self_written: int = 0
    self_written_temperature: float = 0.9
    self_written_max_tokens: int = 96
    self_written_answer_tokens: int = 160
    slots: int = 96
    capacity: int = 640
    seed: int = 0
    state_layers: int = 0
    shard: int = 0
    shards: int = 1

    def __post_init__(self) -> None:
        for name, low in (("self_written", 0), ("slots", 1), ("capacity", 2), ("state_layers", 0), ("seed", 0)):
            if vars(self)[name] < low:
                flag = f"--{name.replace('_', '-')}"
                raise Refusal(f"{flag} {vars(self)[name]}", f"at least {low}", "correct the number")


def read_records(path: Path, key: str = "key") -> list[dict[str, Any]]:
    """Read finished records; a last line cut off by a crash is dropped from the file.

    Raises:
        Refusal: if the file is something else; it is then left as it is.
    """
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        records = [json.loads(line) for line in whole.splitlines()]
        if not all(isinstance(record, dict) and key in record for record in records):
            raise ValueError(f"a row has no {key!r}")
        cut, start = data[len(whole) :], f'{{"{key}": '.encode()
        if cut[: len(start)] != start[: len(cut)]:
            raise ValueError("its last line is no row cut off")
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(
            f"{path} holds something else ({error})", "a new file, or rows of an earlier run", "choose another --out"
        ) from error
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return records


def _append(file: Any, record: dict[str, Any]) -> None:
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()


class StateWriter:
    """Appends target states to ``<out>.states``; a tail that no record names (a crash) is cut off first."""

    def __init__(self, out: Path, records: list[dict[str, Any]]) -> None:
        self.path = Path(f"{out}.states")
        self.end = max((sum(record["states"][:2]) for record in records if "states" in record), default=0)

    def __enter__(self) -> StateWriter:
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        self._file.truncate(self.end)
        self._file.seek(self.end)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self.end == 0:
            self.path.unlink()

    def append(self, states: Tensor) -> list[int]:
        """Write ``[D, 2, Hkv, S, head_dim]``; returns ``[offset in bytes, bytes, D, S]`` for the record."""
        data = states.contiguous().view(torch.uint8).numpy().tobytes()
        self._file.write(data)
        self._file.flush()
        place = [self.end, len(data), states.shape[0], states.shape[3]]
        self.end += len(data)
        return place


def _stop_ids(tokenizer: Any, target: Target) -> set[int]:
    eos = target.hf_config["eos_token_id"]
    return {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}


def user_turn_opening(tokenizer: Any) -> str:
    """The rendered chat template up to where the first user turn's text begins."""
    marker = "\u2402"
    rendered: str = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    return rendered[: rendered.index(marker)]


class Progress:
    """One line every ``every`` seconds on stderr: done, rate, time left."""

    def __init__(self, label: str, total: int, every: float = 10.0) -> None:
        self.label, self.total, self.every = label, total, every
        self.started = self.shown = time.monotonic()
        self.done = self.tokens = 0

    def add(self, tokens: int) -> None:
        self.done += 1
        self.tokens += tokens
        now = time.monotonic()
        if now - self.shown >= self.every or self.done == self.total:
            self.shown = now
            elapsed = now - self.started
            left = elapsed / self.done * (self.total - self.done)
            rate = self.tokens / max(elapsed, 1e-9)
            print(
                f"{self.label}: {self.done}/{self.total}, {rate:.0f} tokens/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def write_instructions(
    config: RegenerateConfig, target: Target, tokenizer: Any, generator: BatchedGenerator
) -> list[Prompt]:
    """Sample user turns from the target until ``self_written`` different ones exist; kept beside ``out``."""
    path = Path(f"{config.out}.instructions.jsonl")
    texts = list(dict.fromkeys(record["text"] for record in read_records(path, "text")))
    generator.generator.manual_seed(config.seed + len(texts))
    opening = tuple(tokenizer(user_turn_opening(tokenizer), add_special_tokens=False)["input_ids"])
    progress = Progress("instructions", config.self_written)
    with path.open("a", encoding="utf-8") as file:
        rounds = 0
        while len(texts) < config.self_written and rounds < 4:
            rounds += 1
            wanted = config.self_written - len(texts)
            requests = (
                GenerationRequest(str(i), opening, config.self_written_max_tokens, config.self_written_temperature)
                for i in range(wanted + wanted // 4 + 1)
            )
            known = set(texts)
            for result in generator.run(requests):
                text = tokenizer.decode(result.response_ids[:-1]).strip()
                if result.finished and len(text) >= 8 and text not in known:
                    known.add(text)
                    texts.append(text)
                    _append(file, {"text": text})
                    progress.add(len(result.response_ids))
    return [
        Prompt(
            json.dumps(["self", text]), "self", ({"role": "user", "content": text},), config.self_written_answer_tokens
        )
        for text in texts[: config.self_written]
    ]


def _requests(prompts: list[Prompt], tokenizer: Any, capacity: int) -> Iterator[GenerationRequest]:
    window: list[GenerationRequest] = []
    for prompt in prompts:
        rendered = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        ids = tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        if len(ids) + prompt.max_new_tokens <= capacity:
            window.append(GenerationRequest(prompt.key, ids, prompt.max_new_tokens))
        if len(window) == SORT_WINDOW:
            yield from sorted(window, key=lambda request: len(request.prompt_ids))
            window = []
    yield from sorted(window, key=lambda request: len(request.prompt_ids))


def regenerate(config: RegenerateConfig, dry_run: bool = False) -> int:
    """Answer all prompts greedily; returns the number of records in ``out``. Rows already there are kept."""
    from transformers import AutoTokenizer

    target = Target.load(config.target)
    if config.state_layers > target.shape.num_layers:
        raise Refusal(
            f"--state-layers {config.state_layers}", f"the target has {target.shape.num_layers}", "lower the number"
        )
    cache_bytes = KVCache.bytes_needed(target.shape, config.slots, config.capacity, target.embedding.element_size())
    print(f"KV cache: {cache_bytes / 1e6:.0f} MB", file=sys.stderr)
    if dry_run:
        return 0
    if not config.sources and not config.self_written:
        raise Refusal("no prompts", "at least one --source or --self-written N", "add one of them")
    tokenizer = AutoTokenizer.from_pretrained(config.target, local_files_only=True)
    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    stop_ids = _stop_ids(tokenizer, target)
    generator = BatchedGenerator(target, stop_ids, config.slots, config.capacity, config.seed)
    groups = [read_source(source, config.seed) for source in config.sources]
    if config.self_written:
        groups.append(write_instructions(config, target, tokenizer, generator))
    records = read_records(out)
    done = {record["key"] for record in records}
    prompts = interleave(groups, config.seed)[config.shard :: config.shards]
    waiting = {prompt.key: prompt for prompt in prompts if prompt.key not in done}
    progress = Progress("responses", len(waiting))
    count = len(records)
    generator.state_layers = config.state_layers
    with out.open("a", encoding="utf-8") as file, StateWriter(out, records) as states:
        for result in generator.run(_requests(list(waiting.values()), tokenizer, config.capacity)):
            prompt = waiting[result.request.key]
            record = {
                "key": prompt.key,
                "domain": prompt.domain,
                "prompt_ids": list(result.request.prompt_ids),
                "response_ids": list(result.response_ids),
                "finished": result.finished,
            }
            if result.states is not None:
                record["states"] = states.append(result.states)
            _append(file, record)
            count += 1
            progress.add(len(result.response_ids))
        os.fsync(file.fileno())
    return count
