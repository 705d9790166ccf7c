"""The target's taps for training: computed once per response by a prefill, and kept in a file where one is named.

The file is written as the responses are met. Its rows are the plain bytes of the taps, its index (``FILE.json``) says
for which target and layers they are and where each response's rows begin. A run with fewer taps may read the file of
one with more. Shape legend: S positions, T taps, H hidden, N sequences, A anchors per sequence.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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


def _parsed(line: bytes) -> Any:
    if not line.endswith(b"\n"):
        raise ValueError("the line was cut off")
    return json.loads(line)


@dataclass(frozen=True)
class _Header:
    """First line of an index: which target's taps, of which type, and of which layers in this order."""

    target: str
    dtype: str
    layers: tuple[int, ...]

    @classmethod
    def parse(cls, line: bytes, path: Path) -> _Header:
        try:
            row = _parsed(line)
            found = cls(row["target"], row["dtype"], tuple(row["layers"]))
            if not (isinstance(found.target, str) and isinstance(found.dtype, str) and found.layers):
                raise TypeError("target and dtype are text, layers are numbers")
            if not all(type(layer) is int for layer in found.layers):
                raise TypeError("layers are numbers")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(path, "its first line is not one of ours") from error
        return found


@dataclass(frozen=True)
class _Row:
    """Another line of an index: the response ``key`` has ``count`` positions from row ``first`` on."""

    key: str
    first: int
    count: int

    @classmethod
    def parse(cls, line: bytes, path: Path) -> _Row:
        try:
            row = _parsed(line)
            found = cls(row["key"], row["first"], row["count"])
            whole = type(found.first) is int and type(found.count) is int and isinstance(found.key, str)
            if not whole or found.first < 0 or found.count < 1:
                raise TypeError("key is text, first and count are numbers")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(path, "a line is not one of ours") from error
        return found


def _damaged(path: Path, reason: str) -> Refusal:
    return Refusal(
        f"--tap-cache {path} has a damaged or foreign index {path}.json ({reason})",
        "a new file, or one with the index that training wrote for it",
        "name another file, or delete both to begin again",
    )


def _unusable(path: Path, error: OSError) -> Refusal:
    return Refusal(f"--tap-cache {path} cannot be used ({error.strerror})", "a writable file", "name another file")


def _refuse_unusable(path: Path) -> None:
    """Refuse a path where no file of taps can be, or another program's file is; changes nothing on disk."""
    index = Path(f"{path}.json")
    try:
        for file in (path, index):
            if file.exists() and not file.is_file():
                raise _unusable(path, OSError(0, f"{file} is no plain file"))
            if file.exists() and not os.access(file, os.R_OK | os.W_OK):
                raise _unusable(path, OSError(0, f"{file}: permission denied"))
        if path.exists() and path.stat().st_size and not (index.exists() and index.stat().st_size):
            raise Refusal(
                f"--tap-cache {path} is not empty and has no index {index}",
                "a new file, or one that training filled with taps",
                "name another file",
            )
        parent = next(folder for folder in path.absolute().parents if folder.exists())
    except OSError as error:
        raise _unusable(path, error) from error
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise _unusable(path, OSError(0, f"{parent} is no writable folder"))


def _read_index(path: str | Path) -> tuple[_Header, list[_Row]] | None:
    """The index of a file of taps; None if there is none yet.

    Raises:
        Refusal: if the path cannot be used, or its index is damaged or foreign.
    """
    path, index = Path(path), Path(f"{path}.json")
    _refuse_unusable(path)
    try:
        with index.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error) from error
    return (_Header.parse(lines[0], path), [_Row.parse(line, path) for line in lines[1:]]) if lines else None


def kept_keys(path: str | Path) -> set[str]:
    """Keys of the responses in a file of taps; none if there is no such file yet.

    Raises:
        Refusal: if the path cannot be used, or its index is damaged or foreign.
    """
    found = _read_index(path)
    return {row.key for row in found[1]} if found is not None else set()


def kept_layers(path: str | Path) -> tuple[int, ...] | None:
    """Target layers whose outputs a file of taps holds; None if there is no such file yet.

    Raises:
        Refusal: if the path cannot be used, or its index is damaged or foreign.
    """
    found = _read_index(path)
    return found[0].layers if found is not None else None


class TapFile:
    """Taps of responses by key, appended to a file and read back by position; several processes may share it.

    Raises:
        Refusal: if the file belongs to another target, lacks a layer, is not one of taps, or cannot be written.
    """

    def __init__(self, path: str | Path, target: Target, layer_ids: Sequence[int]) -> None:
        self.path, self._index_path = Path(path), Path(f"{path}.json")
        self._width, self._dtype = target.shape.hidden_size, target.dtype
        # Taps are a function of the target's weights: a few of them stand for all.
        sample = torch.cat((target.embedding[:8].flatten(), target.layers[-1].down[:8].flatten())).float()
        digest = hashlib.sha256(sample.cpu().numpy().tobytes()).hexdigest()
        mine = _Header(digest, str(target.dtype), tuple(layer_ids))
        self._places: dict[str, tuple[int, int]] = {}
        self._next, self._seen = 0, 0
        self._map: np.memmap[Any, Any] | None = None
        _refuse_unusable(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise _unusable(self.path, error) from error
        with self._locked() as index:
            header = index.readline()
            if not header:
                header = json.dumps(asdict(mine)).encode() + b"\n"
                index.write(header)
            self._seen = len(header)
        theirs = _Header.parse(header, self.path)
        missing = [layer for layer in layer_ids if layer not in theirs.layers]
        if (theirs.target, theirs.dtype) != (mine.target, mine.dtype) or missing:
            raise Refusal(
                f"--tap-cache {path} holds layers {list(theirs.layers)} of target {theirs.target[:12]}",
                f"layers {list(layer_ids)} of target {digest[:12]} are needed",
                "name another file",
            )
        self._layers = theirs.layers
        self._columns = [self._layers.index(layer) for layer in layer_ids]
        self._row_bytes = len(self._layers) * self._width * target.embedding.element_size()
        self.may_grow = mine.layers == self._layers

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The index, open for reading and appending by this process alone."""
        try:
            with self._index_path.open("a+b") as index:
                fcntl.flock(index, fcntl.LOCK_EX)
                index.seek(self._seen)
                yield index
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _catch_up(self, index: BinaryIO) -> None:
        """Read what other processes have added."""
        for line in index:
            row = _Row.parse(line, self.path)
            self._places[row.key] = (row.first, row.count)
            self._next = max(self._next, row.first + row.count)
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
            if end > self.path.stat().st_size:
                raise _damaged(self.path, "it names rows that the file does not have")
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
