"""Tiny random targets in fp32, rows made by hand, and a tokenizer with a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 97
EOS = 2

#: Options of a training run that takes a moment on a tiny target.
SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_layers": 2,
    "calibrator_rank": 8,
    "blocks_per_step": 8,
    "anchors_per_sequence": 4,
    "frequent": 0,
    "held_out_percent": 0,
    "threads": 1,
}

FAMILIES = {
    "llama-gqa-tied": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mha-untied": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "qwen3-gqa-untied": (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen3-mha-tied": (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
}


def make_model(family: str, seed: int = 0) -> Any:
    config_class, model_class, options = FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=EOS,
        bos_token_id=1,
        pad_token_id=0,
        architectures=[model_class.__name__],
        initializer_range=0.3,
        **options,
    )
    return model_class(config).eval()


def write_target(folder: Path, family: str = "llama-gqa-tied", seed: int = 0) -> Path:
    """A target folder with a word-level tokenizer whose chat template marks turns."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    make_model(family, seed).save_pretrained(folder)
    words = ["<unk>", "<s>", "<end>", "<user>", "<assistant>", *(f"w{i}" for i in range(VOCABULARY - 5))]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[tuple[list[int], list[int]]], domain: str = "test") -> Path:
    """A regenerated file without states from (prompt ids, response ids) pairs."""
    lines = [
        json.dumps(
            {"key": f"{domain}/{i}", "domain": domain, "prompt_ids": p, "response_ids": r, "finished": r[-1] == EOS}
        )
        for i, (p, r) in enumerate(rows)
    ]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def random_rows(count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Prompts of 3..8 and responses of 7..20 random tokens, each ended by the end-of-turn token."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()

    return [(tokens(3, 9), [*tokens(6, 20), EOS]) for _ in range(count)]
