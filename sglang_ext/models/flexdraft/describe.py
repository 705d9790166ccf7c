"""What ``sglang-ext inspect`` shows of a drafter."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ext.models.card import weight_facts
from sglang_ext.models.flexdraft import checkpoint


def describe_drafter(path: Path) -> dict[str, Any]:
    """Read and check a drafter's folder, weights included, and return its facts as plain JSON values.

    Raises:
        Refusal: if anything in the folder is missing, unknown or damaged.
    """
    drafter = checkpoint.load(path)
    facts: dict[str, Any] = {"kind": "FlexDraft drafter", "path": str(path)}
    facts.update(asdict(drafter.config))
    facts["target_layer_ids"] = list(drafter.config.target_layer_ids)
    facts.update(weight_facts(drafter.tensors, drafter.card_fields))
    return facts
