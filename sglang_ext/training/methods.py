"""The methods by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_ext.models.dflare.config import DFlareConfig
from sglang_ext.models.dflash.config import DFlashConfig
from sglang_ext.models.drafters import method_of_folder
from sglang_ext.models.target import Target
from sglang_ext.training.config import TrainConfig
from sglang_ext.training.flexdraft import FlexDraftMethod
from sglang_ext.training.method import Method
from sglang_ext.training.tapped import TappedMethod

METHODS: dict[str, Method[Any, Any]] = {
    "flexdraft": FlexDraftMethod(),
    DFlareConfig.METHOD: TappedMethod(DFlareConfig),
    DFlashConfig.METHOD: TappedMethod(DFlashConfig),
}


def method_for(config: TrainConfig) -> Method[Any, Any]:
    """The method that a run's configuration belongs to."""
    return METHODS[config.METHOD]


def method_of(model: Any) -> Method[Any, Any]:
    """The method that a module belongs to."""
    return METHODS[model.config.METHOD]


def load_drafter(path: str | Path, target: Target) -> Any:
    """A module with the weights of an exported drafter folder, whatever its method."""
    return METHODS[method_of_folder(path)].load(target, path)
