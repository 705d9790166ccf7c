"""What training DFlare and DFlash needs beyond the common loop: their modules and how their weights start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ext.models.card import CardFields
from sglang_ext.models.dflare.loss import gamma_at
from sglang_ext.models.tapped import checkpoint
from sglang_ext.models.tapped.build import load_model, new_model
from sglang_ext.models.tapped.config import TappedConfig
from sglang_ext.models.tapped.model import TappedModel
from sglang_ext.models.target import Target, rms_norm
from sglang_ext.training.config import TappedTrainConfig
from sglang_ext.training.data import Record
from sglang_ext.training.method import Method, origin
from sglang_ext.training.taps import TapStore, kept_keys

#: Responses looked at before the first step.
LOOKED_AT = 8


class TappedMethod(Method[TappedTrainConfig, TappedModel]):
    """DFlare or DFlash (DFlare section 4); ``kind`` is the class of its drafters' configuration."""

    def __init__(self, kind: type[TappedConfig]) -> None:
        self.kind = kind

    def new_model(self, target: Target, config: TappedTrainConfig) -> TappedModel:
        """A module with random projections."""
        drafter = self.kind.for_target(
            target.hf_config,
            num_layers=config.num_layers,
            num_taps=config.num_taps,
            block_size=config.block_size,
            intermediate_size=config.intermediate_size or None,
            mask_token_id=config.mask_token_id if config.mask_token_id >= 0 else None,
            separate_context_projections=config.context_projections == "separate",
            **origin(config),
        )
        return new_model(target, drafter)

    def begin(self, model: TappedModel, config: TappedTrainConfig, records: Sequence[Record]) -> None:
        """Set the mask embedding from the data and, unless the start is random, the layers from the target's."""
        looked_at = records[:LOOKED_AT]
        if model.config.mask_token_id is None:
            ids = [token for record in looked_at for token in record.token_ids[record.prompt_length :]]
            with torch.no_grad():
                model.mask_embedding.copy_(model.target.embedding[torch.tensor(ids)].float().mean(0))
        if config.start != "random":
            start_from_target(model, config.start, looked_at)

    def store(self, model: TappedModel, config: TappedTrainConfig | None = None) -> TapStore:
        """The taps of the drafter's layers."""
        return TapStore(model.target, model.config.target_layer_ids, config.tap_cache if config is not None else "")

    def gamma(self, config: TappedTrainConfig, progress: float) -> float:
        """Fixed, or growing over the run."""
        return config.gamma or gamma_at(progress, config.gamma_start, config.gamma_end)

    def state_bytes(self, target: Target, config: TappedTrainConfig) -> int:
        """T taps."""
        return config.num_taps * target.shape.hidden_size * target.embedding.element_size()

    def kept(self, config: TappedTrainConfig, records: Sequence[Record]) -> int:
        """Those in the file of taps."""
        keys = kept_keys(config.tap_cache) if config.tap_cache else set()
        return sum(record.key in keys for record in records)

    def load(self, target: Target, folder: str | Path) -> TappedModel:
        """The drafter in a folder."""
        return load_model(target, folder)

    def save(self, folder: Path, model: TappedModel, tensors: dict[str, Tensor], fields: CardFields) -> None:
        """Write a drafter folder."""
        checkpoint.save(folder, model.config, tensors, fields)

    def short(self, model: TappedModel, count: int) -> TappedModel:
        """A module of the same sizes that proposes ``count`` tokens."""
        return new_model(model.target, model.config.with_draft_vocabulary(count))


def source_layers(model: TappedModel, start: str) -> list[int]:
    """The target layer each drafter layer starts from: behind its own tap, or (``last``) the target's last ones."""
    depth, ids = model.target.shape.num_layers, model.config.target_layer_ids
    if start == "last":
        first = max(0, depth - model.config.num_layers)
        return [min(depth - 1, first + layer) for layer in range(model.config.num_layers)]
    return [min(depth - 1, ids[place] + 1) for place in model.layer_taps]


@torch.no_grad()
def start_from_target(model: TappedModel, start: str, records: Sequence[Record]) -> None:
    """Copy target layers into the drafter's; wider or narrower feed-forward parts share the columns they have.

    The taps enter a layer through the norm that all layers share. What the target's own norm would have done is folded
    into separate context projections; shared ones meet the mean of those norms. Query and key norms, where the target
    has none, start at the mean size of its queries and keys on ``records``.
    """
    target, sources = model.target, source_layers(model, start)
    sizes = None if target.shape.qk_norm else _head_sizes(target, sources, records)
    widths = (target.query_width, target.key_width, target.key_width)
    for place, (draft, source) in enumerate(zip(model.layers, sources, strict=True)):
        layer, attention = target.layers[source], draft.self_attn
        q, k, v = layer.qkv.split(widths)
        for projection, weight in ((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v)):
            projection.weight.copy_(weight)
        if model.config.separate_context_projections:
            attention.k_proj_target.weight.copy_(k * layer.input_norm)
            attention.v_proj_target.weight.copy_(v * layer.input_norm)
        attention.o_proj.weight.copy_(layer.o)
        if sizes is not None:
            attention.q_norm.weight.fill_(sizes[place][0])
            attention.k_norm.weight.fill_(sizes[place][1])
        elif layer.q_norm is not None and layer.k_norm is not None:
            attention.q_norm.weight.copy_(layer.q_norm)
            attention.k_norm.weight.copy_(layer.k_norm)
        draft.input_layernorm.weight.copy_(layer.input_norm)
        draft.post_attention_layernorm.weight.copy_(layer.post_norm)
        gate, up = layer.gate_up.chunk(2)
        width = min(len(gate), model.config.intermediate_size)
        draft.mlp.gate_proj.weight[:width].copy_(gate[:width])
        draft.mlp.up_proj.weight[:width].copy_(up[:width])
        draft.mlp.down_proj.weight[:, :width].copy_(layer.down[:, :width])
    if not model.config.separate_context_projections:
        norms = torch.stack([target.layers[source].input_norm.float() for source in sources])
        model.hidden_norm.weight.copy_(norms.mean(0))
    model.norm.weight.copy_(target.final_norm)


def _head_sizes(target: Target, sources: Sequence[int], records: Sequence[Record]) -> list[tuple[float, float]]:
    """Root mean square of the queries and keys of each source layer over ``records``."""
    squares: dict[int, list[Tensor]] = {source: [] for source in sources}

    def keep(index: int, hidden: Tensor, keys: Tensor, _values: Tensor) -> None:
        if index in squares:
            layer = target.layers[index]
            queries = F.linear(rms_norm(hidden, layer.input_norm, target.eps), layer.qkv[: target.query_width])
            squares[index].append(torch.stack((queries.float().pow(2).mean(), keys.float().pow(2).mean())))

    for record in records:
        target.prefill(torch.tensor([record.token_ids], device=target.device), keep)
    means = {index: torch.stack(found).mean(0).sqrt().tolist() for index, found in squares.items()}
    return [(means[source][0], means[source][1]) for source in sources]
