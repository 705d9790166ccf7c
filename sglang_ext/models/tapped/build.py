"""From a configuration or a folder to a module, whatever the method."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.models.dflare.model import DFlareModel
from sglang_ext.models.dflash.model import DFlashModel
from sglang_ext.models.tapped import checkpoint
from sglang_ext.models.tapped.config import TappedConfig
from sglang_ext.models.tapped.model import TappedModel
from sglang_ext.models.target import Target

_MODELS: dict[str, type[TappedModel]] = {"dflare": DFlareModel, "dflash": DFlashModel}


def new_model(target: Target, config: TappedConfig) -> TappedModel:
    """Return a module of the method that ``config`` belongs to, with initial weights."""
    return _MODELS[config.METHOD](target, config)


def load_model(target: Target, folder: str | Path) -> TappedModel:
    """Return the drafter in ``folder``; raises Refusal if it is damaged or made for another target."""
    saved = checkpoint.load(folder)
    model = new_model(target, saved.config)
    model.load_state_dict(saved.tensors)
    return model
