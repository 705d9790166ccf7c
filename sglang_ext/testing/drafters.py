"""Drafter checkpoints made up for tests: right in form, without any training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sglang_ext.models.files import read_json_object
from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.flexdraft.config import FlexDraftConfig
from sglang_ext.models.vocabulary import vocabulary_digest
from sglang_ext.models.weights import CONFIG_FILE

Change = Callable[[dict[str, Tensor]], None]


def untrained_drafter(
    target: Path,
    folder: Path,
    *,
    num_layers: int = 8,
    block_size: int = 8,
    seed: int = 11,
    change: Change | None = None,
) -> Path:
    """Write a FlexDraft drafter that nobody trained and return its folder.

    The second projections are copies of the target's own, the mask embedding is the mean token embedding and the
    calibrator is small noise: such a drafter is seldom right, which is all that losslessness needs.

    Args:
        target: folder of the target, with one ``model.safetensors``.
        folder: where to write; made if needed.
        num_layers: D, the deep layers that carry mask rows.
        block_size: K.
        seed: of the calibrator's weights.
        change: edits the tensors in place before they are written (to plant NaNs, say).
    """
    raw = read_json_object(target / "config.json")
    config = FlexDraftConfig.for_target(
        raw,
        num_layers=num_layers,
        block_size=block_size,
        calibrator="hidden",
        calibrator_rank=32,
        target_name="untrained",
        vocabulary_digest=vocabulary_digest(target),
    )
    generator = torch.Generator().manual_seed(seed)
    with safe_open(str(target / "model.safetensors"), framework="pt") as archive:
        tensors = {
            name: _initial(name, shape, config.split, archive, generator)
            for name, shape in checkpoint.expected_shapes(config).items()
        }
    if change is not None:
        change(tensors)
    return checkpoint.save(folder, config, tensors, raw)


def edit_config(folder: Path, edit: Callable[[dict[str, object]], None]) -> Path:
    """Rewrite a drafter's config.json through ``edit`` and return the folder (for drafters to be refused)."""
    file = folder / CONFIG_FILE
    raw = read_json_object(file)
    edit(raw)
    file.write_text(json.dumps(raw), encoding="utf-8")
    return folder


def _initial(name: str, shape: tuple[int, ...], split: int, archive: Any, generator: torch.Generator) -> Tensor:
    if name == "mask_embedding":
        embedding: Tensor = archive.get_tensor("model.embed_tokens.weight")
        return embedding.float().mean(0).to(torch.bfloat16)
    if name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        weight: Tensor = archive.get_tensor(f"model.layers.{int(index) + split}.{rest}")
        return weight.to(torch.bfloat16)
    return (torch.randn(shape, generator=generator) * 0.01).to(torch.bfloat16)
