"""Targets and drafters made up on the spot: right in form, random in weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from sglang_ext.models.flexdraft import checkpoint as flexdraft
from sglang_ext.models.flexdraft.config import FlexDraftConfig
from sglang_ext.models.tapped import checkpoint as tapped

TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
QWEN3_8B: dict[str, Any] = TINY | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def write_target(folder: Path, config: dict[str, Any], *, weights: bool) -> Path:
    """Write a target folder; without weights it serves ``--load-format dummy``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        from safetensors.torch import save_file
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
        model = Qwen3ForCausalLM(Qwen3Config(**fields)).to(torch.bfloat16)
        # A peaked head: near-ties would make equal greedy texts a matter of luck.
        tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
        tensors["lm_head.weight"] *= 30
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random(shapes: dict[str, tuple[int, ...]], device: str) -> dict[str, torch.Tensor]:
    random = torch.Generator(device=device).manual_seed(1)
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=random, device=device) / math.sqrt(shape[-1])
        tensors[name] = (1 + tensor if name.endswith("norm.weight") else tensor).to(torch.bfloat16).cpu()
    return tensors


def write_flexdraft(
    folder: Path, target: dict[str, Any], *, layers: int, block: int, rank: int, device: str = "cpu"
) -> Path:
    """Write a FlexDraft drafter of a target's shape; a large one is made up far faster on a GPU."""
    config = FlexDraftConfig.for_target(target, num_layers=layers, block_size=block, calibrator_rank=rank)
    return flexdraft.save(folder, config, _random(flexdraft.expected_shapes(config), device), target)


def write_tapped(
    folder: Path, target: dict[str, Any], *, method: str, layers: int, taps: int, block: int, device: str = "cpu"
) -> Path:
    """Write a DFlare or DFlash drafter of a target's shape."""
    kind = tapped.METHODS[method]
    config = kind.for_target(target, num_layers=layers, num_taps=taps, block_size=block)
    return tapped.save(folder, config, _random(tapped.expected_shapes(config), device))
