"""The model card of a drafter: what it was trained for, by what, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sglang_ext.core.refusal import Refusal, refuse_unknown

NOT_MEASURED = "No acceptance was measured for this drafter: nothing is known about how much it speeds anything up."


@dataclass(frozen=True)
class AcceptanceRow:
    """Measured acceptance on one set of prompts.

    ``accept_length`` is the mean number of tokens committed per target step, bonus included; ``by_position`` is the
    probability that slot j is accepted given that the slots before it were (j = 1 .. K-1).
    """

    dataset: str
    accept_length: float
    prompts: int
    tokens: int
    method: str
    by_position: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the row as it is kept in config.json."""
        return {
            "dataset": self.dataset,
            "accept_length": self.accept_length,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "method": self.method,
            "by_position": list(self.by_position),
        }

    @classmethod
    def from_json(cls, row: Any, where: str) -> AcceptanceRow:
        """Read one row of config.json.

        Raises:
            Refusal: on a missing, unknown or mistyped entry.
        """
        if not isinstance(row, dict):
            raise Refusal(f"{where} has the acceptance row {row!r}", "a row is a JSON object", "correct config.json")
        inside = f"{where} (acceptance)"
        types: dict[str, tuple[type, ...]] = {
            "dataset": (str,),
            "accept_length": (int, float),
            "prompts": (int,),
            "tokens": (int,),
            "method": (str,),
            "by_position": (list,),
        }
        refuse_unknown(inside, row, types)
        for key, allowed in types.items():
            if not isinstance(row.get(key), allowed):
                kinds = " or ".join(kind.__name__ for kind in allowed)
                raise Refusal(f"{inside} has {key} = {row.get(key)!r}", f"it is of type {kinds}", "correct config.json")
        values = {**row, "by_position": tuple(row["by_position"])}
        return cls(**values)


@dataclass(frozen=True)
class CardFields:
    """What only the trainer knows: provenance (any JSON object) and the measured acceptance."""

    training: Mapping[str, Any] = field(default_factory=dict)
    acceptance: Sequence[AcceptanceRow] = ()

    @classmethod
    def from_json(cls, training: Mapping[str, Any], acceptance: Sequence[Any], where: str) -> CardFields:
        """Read both from their form in config.json; raises Refusal on a malformed row."""
        return cls(dict(training), tuple(AcceptanceRow.from_json(row, where) for row in acceptance))


def render(title: str, usage: Sequence[str], sizes: Sequence[tuple[str, str]], fields: CardFields) -> str:
    """Return the README.md of a drafter: its use, a table of sizes, provenance and acceptance.

    The same arguments always give the same text.
    """
    table = ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in sizes)]
    lines = [f"# {title}", "", *usage, "", "## Sizes", "", *table]
    lines += ["", "## Training", "", *_training(fields), "", "## Measured acceptance", "", *_acceptance(fields), ""]
    return "\n".join(lines)


def weight_rows(draft_vocab_size: int | None, parameters: int, size_bytes: int) -> list[tuple[str, str]]:
    """Return the rows of the size table that every drafter ends with."""
    return [
        ("tokens it can propose", "all" if draft_vocab_size is None else f"{draft_vocab_size:,}"),
        ("parameters", f"{parameters:,}"),
        ("bytes of weights", f"{size_bytes:,}"),
    ]


def weight_facts(tensors: Mapping[str, Tensor], fields: CardFields) -> dict[str, Any]:
    """Return what ``sglang-ext inspect`` says of any drafter's weights and history, as plain JSON values."""
    floating = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    return {
        "dtype": ", ".join(sorted(floating)),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "weight_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "training": dict(fields.training),
        "acceptance": [row.to_json() for row in fields.acceptance],
    }


def _training(fields: CardFields) -> list[str]:
    if not fields.training:
        return ["How this drafter was trained is not recorded."]
    rows = []
    for key in sorted(fields.training):
        value = fields.training[key]
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        rows.append(f"| {key} | {text.replace('|', chr(92) + '|')} |")
    return ["| | |", "|---|---|", *rows]


def _acceptance(fields: CardFields) -> list[str]:
    if not fields.acceptance:
        return [NOT_MEASURED]
    lines = [
        "Accept length is the mean number of tokens committed per target step, the bonus token included.",
        "",
        "| prompts of | accept length | prompts | tokens | accepted at slot 1, 2, ... | how |",
        "|---|---|---|---|---|---|",
    ]
    for row in fields.acceptance:
        slots = ", ".join(f"{rate:.2f}" for rate in row.by_position)
        lines.append(
            f"| {row.dataset} | {row.accept_length:.2f} | {row.prompts:,} | {row.tokens:,} | {slots} | {row.method} |"
        )
    return lines
