"""The model card of a drafter over taps."""

from __future__ import annotations

from sglang_ext.models.card import CardFields, render, weight_rows
from sglang_ext.models.tapped.config import TappedConfig

PAPERS = {"dflare": "arXiv 2606.02091", "dflash": "arXiv 2602.06036"}


def render_card(config: TappedConfig, fields: CardFields, parameters: int, size_bytes: int) -> str:
    """Return the README.md of a drafter; the same arguments always give the same text."""
    name = config.target_name or "a target"
    sizes = [*_sizes(config), *weight_rows(config.draft_vocab_size, parameters, size_bytes)]
    return render(f"{config.TITLE} drafter for {name}", _usage(config), sizes, fields)


def _usage(config: TappedConfig) -> list[str]:
    return [
        f"A model of {config.num_layers} layers that drafts blocks of up to {config.block_size - 1} tokens from hidden",
        f"states of a frozen target, with the target's embedding and LM head ({PAPERS[config.METHOD]}).",
        "It works with the target it was trained for and with no other:",
        "",
        "```",
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm dflare \\",
        "    --speculative-draft-model-path THIS_FOLDER",
        "```",
    ]


def _sizes(config: TappedConfig) -> list[tuple[str, str]]:
    mask = "a learned embedding" if config.mask_token_id is None else f"token {config.mask_token_id}"
    heads = f"{config.num_attention_heads}, {config.num_key_value_heads}; {config.head_dim}"
    return [
        ("target", config.target_name or "not recorded"),
        ("target architecture", config.target_architecture or "not recorded"),
        ("target layers", str(config.num_target_layers)),
        ("hidden size, vocabulary", f"{config.hidden_size}, {config.vocab_size}"),
        ("vocabulary digest (sha256)", config.vocabulary_digest or "not recorded"),
        ("block size", str(config.block_size)),
        ("layers", str(config.num_layers)),
        ("heads (query, key/value) and head size", heads),
        ("feed-forward width", str(config.intermediate_size)),
        ("tapped target layers", ", ".join(map(str, config.target_layer_ids))),
        ("fusion of the taps", "one per drafter layer" if config.METHOD == "dflare" else "one for all drafter layers"),
        ("key/value projections of context", "separate" if config.separate_context_projections else "the block's"),
        ("masked slots", mask),
    ]
