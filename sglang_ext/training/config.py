"""The frozen configuration of a training run, from flags or from JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_ext.core.refusal import Refusal, refuse_unknown

OPTIMIZERS = ("adamw", "muon")
CALIBRATORS = ("hidden", "vocabulary", "none")
#: The largest finite number: neither infinity nor a NaN is within it.
_FINITE = sys.float_info.max
#: Smallest and largest value of every number.
_LIMITS: dict[str, tuple[float, float]] = {
    "block_size": (2, _FINITE),
    "num_layers": (1, _FINITE),
    "calibrator_rank": (0, _FINITE),
    "lr": (0, _FINITE),
    "lr_other": (0, _FINITE),
    "warmup": (0, 0.99),
    "grad_clip": (1e-9, _FINITE),
    "gamma": (1e-3, _FINITE),
    "blocks_per_step": (1, _FINITE),
    "anchors_per_sequence": (1, _FINITE),
    "frequent": (0, _FINITE),
    "drawn": (0, _FINITE),
    "steps": (0, _FINITE),
    "stop_at": (0, _FINITE),
    "workers": (1, _FINITE),
    "threads": (0, _FINITE),
    "seed": (0, 2**31 - 1),
    "checkpoint_seconds": (0, _FINITE),
    "export_seconds": (0, _FINITE),
    "held_out_percent": (0, 99),
}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the numbers of a run.

    ``steps`` fixes the length; ``steps`` 0 with ``stop_at`` (seconds since the epoch) fits the schedule to the clock.
    ``blocks_per_step`` is split into sequences of ``anchors_per_sequence`` blocks. ``frequent`` and ``drawn`` choose
    the candidate tokens of the loss: the most frequent response tokens, and random others that stand for the rest of
    the vocabulary; ``frequent`` 0 normalises over the whole vocabulary. ``workers`` processes share each step's blocks.
    ``start_from`` is the folder of an exported drafter of the same sizes whose weights are trained further.
    """

    target: str
    data: tuple[str, ...]
    out: str
    block_size: int = 8
    num_layers: int = 8
    calibrator: str = "hidden"
    calibrator_rank: int = 1024
    optimizer: str = "adamw"
    lr: float = 1e-3
    lr_other: float = 1e-3
    warmup: float = 0.04
    grad_clip: float = 1.0
    gamma: float = 4.0
    blocks_per_step: int = 256
    anchors_per_sequence: int = 16
    frequent: int = 8192
    drawn: int = 1024
    steps: int = 0
    stop_at: float = 0.0
    workers: int = 1
    threads: int = 0
    seed: int = 0
    checkpoint_seconds: float = 120.0
    export_seconds: float = 1200.0
    held_out_percent: int = 2
    start_from: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (("optimizer", OPTIMIZERS), ("calibrator", CALIBRATORS)):
            value = asdict(self)[name]
            if value not in allowed:
                raise Refusal(f"--{name} {value}", f"one of {', '.join(allowed)}", "choose one of them")
        for name, (low, high) in _LIMITS.items():
            if not low <= vars(self)[name] <= high:
                allowed_numbers = f"at least {low:g}" if high == _FINITE else f"from {low:g} to {high:g}"
                raise Refusal(f"--{name.replace('_', '-')} {vars(self)[name]}", allowed_numbers, "correct the number")
        share = self.anchors_per_sequence * self.workers
        if self.blocks_per_step % share:
            raise Refusal(
                f"--blocks-per-step {self.blocks_per_step}",
                f"a multiple of --anchors-per-sequence times --workers, {share}",
                f"for example --blocks-per-step {max(1, self.blocks_per_step // share) * share}",
            )
        if (self.steps > 0) == (self.stop_at > 0):
            raise Refusal(
                f"--steps {self.steps} and --stop-at {self.stop_at:.0f}",
                "exactly one of them",
                "set the other one to 0",
            )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str) -> TrainConfig:
        """Build from parsed JSON, strictly.

        Raises:
            Refusal: on an unknown key, a missing one, or a value of the wrong type.
        """
        refuse_unknown(where, given, [item.name for item in fields(cls)])
        kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
        values = dict(given)
        for item in fields(cls):
            if item.name not in given:
                continue
            value = given[item.name]
            if item.name == "data":
                correct = isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
                values["data"] = tuple(value)
            else:
                correct = isinstance(value, kinds[str(item.type)]) and not isinstance(value, bool)
            if not correct:
                raise Refusal(f"{where} has {item.name} = {value!r}", f"a value of type {item.type}", "correct it")
        for name in ("target", "data", "out"):
            if not values.get(name):
                raise Refusal(f"{where} has no {name}", "target, data and out are required", f"add {name}")
        return cls(**values)

    @classmethod
    def from_json(cls, path: str | Path) -> TrainConfig:
        """Read a JSON file of :class:`TrainConfig` fields."""
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise Refusal(
                f"--config {path}: {error}", "a JSON object of training options", "correct the file"
            ) from error
        if not isinstance(given, dict):
            raise Refusal(f"--config {path} holds a {type(given).__name__}", "a JSON object", "correct the file")
        return cls.from_dict(given, f"--config {path}")
