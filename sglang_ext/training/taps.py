"""The target's taps for training: computed once per response by a prefill, and kept in a file where one is named.

The file is written as the responses are met. Its rows are the plain bytes of the taps, its index (``FILE.json``) says
for which target and layers they are and where each response's rows begin. A run with fewer taps may read the file of
one with more. Shape legend: S positions, T taps, H hidden, N sequences, A anchors per sequence.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.tapped.model import TapContext
from sglang_ext.models.target import Target
from sglang_ext.training.data import Chunk, ContextStore, Record


def compute_taps(target: Target, token_ids: Sequence[int], layer_ids: Sequence[int]) -> Tensor:
    """Outputs ``[S, T, H]`` of the target layers ``layer_ids`` for one sequence."""
    inputs: dict[int, Tensor] = {}

    def keep(index: int, hidden: Tensor, _keys: Tensor, _values: Tensor) -> None:
        inputs[index] = hidden[0]

    last = target.prefill(torch.tensor([token_ids], device=target.device), keep)
    inputs[target.shape.num_layers] = last[0]
    return torch.stack([inputs[layer + 1] for layer in layer_ids], dim=1)


def kept_keys(path: str | Path) -> set[str]:
    """Keys of the responses in a file of taps; none if there is no such file."""
    index = Path(f"{path}.json")
    if not index.exists():
        return set()
    rows = map(json.loads, index.read_text(encoding="utf-8").splitlines()[1:])
    return {row["key"] for row in rows}


class TapFile:
    """Taps of responses by key, appended to a file and read back by position; several processes may share it.

    Raises:
        Refusal: if the file belongs to another target, or lacks a layer.
    """

    def __init__(self, path: str | Path, target: Target, layer_ids: Sequence[int]) -> None:
        self.path, self._index_path = Path(path), Path(f"{path}.json")
        self._width, self._dtype = target.shape.hidden_size, target.dtype
        # Taps are a function of the target's weights: a few of them stand for all.
        sample = torch.cat((target.embedding[:8].flatten(), target.layers[-1].down[:8].flatten())).float()
        digest = hashlib.sha256(sample.cpu().numpy().tobytes()).hexdigest()
        mine = {"target": digest, "dtype": str(target.dtype), "layers": list(layer_ids)}
        self._places: dict[str, tuple[int, int]] = {}
        self._next, self._seen = 0, 0
        self._map: np.memmap[Any, Any] | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        with self._locked() as index:
            header = index.readline()
            if not header:
                header = json.dumps(mine).encode() + b"\n"
                index.write(header)
            self._seen = len(header)
        theirs = json.loads(header)
        missing = [layer for layer in layer_ids if layer not in theirs["layers"]]
        if (theirs["target"], theirs["dtype"]) != (mine["target"], mine["dtype"]) or missing:
            raise Refusal(
                f"--tap-cache {path} holds layers {theirs['layers']} of target {theirs['target'][:12]}",
                f"layers {mine['layers']} of target {digest[:12]} are needed",
                "name another file",
            )
        self._layers: list[int] = theirs["layers"]
        self._columns = [self._layers.index(layer) for layer in layer_ids]
        self._row_bytes = len(self._layers) * self._width * target.embedding.element_size()
        self.may_grow = list(layer_ids) == self._layers

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The index, open for reading and appending by this process alone."""
        with self._index_path.open("a+b") as index:
            fcntl.flock(index, fcntl.LOCK_EX)
            index.seek(self._seen)
            yield index

    def _catch_up(self, index: BinaryIO) -> None:
        """Read what other processes have added."""
        for line in index:
            row = json.loads(line)
            self._places[row["key"]] = (row["first"], row["count"])
            self._next = max(self._next, row["first"] + row["count"])
            self._seen += len(line)

    def read(self, record: Record) -> Tensor | None:
        """Taps ``[S, T, H]`` of a response, or None if it was never added."""
        if record.key not in self._places:
            with self._locked() as index:
                self._catch_up(index)
        place = self._places.get(record.key)
        if place is None:
            return None
        first, count = place
        start, end = first * self._row_bytes, (first + count) * self._row_bytes
        if self._map is None or end > self._map.shape[0]:
            self._map = np.memmap(self.path, dtype=np.uint8, mode="r")
        flat = torch.from_numpy(np.array(self._map[start:end])).view(self._dtype)
        return flat.view(count, len(self._layers), self._width)[:, self._columns]

    def add(self, record: Record, taps: Tensor) -> None:
        """Append a response's taps unless another process has; a crash leaves rows that nothing refers to."""
        with self._locked() as index:
            self._catch_up(index)
            if record.key in self._places:
                return
            with self.path.open("r+b") as file:
                file.seek(self._next * self._row_bytes)
                file.write(taps.cpu().contiguous().view(torch.uint8).numpy().tobytes())
            place = {"key": record.key, "first": self._next, "count": taps.shape[0]}
            index.write(json.dumps(place).encode() + b"\n")
            index.flush()
            index.seek(self._seen)
            self._catch_up(index)


class TapStore(ContextStore):
    """Taps of any record, from the file or computed; the last record's stay in memory."""

    def __init__(self, target: Target, layer_ids: Sequence[int], cache: str = "") -> None:
        self.target, self.layer_ids = target, tuple(layer_ids)
        self._file = TapFile(cache, target, layer_ids) if cache else None
        self._last: tuple[Record, Tensor] | None = None

    def read(self, record: Record) -> Tensor:
        """``[S, T, H]`` for positions 0..S-1, S = tokens - 1; always of the whole record, so always the same bits."""
        if self._last is not None and self._last[0] == record:
            return self._last[1]
        taps = self._file.read(record) if self._file is not None else None
        if taps is None:
            taps = compute_taps(self.target, record.token_ids[:-1], self.layer_ids)
            if self._file is not None and self._file.may_grow:
                self._file.add(record, taps)
        self._last = (record, taps)
        return taps

    def context(
        self, records: Sequence[Record], chunks: Sequence[Chunk], anchors: Tensor, bonus_ids: Tensor
    ) -> TapContext:
        """Taps up to the furthest anchor, padded on the right."""
        span = int(anchors.max()) + 1
        size = (len(chunks), span, len(self.layer_ids), self.target.shape.hidden_size)
        taps = torch.zeros(size, dtype=self.target.dtype, device=self.target.device)
        for row, chunk in enumerate(chunks):
            known = self.read(records[chunk.record])[:span]
            taps[row, : known.shape[0]] = known.to(self.target.device)
        return TapContext(taps, anchors, bonus_ids)
