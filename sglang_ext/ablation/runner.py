"""Trains and measures arms one after the other; what is done is found again, what does not fit the time is left."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sglang_ext.ablation.arms import Arm, Value, refuse_settings
from sglang_ext.core.prune import PruneConfig
from sglang_ext.core.refusal import Refusal
from sglang_ext.models.files import json_bytes, read_json_object, write_atomically
from sglang_ext.models.tapped.checkpoint import expected_shapes
from sglang_ext.models.tapped.config import spread_taps
from sglang_ext.models.target import Target
from sglang_ext.training.config import CONFIGS, TappedTrainConfig, TrainConfig
from sglang_ext.training.data import Record, limited, load_records
from sglang_ext.training.evaluate import Acceptance, replay
from sglang_ext.training.export import load_training_state, restore
from sglang_ext.training.methods import METHODS
from sglang_ext.training.taps import kept_layers
from sglang_ext.training.train import CHECKPOINT, LOG, read_log, train

#: The options in a run's folder, as `train` writes them.
CONFIG = "config.json"


@dataclass(frozen=True)
class Measured:
    """One arm's outcome.

    Attributes:
        arm: the variant.
        parameters: of the drafter.
        steps: of the training.
        seconds: of the training, as logged.
        found: one replay per held-out response, by its key.
    """

    arm: Arm
    parameters: int
    steps: int
    seconds: float
    found: dict[str, Acceptance]


class _TimeIsUp(Exception):
    """The budget ended inside an arm's training; its checkpoint stays."""


