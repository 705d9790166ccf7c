"""Drafters that come with the package, found by the target they were trained for."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.families import target_shape
from sglang_ext.models.files import read_json_object
from sglang_ext.models.flexdraft.checkpoint import CONFIG_FILE, load_config
from sglang_ext.models.vocabulary import vocabulary_digest

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def find_shipped(target_dir: str | Path, assets: Path = ASSETS) -> Path | None:
    """Return the folder of the shipped drafter trained for the target in ``target_dir``, or None.

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
        config, _ = load_config(config_file.parent)
        if config.target_shape == shape and config.vocabulary_digest == digest:
            return config_file.parent
    return None
