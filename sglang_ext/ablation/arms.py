"""Which variants there are, and the studies they belong to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.core.refusal import Refusal, refuse_unknown

Value = int | float | str


@dataclass(frozen=True)
class Arm:
    """One variant: how it is trained and how it is measured.

    ``options`` are training options that differ from the study's common ones. ``data_parts`` trains on one in so many
    rows. ``same_size_as_dflare`` narrows the feed-forward parts until the drafter has as many parameters as DFlare with
    the same options. ``prune`` is the threshold of selective verification when measured; None verifies every draft.
    """

    label: str
    method: str
    options: Mapping[str, Value] = field(default_factory=dict)
    data_parts: int = 1
    same_size_as_dflare: bool = False
    prune: float | None = None

    @property
    def training_key(self) -> str:
        """What two arms have in common when one training serves both."""
        parts = [self.method, json.dumps(dict(self.options), sort_keys=True), self.data_parts, self.same_size_as_dflare]
        return json.dumps(parts)


_DFLARE = Arm("DFlare", "dflare")

#: Study name -> its arms; the others are compared with the first. The order is that of `--study all`.
STUDIES: dict[str, tuple[Arm, ...]] = {
    "method": (Arm("DFlash", "dflash", same_size_as_dflare=True), _DFLARE),
    "calibration": (Arm("attention only", "flexdraft", {"calibrator": "none"}), Arm("+ calibration", "flexdraft")),
    "gamma": (Arm("fixed gamma", "dflare", {"gamma": 4.0}), Arm("progressive gamma", "dflare")),
    "fusion": (Arm("one fusion", "dflash", {"context_projections": "separate", "gamma": 0.0}), _DFLARE),
    "projections": (Arm("shared projections", "dflare", {"context_projections": "shared"}), _DFLARE),
    "taps": tuple(Arm(f"{count} taps", "dflare", {"num_taps": count} if count != 5 else {}) for count in (5, 3, 9)),
    "depth": tuple(
        Arm(f"{count} layers", "dflare", {"num_layers": count} if count != 3 else {}) for count in (3, 5, 7)
    ),
    "data": (Arm("a third of the data", "dflare", data_parts=3), Arm("all data", "dflare")),
    "selective": (
        Arm("every draft verified", "flexdraft"),
        Arm("selective, 0.01", "flexdraft", prune=0.01),
        Arm("selective, 0.1", "flexdraft", prune=0.1),
        Arm("selective, 0.3", "flexdraft", prune=0.3),
    ),
    "flexdraft-depth": tuple(
        Arm(f"{count} layers", "flexdraft", {"num_layers": count} if count != 8 else {}) for count in (8, 4, 12)
    ),
    "block": tuple(
        Arm(f"block {count}", "flexdraft", {"block_size": count} if count != 8 else {}) for count in (8, 4, 16)
    ),
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


def _value(text: str) -> Value:
    parsed: Any
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:
        return text
    return parsed if isinstance(parsed, int | float) and not isinstance(parsed, bool) else text
