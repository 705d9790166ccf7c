"""Drafters that come with the package, found by the target they were trained for."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.drafters import load_config, method_of_folder
from sglang_ext.models.families import target_shape
from sglang_ext.models.files import read_json_object
from sglang_ext.models.flexdraft.config import FlexDraftConfig
from sglang_ext.models.tapped.checkpoint import validate_against_target
from sglang_ext.models.vocabulary import vocabulary_digest
from sglang_ext.models.weights import CONFIG_FILE

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def find_shipped(target_dir: str | Path, assets: Path = ASSETS, method: str = "flexdraft") -> Path | None:
    """Return the folder of the shipped drafter of ``method`` trained for the target in ``target_dir``, or None.

    Architecture, every size and the vocabulary, token by token, must be equal. A target this package cannot draft for
    (unsupported family, no tokenizer.json) has no shipped drafter; a damaged shipped drafter is an error.

    Raises:
        Refusal: if the target's config.json or a shipped drafter cannot be read.
    """
    target = Path(target_dir)
    raw = read_json_object(target / CONFIG_FILE)
    try:
        shape, digest = target_shape(raw, str(target / CONFIG_FILE)), vocabulary_digest(target)
    except Refusal:
        return None
    for config_file in sorted(assets.glob(f"*/{CONFIG_FILE}")):
        folder = config_file.parent
        if method_of_folder(folder) != method:
            continue
        config, _ = load_config(folder)
        if config.vocabulary_digest != digest:
            continue
        if isinstance(config, FlexDraftConfig):
            if config.target_shape == shape:
                return folder
            continue
        try:
            validate_against_target(config, raw)
        except Refusal:
            continue
        return folder
    return None
