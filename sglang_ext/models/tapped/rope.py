"""Rotary tables of a drafter over taps, from its own config: they may differ from the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.models.tapped.config import TappedConfig


def rope_tables(config: TappedConfig, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return ``cos, sin [length, head_dim]`` in fp32 of positions 0 to length - 1 (half-split convention)."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    hf_config = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
    )
    rotary = Qwen3RotaryEmbedding(hf_config)
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    return cos[0].to(device), sin[0].to(device)
