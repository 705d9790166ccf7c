"""DFlare and DFlash checkpoints made up for tests: right in form, without any training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from sglang_ext.models.files import read_json_object
from sglang_ext.models.tapped import checkpoint
from sglang_ext.models.tapped.config import TappedConfig
from sglang_ext.models.vocabulary import vocabulary_digest

Change = Callable[[dict[str, Tensor]], None]
PERTURBATION = 0.2
"""Size of what the layers add to a block's rows, relative to the rows themselves."""


def untrained_tapped_drafter(
    target: Path,
    folder: Path,
    *,
    method: str = "dflare",
    num_layers: int = 2,
    target_layer_ids: tuple[int, ...] = (1, 2),
    block_size: int = 8,
    favourite: int = 1,
    confidence: float = 0.5,
    seed: int = 11,
    dtype: torch.dtype = torch.bfloat16,
    change: Change | None = None,
) -> Path:
    """Write a drafter over taps that nobody trained and return its folder.

    It drafts mostly ``favourite``, which a target says now and then, with a confidence that depends on the whole
    context: enough for some drafts to be verified and a few accepted, and for two servers to be told apart whose
    contexts differ in a single token.

    Args:
        target: folder of the target, with one ``model.safetensors``.
        folder: where to write; made if needed.
        method: ``dflare`` or ``dflash``.
        num_layers: D.
        target_layer_ids: the T taps.
        block_size: K.
        favourite: the token it drafts most.
        confidence: in that token, on average.
        seed: of the weights.
        dtype: of the tensors.
        change: edits the tensors in place before they are written (to plant NaNs, say).
    """
    raw = read_json_object(target / "config.json")
    config = checkpoint.METHODS[method].for_target(
        raw,
        num_layers=num_layers,
        num_taps=1,
        block_size=block_size,
        intermediate_size=2 * int(raw["hidden_size"]),
        target_name="untrained",
        vocabulary_digest=vocabulary_digest(target),
    )
    config = replace(config, target_layer_ids=target_layer_ids)
    tensors = _random_tensors(config, seed)
    row = _head_row(target, favourite)
    tensors["mask_embedding"] = row / row.pow(2).mean().sqrt()
    # The final norm decides how far the favourite's logit stands above the others.
    wanted = math.log(config.vocab_size) + math.log(confidence / (1 - confidence))
    tensors["norm.weight"] = torch.full((config.hidden_size,), wanted / float(tensors["mask_embedding"] @ row))
    if change is not None:
        change(tensors)
    return checkpoint.save(folder, config, {name: tensor.to(dtype) for name, tensor in tensors.items()})


def _random_tensors(config: TappedConfig, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in checkpoint.expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * noise
        else:
            tensors[name] = noise / math.sqrt(shape[-1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= PERTURBATION
    return tensors


def _head_row(target: Path, token: int) -> Tensor:
    """The LM head's row of one token, fp32; the embedding's where the two are one matrix."""
    with safe_open(str(target / "model.safetensors"), framework="pt") as archive:
        name = "lm_head.weight" if "lm_head.weight" in archive.keys() else "model.embed_tokens.weight"  # noqa: SIM118
        row: Tensor = archive.get_slice(name)[token]
        return row.float().view(-1)
