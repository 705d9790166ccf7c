"""Which variants there are, and the studies they belong to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from sglang_ext.core.refusal import Refusal, nearest, refuse_unknown
from sglang_ext.training.config import CONFIGS

Value = int | float | str

#: Training options of every arm that are not the methods' defaults.
BASE: dict[str, Value] = {"checkpoint_seconds": 60.0, "export_seconds": 15.0, "held_out_percent": 0}
#: Training options that the command's own flags give.
FLAGS = ("target", "data", "out", "steps", "stop_at", "workers")


@dataclass(frozen=True)
class Arm:
    """One variant: how it is trained and how it is measured.

    ``options`` are the training options that the arm's label stands for, also those with a usual value: no setting
    common to all arms changes them. ``data_parts`` trains on one in so many rows. ``same_size_as_dflare`` narrows the
    feed-forward parts until the drafter has as many parameters as DFlare with the same options. ``prune`` is the
    threshold of selective verification when measured; None verifies every draft.
    """

    label: str
    method: str
    options: Mapping[str, Value] = field(default_factory=dict)
    data_parts: int = 1
    same_size_as_dflare: bool = False
    prune: float | None = None

    def training_options(self, common: Mapping[str, Value]) -> dict[str, Any]:
        """Every training option: the method's defaults, then ``common`` where the method has it, then the arm's own."""
        found: dict[str, Any] = {
            item.name: item.default for item in fields(CONFIGS[self.method]) if item.default is not MISSING
        }
        for name, value in {**BASE, **common, **self.options}.items():
            if name in found:
                whole = isinstance(found[name], float) and isinstance(value, int)
                found[name] = float(value) if whole else value
        return found

    def training_key(self, common: Mapping[str, Value]) -> str:
        """What two arms have in common when one training serves both: all that decides the weights but the rows."""
        free = CONFIGS[self.method].CHANGEABLE
        options = {name: value for name, value in self.training_options(common).items() if name not in free}
        parts = [self.method, options, self.data_parts, self.same_size_as_dflare]
        return json.dumps(parts, sort_keys=True)


def _options(name: str, usual: int, *others: int, unit: str, method: str = "dflare") -> tuple[Arm, ...]:
    return tuple(Arm(unit.format(count), method, {name: count}) for count in (usual, *others))


_DFLARE = Arm("DFlare", "dflare", {"context_projections": "separate", "gamma": 0.0})

#: Study name -> its arms; the others are compared with the first. The order is that of `--study all`.
STUDIES: dict[str, tuple[Arm, ...]] = {
    "method": (
        Arm("DFlash", "dflash", {"context_projections": "shared", "gamma": 4.0}, same_size_as_dflare=True),
        _DFLARE,
    ),
    "calibration": (
        Arm("attention only", "flexdraft", {"calibrator": "none"}),
        Arm("+ calibration", "flexdraft", {"calibrator": "hidden"}),
    ),
    "gamma": (
        Arm("fixed gamma", "dflare", {"gamma": 4.0}),
        Arm("progressive gamma", "dflare", {"gamma": 0.0}),
    ),
    "fusion": (Arm("one fusion", "dflash", _DFLARE.options), _DFLARE),
    "projections": (
        Arm("shared projections", "dflare", {"context_projections": "shared"}),
        Arm("separate projections", "dflare", {"context_projections": "separate"}),
    ),
    "taps": _options("num_taps", 5, 3, 9, unit="{} taps"),
    "depth": _options("num_layers", 3, 5, 7, unit="{} layers"),
    "data": (Arm("a third of the data", "dflare", data_parts=3), Arm("all data", "dflare")),
    "selective": (
        Arm("every draft verified", "flexdraft"),
        Arm("selective, 0.01", "flexdraft", prune=0.01),
        Arm("selective, 0.1", "flexdraft", prune=0.1),
        Arm("selective, 0.3", "flexdraft", prune=0.3),
    ),
    "flexdraft-depth": _options("num_layers", 8, 4, 12, unit="{} layers", method="flexdraft"),
    "block": _options("block_size", 8, 4, 16, unit="block {}", method="flexdraft"),
}


def chosen_studies(names: list[str]) -> dict[str, tuple[Arm, ...]]:
    """The studies named, in that order; ``all`` stands for every one.

    Raises:
        Refusal: if a name is unknown.
    """
    if "all" in names:
        return dict(STUDIES)
    refuse_unknown("--study", names, [*STUDIES, "all"])
    return {name: STUDIES[name] for name in names}


def parse_settings(texts: list[str]) -> dict[str, Value]:
    """Read ``OPTION=VALUE`` texts; numbers become numbers.

    Raises:
        Refusal: if a text has another form.
    """
    found: dict[str, Value] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name or not value:
            raise Refusal(f"--set {text}", "OPTION=VALUE", "for example --set blocks_per_step=192")
        found[name.replace("-", "_")] = _value(value)
    return found


def refuse_settings(common: Mapping[str, Value], studies: Mapping[str, Sequence[Arm]]) -> None:
    """Refuse a common setting that is no training option, or that every arm which could take it sets itself.

    Raises:
        Refusal: naming the setting and, in the second case, the studies.
    """
    names = {method: {item.name for item in fields(kind)} - {*FLAGS} for method, kind in CONFIGS.items()}
    known = set().union(*names.values())
    for name, value in common.items():
        if name not in known:
            raise Refusal(
                f"--set {name}={value}{nearest(name, known)}",
                "a training option that no flag of this command gives",
                "`sglang-ext train METHOD --help` lists them",
            )
        able = [(study, arm) for study, arms in studies.items() for arm in arms if name in names[arm.method]]
        if able and all(name in arm.options for _, arm in able):
            varying = ", ".join(dict.fromkeys(study for study, _ in able))
            raise Refusal(
                f"--set {name}={value} --study {varying}",
                f"every arm there sets {name} itself",
                "leave the setting out, or choose another study",
            )


def _value(text: str) -> Value:
    parsed: Any
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        return text
    return parsed if isinstance(parsed, int | float) and not isinstance(parsed, bool) else text
