"""Tiny DFlare and DFlash drafters, ours and with the names, shapes and config keys of published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from sglang_ext.models.tapped.checkpoint import METHODS, expected_shapes, save
from sglang_ext.models.tapped.config import TappedConfig
from sglang_ext.models.weights import DRAFT_TOKENS
from tests.unit.tiny import target_config

LAYERS = 9
H, HEADS, KV, HEAD_DIM, FFN, D, VOCABULARY = 32, 4, 2, 16, 48, 3, 61
TAPS = [1, 3, 5, 6]

#: config.json as the published DFlare drafters have it, in small; the architecture string varies among them.
PUBLISHED_DFLARE: dict[str, Any] = {
    "architectures": ["QwenDFlareDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": TAPS},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02,
    "intermediate_size": FFN,
    "layer_types": ["full_attention"] * D,
    "max_position_embeddings": 40960,
    "max_window_layers": D,
    "model_type": "qwen3",
    "num_attention_heads": HEADS,
    "num_hidden_layers": D,
    "num_key_value_heads": KV,
    "num_target_layers": LAYERS,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}
PUBLISHED_DFLASH: dict[str, Any] = {
    **PUBLISHED_DFLARE,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
}


def published_shapes(method: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a published drafter, listed by hand."""
    shapes: dict[str, tuple[int, ...]] = {"hidden_norm.weight": (H,), "norm.weight": (H,)}
    if method == "dflare":
        shapes["layer_fusion_weights"] = (D, len(TAPS))
    else:
        shapes["fc.weight"] = (H, len(TAPS) * H)
    for i in range(D):
        at = f"layers.{i}"
        shapes |= {
            f"{at}.input_layernorm.weight": (H,),
            f"{at}.post_attention_layernorm.weight": (H,),
            f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, H),
            f"{at}.self_attn.k_proj.weight": (KV * HEAD_DIM, H),
            f"{at}.self_attn.v_proj.weight": (KV * HEAD_DIM, H),
            f"{at}.self_attn.o_proj.weight": (H, HEADS * HEAD_DIM),
            f"{at}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{at}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{at}.mlp.gate_proj.weight": (FFN, H),
            f"{at}.mlp.up_proj.weight": (FFN, H),
            f"{at}.mlp.down_proj.weight": (H, FFN),
        }
        if method == "dflare":
            shapes[f"{at}.self_attn.k_proj_target.weight"] = (KV * HEAD_DIM, H)
            shapes[f"{at}.self_attn.v_proj_target.weight"] = (KV * HEAD_DIM, H)
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in sorted(shapes.items())}


def write_published(folder: Path, method: str, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """A folder as it would be downloaded; ``changes`` replace entries of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {**(PUBLISHED_DFLARE if method == "dflare" else PUBLISHED_DFLASH), **changes}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = random_tensors(published_shapes(method), torch.bfloat16) if tensors is None else tensors
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def own_config(method: str, **changes: Any) -> TappedConfig:
    """A drafter of ours for a tiny Llama target, with a learned mask embedding."""
    raw = target_config(num_hidden_layers=LAYERS, rope_theta=5000.0)
    options = {"num_layers": D, "num_taps": 4, "block_size": 4, **changes}
    return METHODS[method].for_target(raw, **options)


def own_tensors(config: TappedConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    tensors = random_tensors(expected_shapes(config), dtype)
    if config.draft_vocab_size is not None:
        tensors[DRAFT_TOKENS] = torch.arange(config.draft_vocab_size, dtype=torch.int32)
    return tensors


def write_own(folder: Path, method: str, **changes: Any) -> TappedConfig:
    config = own_config(method, **changes)
    save(folder, config, own_tensors(config))
    return config