class Runner:
    """Runs arms on one target and one set of rows.

    Args:
        target: folder of the target.
        data: files written by ``sglang-ext regenerate``.
        held_out: such files for measuring.
        out: folder of everything the runs leave behind.
        steps: optimizer steps of every arm.
        common: training options of every arm whose method has them and that does not set them itself.
        limit: at most this many held-out responses per domain; 0 for all.

    Raises:
        Refusal: if an option is none of any method's, or a file of ``data`` or ``held_out`` cannot be read.
    """

    def __init__(
        self,
        target: str,
        data: Sequence[str],
        held_out: Sequence[str],
        out: Path,
        steps: int,
        common: Mapping[str, Value],
        limit: int = 0,
    ) -> None:
        refuse_settings(common, {})
        self.target, self.out, self.steps, self.common = target, out, steps, dict(common)
        self.data = tuple(data)
        self._digest, _ = _read("--data", self.data)
        self.held_out = limited(_read("--held-out", held_out)[1], limit)
        self._loaded: Target | None = None

    def config(self, arm: Arm) -> TrainConfig:
        """The complete training configuration of an arm."""
        key = f"{arm.training_key(self.common)} {self._digest}"
        given = {
            **arm.training_options(self.common),
            "target": self.target,
            "data": self._rows(arm.data_parts),
            "out": str(self.out / "arms" / f"{arm.method}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"),
            "steps": self.steps,
        }
        config = CONFIGS[arm.method].from_dict(given, f"arm {arm.label!r}")
        if arm.same_size_as_dflare:
            config = self._same_size(config, given)
        if isinstance(config, TappedTrainConfig):
            config = replace(config, tap_cache=self._tap_cache(config))
        return config

    def _tap_cache(self, config: TappedTrainConfig) -> str:
        """The file of taps named, unless it has other layers; else one for this number of taps.

        The layers of a file of taps are those of the first run that writes to it.
        """
        if config.tap_cache:
            layers = kept_layers(config.tap_cache)
            if layers is None or {*spread_taps(self._target().shape.num_layers, config.num_taps)} <= {*layers}:
                return config.tap_cache
        return str(self.out / f"taps-{config.num_taps}")

    def _rows(self, parts: int) -> list[str]:
        """The data files, or a file with one in ``parts`` of their rows, chosen by content."""
        if parts == 1:
            return list(self.data)
        path = self.out / f"rows-1-of-{parts}-{self._digest[:12]}.jsonl"
        if not path.exists():
            lines = [line for name in self.data for line in Path(name).read_text(encoding="utf-8").split("\n")[:-1]]
            kept = [line for line in lines if int(hashlib.sha256(line.encode()).hexdigest(), 16) % parts == 0]
            # Kept states lie beside the original file.
            rows = [{key: value for key, value in json.loads(line).items() if key != "states"} for line in kept]
            write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
        return [str(path)]

    def _same_size(self, config: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
        """``config`` with feed-forward parts that give it DFlare's number of parameters, as nearly as one column."""
        names = {item.name for item in fields(CONFIGS["dflare"])}
        separate = {name: value for name, value in given.items() if name in names and name != "context_projections"}
        ours, theirs = (self._drafter(c) for c in (config, CONFIGS["dflare"].from_dict(separate, "DFlare")))
        surplus = sum(map(_count, expected_shapes(ours).values())) - sum(map(_count, expected_shapes(theirs).values()))
        per_column = 3 * ours.num_layers * ours.hidden_size
        width = ours.intermediate_size - round(surplus / per_column)
        return type(config).from_dict({**given, "intermediate_size": width}, "arm of equal size")

    def _drafter(self, config: TrainConfig) -> Any:
        assert isinstance(config, TappedTrainConfig)
        return METHODS[config.METHOD].new_model(self._target(), config).config

    def _target(self) -> Target:
        if self._loaded is None:
            self._loaded = Target.load(self.target)
        return self._loaded

    def check(self, arms: Sequence[Arm]) -> None:
        """Refuse what would fail later: options of an arm that cannot be, or a run of another length in its folder.

        Raises:
            Refusal: naming the option, or both numbers of steps.
        """
        for arm in arms:
            self._checked(arm)

    def _checked(self, arm: Arm) -> TrainConfig:
        config = self.config(arm)
        path = Path(config.out) / CONFIG
        try:
            before = read_json_object(path).get("steps") if path.exists() else None
        except Refusal:  # a crash while it was written; a checkpoint would say the same
            before = None
        _refuse_other_length(config, before)
        return config

    def run(self, arm: Arm, deadline: float) -> Measured | None:
        """Train and measure an arm, or find it done; None if the time (seconds since the epoch) does not reach.

        Raises:
            Refusal: as :meth:`check` does; other steps in one table would not compare the arms.
        """
        config = self._checked(arm)
        result = Path(config.out) / f"measured-{arm.prune}.json"
        identity = {
            "config": {k: v for k, v in asdict(config).items() if k not in ("out", "threads", "tap_cache", "data")},
            "data": self._digest,
            "held_out": hashlib.sha256(repr([(one.key, one.token_ids) for one in self.held_out]).encode()).hexdigest(),
        }
        if result.exists():
            kept = read_json_object(result)
            if kept.get("identity") == json.loads(json.dumps(identity)):
                _refuse_other_length(config, kept["steps"])
                return _measured(arm, kept)
        if not self._trained(config, deadline):
            return None
        measured = self._measure(arm, config)
        write_atomically(result, json_bytes({"identity": identity, **_to_json(measured)}))
        return measured

    def _trained(self, config: TrainConfig, deadline: float) -> bool:
        def stop(trainer: Any) -> None:
            if time.time() > deadline and trainer.progress < 1.0:
                raise _TimeIsUp

        # A finished run is checked and left as it is.
        finished = False
        if (Path(config.out) / CHECKPOINT).exists():
            saved, state = load_training_state(config.out)
            finished = state["progress"] >= 1.0
            _refuse_other_length(config, state["step"] if finished else saved.steps)
        if time.time() > deadline and not finished:
            return False
        print(f"training {Path(config.out).name}", file=sys.stderr, flush=True)
        try:
            train(config, stop)
        except _TimeIsUp:
            return False
        return True

    def _measure(self, arm: Arm, config: TrainConfig) -> Measured:
        saved, state = load_training_state(config.out)
        model = restore(self._target(), saved, state)
        store = METHODS[config.METHOD].store(model, config)
        prune = None if arm.prune is None else PruneConfig(threshold=arm.prune)
        found = {record.key: replay(model, store, record, prune) for record in self.held_out}
        seconds = round(sum(row["seconds"] for row in read_log(Path(config.out) / LOG).values()), 1)
        count = sum(parameter.numel() for parameter in model.parameters())
        return Measured(arm, count, state["step"], seconds, found)


def _refuse_other_length(config: TrainConfig, before: int | None) -> None:
    """``before`` is how many steps the run in ``config.out`` has or was started for; None if there is none."""
    if before not in (None, config.steps):
        raise Refusal(
            f"--steps {config.steps}",
            f"{config.out} is a run of {before} steps, and the arms of a table have equal numbers",
            f"give --steps {before}, or a new --out",
        )


def _read(flag: str, names: Sequence[str]) -> tuple[str, list[Record]]:
    """Digest of the bytes of some files, and their records; a refusal names ``flag``."""
    digest = hashlib.sha256()
    for name in names:
        try:
            digest.update(Path(name).read_bytes())
        except OSError as error:
            raise Refusal(
                f"{flag} {name} cannot be read ({error.strerror})",
                "a file written by `sglang-ext regenerate`",
                "correct the path",
            ) from error
    try:
        return digest.hexdigest(), load_records(names)
    except Refusal as refusal:
        given = refusal.given.removeprefix("--data ")
        raise Refusal(f"{flag} {given}", refusal.allowed, refusal.fix) from refusal


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _to_json(measured: Measured) -> dict[str, Any]:
    return {
        "label": measured.arm.label,
        "parameters": measured.parameters,
        "steps": measured.steps,
        "seconds": measured.seconds,
        "found": {key: asdict(value) for key, value in measured.found.items()},
    }


def _measured(arm: Arm, kept: Mapping[str, Any]) -> Measured:
    found = {key: Acceptance(**value) for key, value in kept["found"].items()}
    return Measured(arm, kept["parameters"], kept["steps"], kept["seconds"], found)
