"""Training sequences, the loss mask, and the order in which anchors are visited.

An *anchor* p is the last accepted position of a block: the bonus token is x[p+1] and slot j = 1..K-1 predicts
x[p+1+j] (FlexDraft section 6). Anchors are those whose bonus token belongs to the assistant's response and that
have at least one label, so the loss covers response tokens only.

Shape legend: N sequences, A anchors per sequence, K block size, S clean keys.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.flexdraft.model import BlockContext
from sglang_ext.models.target import Target


@dataclass(frozen=True)
class Record:
    """One prompt with the target's response; ``states`` is (file, offset, bytes, layers, rows) when kept."""

    key: str
    domain: str
    token_ids: tuple[int, ...]
    prompt_length: int
    states: tuple[str, int, int, int, int] | None

    @property
    def anchors(self) -> range:
        """Positions p with a response token at p+1 (the bonus) and a label at p+2."""
        return range(self.prompt_length - 1, len(self.token_ids) - 2)


def load_records(paths: Sequence[str | Path]) -> list[Record]:
    """Read regenerated files in order, without duplicates and without responses too short to hold a label.

    Raises:
        Refusal: on a missing file, a malformed row, or when no row can be trained on.
    """
    records: dict[str, Record] = {}
    for path in map(Path, paths):
        if not path.is_file():
            raise Refusal(f"--data {path}", "a file written by sglang-ext regenerate", "correct the path")
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise Refusal(
                f"--data {path} cannot be read ({error})", "a file written by sglang-ext regenerate", "correct the path"
            ) from error
        for number, line in enumerate(lines[:-1], start=1):
            try:
                row = json.loads(line)
                prompt, response = row["prompt_ids"], row["response_ids"]
                states = (f"{path}.states", *row["states"]) if "states" in row else None
                record = Record(str(row["key"]), str(row["domain"]), (*prompt, *response), len(prompt), states)
                if not all(type(token) is int and token >= 0 for token in record.token_ids):
                    raise TypeError("prompt_ids and response_ids are token ids")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise Refusal(
                    f"{path}:{number}: {type(error).__name__}: {error}",
                    "rows with key, domain, prompt_ids and response_ids",
                    "regenerate the file",
                ) from error
            if record.prompt_length and len(record.anchors):
                records.setdefault(record.key, record)
    if not records:
        raise Refusal(
            f"--data {', '.join(map(str, paths))}: no row has a response with a label",
            "responses of at least two tokens after a non-empty prompt",
            "regenerate with a larger max_new_tokens",
        )
    return list(records.values())


def refuse_foreign_tokens(records: Sequence[Record], vocab_size: int) -> None:
    """Refuse rows with a token the target does not have: they are another target's.

    Raises:
        Refusal: naming the first such row.
    """
    for record in records:
        largest = max(record.token_ids)
        if largest >= vocab_size:
            raise Refusal(
                f"--data: row {record.key!r} has token {largest}",
                f"the target has tokens 0 to {vocab_size - 1}",
                "regenerate the responses with this target",
            )


def is_held_out(record: Record, percent: int) -> bool:
    """A fixed choice by the record's key, so that a longer file never moves a record between the parts."""
    return int.from_bytes(hashlib.sha256(record.key.encode()).digest()[:4], "big") % 100 < percent


def labels_of(record: Record, anchors: Sequence[int], block_size: int) -> tuple[Tensor, Tensor]:
    """``labels, valid [A, K-1]``: slot j's token x[p+1+j]; a slot past the response's end is not valid."""
    positions = torch.tensor(anchors)[:, None] + torch.arange(2, block_size + 1)
    valid = positions < len(record.token_ids)
    return torch.tensor(record.token_ids)[positions.clamp_max(len(record.token_ids) - 1)], valid


@dataclass(frozen=True)
class Chunk:
    """Some anchors of one record."""

    record: int
    anchors: tuple[int, ...]


def epoch_chunks(records: Sequence[Record], size: int, seed: int, epoch: int) -> list[Chunk]:
    """Every anchor of every record once (a short last chunk is filled with others of the record), shuffled.

    A pure function of its arguments: a resumed run rebuilds the same order.
    """
    chooser = random.Random(f"{seed}/{epoch}")
    chunks: list[Chunk] = []
    for index, record in enumerate(records):
        anchors = list(record.anchors)
        chooser.shuffle(anchors)
        for start in range(0, len(anchors), size):
            part = anchors[start : start + size]
            part += [chooser.choice(anchors) for _ in range(size - len(part))]
            chunks.append(Chunk(index, tuple(part)))
    chooser.shuffle(chunks)
    return chunks


