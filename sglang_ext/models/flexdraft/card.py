"""The model card of a drafter: what it was trained for, by what, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.core.refusal import Refusal, refuse_unknown
from sglang_ext.models.flexdraft.config import FlexDraftConfig

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


def render_card(config: FlexDraftConfig, fields: CardFields, parameters: int, size_bytes: int) -> str:
    """Return the README.md of a drafter; the same arguments always give the same text."""
    name = config.target_name or f"a {config.target_architecture} target"
    lines = [f"# FlexDraft drafter for {name}", "", *_usage(config), "", "## Sizes", "", *_sizes(config)]
    lines += [f"| parameters | {parameters:,} |", f"| bytes of weights | {size_bytes:,} |"]
    lines += ["", "## Training", "", *_training(fields), "", "## Measured acceptance", "", *_acceptance(fields), ""]
    return "\n".join(lines)


def _usage(config: FlexDraftConfig) -> list[str]:
    return [
        "Attention projections, a mask embedding and an anchor calibrator that let a frozen target draft blocks of",
        f"up to {config.block_size - 1} tokens inside its own last {config.num_layers} layers (arXiv 2605.20022).",
        "It works with the target it was trained for and with no other:",
        "",
        "```",
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm flexdraft \\",
        "    --speculative-draft-model-path THIS_FOLDER",
        "```",
    ]


def _sizes(config: FlexDraftConfig) -> list[str]:
    ids = config.target_layer_ids
    calibrator = "none" if config.calibrator == "none" else f"{config.calibrator} form, rank {config.calibrator_rank}"
    rows = [
        ("target", config.target_name or "not recorded"),
        ("target architecture", config.target_architecture),
        ("target layers, hidden size, vocabulary", _triple(config)),
        ("heads (query, key/value) and head size", _heads(config)),
        ("vocabulary digest (sha256)", config.vocabulary_digest or "not recorded"),
        ("block size", str(config.block_size)),
        ("layers with mask rows", f"{ids[0]} to {ids[-1]}"),
        ("calibrator", calibrator),
        ("tokens it can propose", "all" if config.draft_vocab_size is None else f"{config.draft_vocab_size:,}"),
    ]
    return ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]


def _triple(config: FlexDraftConfig) -> str:
    return f"{config.num_target_layers}, {config.hidden_size}, {config.vocab_size}"


def _heads(config: FlexDraftConfig) -> str:
    norm = ", with query/key norms" if config.qk_norm else ""
    return f"{config.num_attention_heads}, {config.num_key_value_heads}; {config.head_dim}{norm}"


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
