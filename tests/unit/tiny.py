"""Tiny random targets and drafters, written the way real ones are: a config.json, safetensors, a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor

from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.flexdraft.config import FlexDraftConfig

VOCABULARY = 61
LAYERS = 5

#: name -> config.json of a target: both families, GQA and MHA, tied and untied, head_dim given and derived.
TARGETS: dict[str, dict[str, Any]] = {
    "llama, gqa, tied, head_dim derived": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama, mha, untied, head_dim given": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "qwen3, gqa, untied, head_dim given": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * LAYERS,
    },
    "qwen3, mha, tied, head_dim absent": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}


def target_config(name: str = "llama, gqa, tied, head_dim derived", **changes: Any) -> dict[str, Any]:
    """Return a complete config.json, with some entries changed (None removes one)."""
    common = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
    }
    merged = {**common, **TARGETS[name], **changes}
    return {key: value for key, value in merged.items() if value is not None}


def hf_model(config: dict[str, Any]) -> torch.nn.Module:
    """Return the Hugging Face model of a config.json, random weights."""
    hf_config = transformers.AutoConfig.for_model(**config)
    return transformers.AutoModelForCausalLM.from_config(hf_config)


def tokenizer_json(size: int = VOCABULARY) -> dict[str, Any]:
    """Return a byte-level tokenizer.json with ``size`` tokens, the last one added."""
    vocabulary = {chr(0x61 + i // 26) + chr(0x61 + i % 26): i for i in range(size - 1)}
    added = {"id": size - 1, "content": "<|end|>", "special": True}
    return {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": [added]}


def write_target(folder: Path, config: dict[str, Any]) -> Path:
    """Write a loadable target folder with random weights (seed 0)."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in hf_model(config).state_dict().items()}
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(config["vocab_size"])))
    return folder


def drafter_config(name: str = "llama, gqa, tied, head_dim derived", **changes: Any) -> FlexDraftConfig:
    """Return a two-layer drafter for one of :data:`TARGETS`."""
    options = {"num_layers": 2, "block_size": 4, "calibrator": "vocabulary", "calibrator_rank": 6, **changes}
    return FlexDraftConfig.for_target(target_config(name), **options)


def random_tensors(config: FlexDraftConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights of the shapes a drafter must have."""
    generator = torch.Generator().manual_seed(seed)
    shapes = checkpoint.expected_shapes(config)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    if config.draft_vocab_size is not None:
        chosen = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
        tensors[checkpoint.DRAFT_TOKENS] = chosen.sort().values.to(torch.int32)
    return tensors


def write_drafter(folder: Path, name: str = "llama, gqa, tied, head_dim derived", **changes: Any) -> FlexDraftConfig:
    """Write a drafter folder and return its config."""
    config = drafter_config(name, **changes)
    checkpoint.save(folder, config, random_tensors(config), target_config(name))
    return config
