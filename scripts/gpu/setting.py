"""What every part of the GPU check is handed, and how results are kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Setting:
    """Where a part runs and how much of it.

    Attributes:
        dry: run small cases over the torch twin of FlashInfer on the CPU.
        out: folder for result files.
        work: folder for logs and whatever else a part leaves.
    """

    dry: bool
    out: Path
    work: Path

    @property
    def device(self) -> str:
        """Device of every tensor."""
        return "cpu" if self.dry else "cuda"

    def library(self) -> Any:
        """FlashInfer, or its twin in a dry run."""
        if self.dry:
            from sglang_ext.serving.attention.flashinfer_twin import TwinLibrary

            return TwinLibrary()
        from sglang_ext.serving.attention.flashinfer_calls import load_library

        return load_library()

    def wait(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()


class Rows:
    """Result rows of one part, written out one by one: a part that is cut short keeps what it has."""

    def __init__(self, setting: Setting, part: str) -> None:
        self._file = setting.work / f"{part}.jsonl"
        self._file.write_text("")
        self.part = part
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        """Keep one row; ``ok`` says whether it passed, and is left out where there is nothing to pass."""
        self.rows.append(row)
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(self.part, json.dumps(row), flush=True)

    @property
    def ok(self) -> bool:
        """True if no row failed."""
        return all(row.get("ok", True) for row in self.rows)
