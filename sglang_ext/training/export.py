"""From a training checkpoint to a drafter folder with its card."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.flexdraft.card import AcceptanceRow, CardFields
from sglang_ext.models.flexdraft.model import FlexDraftModel
from sglang_ext.models.target import Target
from sglang_ext.training.config import TrainConfig
from sglang_ext.training.data import Record, is_held_out
from sglang_ext.training.evaluate import Acceptance, evaluate
from sglang_ext.training.state import read_state
from sglang_ext.training.train import CHECKPOINT, Trainer, build_model

LATEST = "export-latest"
#: All that a drafter's folder holds, and so all that writing one may replace.
DRAFTER_FILES = (checkpoint.CONFIG_FILE, checkpoint.WEIGHTS_FILE, checkpoint.CARD_FILE)
METHOD = "offline replay of greedy decoding on the target's own responses"


def load_drafter(path: str | Path, target: Target) -> FlexDraftModel:
    """A model with the weights of an exported drafter folder."""
    saved = checkpoint.load(path)
    model = FlexDraftModel(target, saved.config)
    model.load_state_dict(saved.tensors)
    return model


def load_training_state(out: str | Path) -> tuple[TrainConfig, dict[str, Any]]:
    """Configuration and state of a run's latest checkpoint.

    Raises:
        Refusal: if the run has not written one, or it is damaged.
    """
    path = Path(out) / CHECKPOINT
    if not path.is_file():
        raise Refusal(
            f"{path} does not exist", "a run that has written a checkpoint", "train first or correct the path"
        )
    state = read_state(path)
    return TrainConfig.from_dict(state["config"], str(path)), state


def restore(target: Target, config: TrainConfig, state: Mapping[str, Any]) -> FlexDraftModel:
    """The model of a training checkpoint."""
    model = build_model(target, config)
    model.load_state_dict(state["model"])
    return model


def with_draft_tokens(model: FlexDraftModel, ids: torch.Tensor) -> FlexDraftModel:
    """The same drafter, proposing only the tokens ``ids [R]`` (sorted)."""
    short = FlexDraftModel(model.target, replace(model.config, draft_vocab_size=len(ids)))
    short.load_state_dict({**model.state_dict(), checkpoint.DRAFT_TOKENS: ids.to(torch.int32)})
    return short


def acceptance_rows(found: Mapping[str, Acceptance]) -> list[AcceptanceRow]:
    """Card rows of an evaluation, the total last."""
    return [
        AcceptanceRow(
            dataset=domain,
            accept_length=round(row.accept_length, 4),
            prompts=row.prompts,
            tokens=row.tokens,
            method=METHOD,
            by_position=tuple(round(value, 4) for value in row.by_position),
        )
        for domain, row in sorted(found.items(), key=lambda pair: (pair[0] == "all", pair[0]))
    ]


def provenance(config: TrainConfig, steps: int, progress: float, records: Sequence[Record]) -> dict[str, Any]:
    """What the card says about the training: data by domain, size, settings; no paths."""
    used = [record for record in records if not is_held_out(record, config.held_out_percent)]
    domains: dict[str, int] = {}
    for record in used:
        domains[record.domain] = domains.get(record.domain, 0) + 1
    settings = ("optimizer", "lr", "lr_other", "gamma", "blocks_per_step", "anchors_per_sequence", "frequent", "drawn")
    return {
        "responses": domains,
        "response_tokens": sum(len(record.token_ids) - record.prompt_length for record in used),
        "response_source": "greedy responses of the target itself",
        "steps": steps,
        "blocks": steps * config.blocks_per_step,
        "schedule_done": round(progress, 4),
        "settings": {name: value for name, value in vars(config).items() if name in settings},
    }


def refuse_to_replace(path: str | Path) -> None:
    """Refuse to write a drafter where anything but an earlier drafter lies: writing it deletes what was there.

    Raises:
        Refusal: naming the first thing that would be lost.
    """
    folder = Path(path).resolve()
    held = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else [folder.name] * folder.exists()
    foreign = [name for name in held if name not in DRAFTER_FILES]
    if foreign or not folder.name:
        raise Refusal(
            f"{folder} holds {foreign[0] if foreign else 'everything'!r}, which a drafter would replace",
            "a new folder, or one that holds an exported drafter and nothing else, is allowed",
            "choose another --out",
        )


def write_drafter(path: str | Path, model: FlexDraftModel, fields: CardFields) -> Path:
    """Write a drafter folder in bf16; an older drafter there is replaced only when the new one is complete.

    Raises:
        Refusal: if anything else is there, or the folder cannot be written.
    """
    refuse_to_replace(path)
    final = Path(path).resolve()
    fresh = final.with_name(f"{final.name}.new.{os.getpid()}")
    tensors = {
        name: tensor.detach().to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    checkpoint.save(fresh, model.config, tensors, model.target.hf_config, fields)
    old = final.with_name(f"{final.name}.old.{os.getpid()}")
    if final.exists():
        final.rename(old)
    fresh.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    return final


class PeriodicExport:
    """Called by the training loop: evaluates on held-out records and writes ``<out>/export-latest``."""

    def __init__(self, out: str | Path, evaluated: int = 24) -> None:
        self.out, self.evaluated = Path(out), evaluated
        refuse_to_replace(self.out / LATEST)  # now rather than at the first export

    def __call__(self, trainer: Trainer) -> None:
        held_out = [record for record in trainer.held_out if record.domain == "gsm8k"] or trainer.held_out
        found = evaluate(trainer.model, held_out[: self.evaluated]) if held_out else {}
        info = provenance(trainer.config, trainer.step_number, trainer.progress, trainer.records)
        rows = [row for row in acceptance_rows(found) if row.dataset != "all"]
        write_drafter(self.out / LATEST, trainer.model, CardFields(info, rows))
        line = ", ".join(f"{row.dataset} {row.accept_length:.3f} ({row.prompts} prompts)" for row in rows)
        with (self.out / "exports.txt").open("a", encoding="utf-8") as file:
            file.write(f"step {trainer.step_number}, {trainer.progress:.1%}: held-out accept length {line}\n")
