"""Any drafter's folder: which method it belongs to, by its tensors, and its typed config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_ext.models.flexdraft import checkpoint as flexdraft
from sglang_ext.models.flexdraft.config import FlexDraftConfig
from sglang_ext.models.tapped import checkpoint as tapped
from sglang_ext.models.tapped.config import TappedConfig
from sglang_ext.models.weights import drafter_folder, tensor_files

FLEXDRAFT = FlexDraftConfig.METHOD


def method_of_folder(path: str | Path) -> str:
    """Return ``"dflare"``, ``"dflash"`` or ``"flexdraft"``: the first two have a tensor that no other method has.

    Architecture strings and config keys do not tell the methods apart, because published files share them.

    Raises:
        Refusal: if the folder or its tensors cannot be read.
    """
    kind = tapped.method_of(tensor_files(drafter_folder(path)))
    return FLEXDRAFT if kind is None else kind.METHOD


def load_config(path: str | Path) -> tuple[FlexDraftConfig | TappedConfig, dict[str, Any]]:
    """Read and check a drafter's config.json, of whatever method; return it typed and as parsed.

    Raises:
        Refusal: if the folder or a file is missing or wrong.
    """
    return flexdraft.load_config(path) if method_of_folder(path) == FLEXDRAFT else tapped.load_config(path)


def describe_drafter(path: Path) -> dict[str, Any]:
    """Read and check a drafter's folder, weights included, and return its facts as plain JSON values.

    Raises:
        Refusal: if anything in the folder is missing, unknown or damaged.
    """
    from sglang_ext.models.flexdraft import describe as flexdraft_facts
    from sglang_ext.models.tapped import describe as tapped_facts

    of_taps = method_of_folder(path) != FLEXDRAFT
    return tapped_facts.describe_drafter(path) if of_taps else flexdraft_facts.describe_drafter(path)
