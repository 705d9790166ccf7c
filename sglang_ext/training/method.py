"""What a method tells the common training loop, evaluation and export; one object per method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from sglang_ext.models.card import CardFields
from sglang_ext.models.target import Target
from sglang_ext.models.vocabulary import vocabulary_digest
from sglang_ext.training.config import TrainConfig
from sglang_ext.training.data import ContextStore, Record

Config = TypeVar("Config", bound=TrainConfig)
Model = TypeVar("Model", bound=nn.Module)


class Method(ABC, Generic[Config, Model]):
    """One drafter method.

    Its modules take the context of its :class:`~sglang_ext.training.data.ContextStore`, return the states of slots
    1..K-1, and have ``config``, ``target``, ``layers``, ``head_inputs`` and ``logits`` in common.
    """

    @abstractmethod
    def new_model(self, target: Target, config: Config) -> Model:
        """A drafter with initial weights that depend on nothing but torch's generator."""

    @abstractmethod
    def begin(self, model: Model, config: Config, records: Sequence[Record]) -> None:
        """Set what a new run learns from the data before its first step."""

    @abstractmethod
    def store(self, model: Model, config: Config | None = None) -> ContextStore:
        """Where the module's context comes from; a run's configuration may name a file that keeps it."""

    @abstractmethod
    def gamma(self, config: Config, progress: float) -> float:
        """Decay length of the slot weights at schedule fraction ``progress``."""

    @abstractmethod
    def state_bytes(self, target: Target, config: Config) -> int:
        """Bytes of target states per token that a step looks at."""

    @abstractmethod
    def kept(self, config: Config, records: Sequence[Record]) -> int:
        """How many of the records have their states on disk already."""

    @abstractmethod
    def load(self, target: Target, folder: str | Path) -> Model:
        """The drafter in an exported folder; raises Refusal if it is damaged or another target's."""

    @abstractmethod
    def save(self, folder: Path, model: Model, tensors: dict[str, Tensor], fields: CardFields) -> None:
        """Write a drafter folder with the weights ``tensors``."""

    @abstractmethod
    def short(self, model: Model, count: int) -> Model:
        """A module of the same sizes that proposes only ``count`` tokens, its weights not yet loaded."""


def origin(config: TrainConfig) -> dict[str, Any]:
    """What a new drafter records about its target: its name and, where it has a tokenizer, its vocabulary."""
    folder = Path(config.target)
    digest = vocabulary_digest(folder) if (folder / "tokenizer.json").is_file() else None
    return {"target_name": folder.name or None, "vocabulary_digest": digest}