class Schedule:
    """The chunks of step t, for any t, across epochs."""

    def __init__(self, records: Sequence[Record], chunks_per_step: int, size: int, seed: int) -> None:
        self.records, self.chunks_per_step, self.size, self.seed = records, chunks_per_step, size, seed
        self._epoch = -1
        self._chunks: list[Chunk] = []
        self._load(0)

    def _load(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._chunks = epoch_chunks(self.records, self.size, self.seed, epoch)

    @property
    def chunks_per_epoch(self) -> int:
        return sum(-(-len(record.anchors) // self.size) for record in self.records)

    def at(self, step: int) -> list[Chunk]:
        first = step * self.chunks_per_step
        result = []
        for number in range(first, first + self.chunks_per_step):
            epoch, place = divmod(number, self.chunks_per_epoch)
            self._load(epoch)
            result.append(self._chunks[place])
        return result


class StateStore:
    """Keys and values of the target's last D layers for any record: from the regenerated file, or computed."""

    def __init__(self, target: Target, num_layers: int) -> None:
        self.target, self.num_layers = target, num_layers
        self._maps: dict[str, np.memmap] = {}

    def read(self, record: Record) -> Tensor:
        """``[D, 2, Hkv, S, head_dim]`` for positions 0..S-1, S = tokens - 1."""
        if record.states is None:
            return self._compute(record)
        name, offset, size, layers, rows = record.states
        if layers < self.num_layers:
            raise Refusal(
                f"{name} keeps {layers} layers",
                f"the drafter has {self.num_layers}",
                "regenerate with more state layers",
            )
        if name not in self._maps or offset + size > self._maps[name].shape[0]:
            self._maps[name] = np.memmap(name, dtype=np.uint8, mode="r")
        shape = self.target.shape
        flat = torch.from_numpy(np.array(self._maps[name][offset : offset + size])).view(self.target.dtype)
        return flat.view(layers, 2, shape.num_key_value_heads, rows, shape.head_dim)[-self.num_layers :]

    def _compute(self, record: Record) -> Tensor:
        kept: list[Tensor] = []

        def keep(index: int, _hidden: Tensor, keys: Tensor, values: Tensor) -> None:
            if index >= self.target.shape.num_layers - self.num_layers:
                kept.append(torch.stack((keys[0].transpose(0, 1), values[0].transpose(0, 1))))

        self.target.prefill(torch.tensor([record.token_ids[:-1]], device=self.target.device), keep)
        return torch.stack(kept)


@dataclass(frozen=True)
class Batch:
    """Blocks of N sequences with their labels ``[N, A, K-1]``."""

    context: BlockContext
    labels: Tensor
    valid: Tensor


def collate(store: StateStore, records: Sequence[Record], chunks: Sequence[Chunk], block_size: int) -> Batch:
    """Bring chunks of equal size into one padded batch; padding lies past every anchor."""
    device = store.target.device
    span = max(max(chunk.anchors) for chunk in chunks) + 1
    shape = store.target.shape
    states = torch.zeros(
        store.num_layers, 2, len(chunks), shape.num_key_value_heads, span, shape.head_dim, dtype=store.target.dtype
    )
    labels, valid, bonus = [], [], []
    for row, chunk in enumerate(chunks):
        record = records[chunk.record]
        known = store.read(record)[:, :, :, :span]
        states[:, :, row, :, : known.shape[3]] = known
        label, mask = labels_of(record, chunk.anchors, block_size)
        labels.append(label)
        valid.append(mask)
        bonus.append(torch.tensor([record.token_ids[anchor + 1] for anchor in chunk.anchors]))
    states = states.to(device)
    anchors = torch.tensor([chunk.anchors for chunk in chunks], device=device)
    context = BlockContext(list(states[:, 0]), list(states[:, 1]), anchors, torch.stack(bonus).to(device))
    return Batch(context, torch.stack(labels).to(device), torch.stack(valid).to(device))
