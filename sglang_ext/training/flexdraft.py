"""What training FlexDraft needs beyond the common loop: its module, its start, the target's deep keys and values.

Shape legend: N sequences, A anchors per sequence, S clean keys, D drafter layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.card import CardFields
from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.flexdraft.config import FlexDraftConfig
from sglang_ext.models.flexdraft.model import BlockContext, FlexDraftModel
from sglang_ext.models.target import Target
from sglang_ext.training.config import FlexDraftTrainConfig
from sglang_ext.training.data import Chunk, ContextStore, Record
from sglang_ext.training.method import Method, origin


class StateStore(ContextStore):
    """Keys and values of the target's last D layers for any record: from the regenerated file, or computed."""

    def __init__(self, target: Target, num_layers: int) -> None:
        self.target, self.num_layers = target, num_layers
        self._maps: dict[str, np.memmap] = {}

    def read(self, record: Record) -> Tensor:
        """``[D, 2, Hkv, S, head_dim]`` for positions 0..S-1, S = tokens - 1."""
        if record.states is None:
            return self._compute(record)
        name, offset, size, layers, rows = record.states
        if layers < self.num_layers:
            raise Refusal(
                f"{name} keeps {layers} layers",
                f"the drafter has {self.num_layers}",
                "regenerate with more state layers",
            )
        if name not in self._maps or offset + size > self._maps[name].shape[0]:
            self._maps[name] = np.memmap(name, dtype=np.uint8, mode="r")
        shape = self.target.shape
        flat = torch.from_numpy(np.array(self._maps[name][offset : offset + size])).view(self.target.dtype)
        return flat.view(layers, 2, shape.num_key_value_heads, rows, shape.head_dim)[-self.num_layers :]

    def _compute(self, record: Record) -> Tensor:
        kept: list[Tensor] = []

        def keep(index: int, _hidden: Tensor, keys: Tensor, values: Tensor) -> None:
            if index >= self.target.shape.num_layers - self.num_layers:
                kept.append(torch.stack((keys[0].transpose(0, 1), values[0].transpose(0, 1))))

        self.target.prefill(torch.tensor([record.token_ids[:-1]], device=self.target.device), keep)
        return torch.stack(kept)

    def context(
        self, records: Sequence[Record], chunks: Sequence[Chunk], anchors: Tensor, bonus_ids: Tensor
    ) -> BlockContext:
        """Keys and values up to the furthest anchor, padded on the right."""
        span, shape = int(anchors.max()) + 1, self.target.shape
        size = (self.num_layers, 2, len(chunks), shape.num_key_value_heads, span, shape.head_dim)
        states = torch.zeros(size, dtype=self.target.dtype)
        for row, chunk in enumerate(chunks):
            known = self.read(records[chunk.record])[:, :, :, :span]
            states[:, :, row, :, : known.shape[3]] = known
        states = states.to(self.target.device)
        return BlockContext(list(states[:, 0]), list(states[:, 1]), anchors, bonus_ids)


@torch.no_grad()
def start_mask_embedding(model: FlexDraftModel, records: Sequence[Record], count: int = 8) -> None:
    """Set the mask embedding to the mean hidden state of response rows at the input of layer s."""
    total, rows = torch.zeros(model.config.hidden_size), 0
    for record in records[:count]:
        kept: list[Tensor] = []

        def keep(index: int, hidden: Tensor, _k: Tensor, _v: Tensor, kept: list[Tensor] = kept) -> None:
            if index == model.config.split:
                kept.append(hidden[0])

        model.target.prefill(torch.tensor([record.token_ids], device=model.target.device), keep)
        part = kept[0][record.prompt_length :].float().cpu()
        total, rows = total + part.sum(0), rows + len(part)
    model.mask_embedding.copy_(total / rows)


class FlexDraftMethod(Method[FlexDraftTrainConfig, FlexDraftModel]):
    """FlexDraft (FlexDraft section 6)."""

    def new_model(self, target: Target, config: FlexDraftTrainConfig) -> FlexDraftModel:
        """A module that starts from the target's own projections."""
        drafter = FlexDraftConfig.for_target(
            target.hf_config,
            num_layers=config.num_layers,
            block_size=config.block_size,
            calibrator=config.calibrator,
            calibrator_rank=config.calibrator_rank if config.calibrator != "none" else 0,
            **origin(config),
        )
        return FlexDraftModel(target, drafter)

    def begin(self, model: FlexDraftModel, config: FlexDraftTrainConfig, records: Sequence[Record]) -> None:
        """Set the mask embedding from the data."""
        start_mask_embedding(model, records)

    def store(self, model: FlexDraftModel, config: FlexDraftTrainConfig | None = None) -> StateStore:
        """Keys and values of the layers that carry mask rows; what is kept of them lies beside the responses."""
        return StateStore(model.target, model.config.num_layers)

    def gamma(self, config: FlexDraftTrainConfig, progress: float) -> float:
        """The same throughout."""
        return config.gamma

    def state_bytes(self, target: Target, config: FlexDraftTrainConfig) -> int:
        """Keys and values of D layers."""
        shape = target.shape
        return 2 * config.num_layers * shape.num_key_value_heads * shape.head_dim * target.embedding.element_size()

    def kept(self, config: FlexDraftTrainConfig, records: Sequence[Record]) -> int:
        """Those regenerated with state layers."""
        return sum(record.states is not None for record in records)

    def load(self, target: Target, folder: str | Path) -> FlexDraftModel:
        """The drafter in a folder."""
        saved = checkpoint.load(folder)
        model = FlexDraftModel(target, saved.config)
        model.load_state_dict(saved.tensors)
        return model

    def save(self, folder: Path, model: FlexDraftModel, tensors: dict[str, Tensor], fields: CardFields) -> None:
        """Write a drafter folder."""
        checkpoint.save(folder, model.config, tensors, model.target.hf_config, fields)

    def short(self, model: FlexDraftModel, count: int) -> FlexDraftModel:
        """A module of the same sizes that proposes ``count`` tokens."""
        return FlexDraftModel(model.target, replace(model.config, draft_vocab_size=count))
