"""What ``sglang-ext inspect`` shows of a drafter."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ext.models.flexdraft import checkpoint


def describe_drafter(path: Path) -> dict[str, Any]:
    """Read and check a drafter's folder, weights included, and return its facts as plain JSON values.

    Raises:
        Refusal: if anything in the folder is missing, unknown or damaged.
    """
    drafter = checkpoint.load(path)
    tensors = drafter.tensors.values()
    facts: dict[str, Any] = {"kind": "FlexDraft drafter", "path": str(path)}
    facts.update(asdict(drafter.config))
    facts["target_layer_ids"] = list(drafter.config.target_layer_ids)
    facts["dtype"] = str(drafter.tensors["mask_embedding"].dtype).removeprefix("torch.")
    facts["parameters"] = sum(tensor.numel() for tensor in tensors)
    facts["weight_bytes"] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    facts["training"] = dict(drafter.card_fields.training)
    facts["acceptance"] = [row.to_json() for row in drafter.card_fields.acceptance]
    return facts
