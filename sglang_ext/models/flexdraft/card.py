"""The model card of a FlexDraft drafter."""

from __future__ import annotations

from sglang_ext.models.card import CardFields, render, weight_rows
from sglang_ext.models.flexdraft.config import FlexDraftConfig


def render_card(config: FlexDraftConfig, fields: CardFields, parameters: int, size_bytes: int) -> str:
    """Return the README.md of a drafter; the same arguments always give the same text."""
    name = config.target_name or f"a {config.target_architecture} target"
    sizes = [*_sizes(config), *weight_rows(config.draft_vocab_size, parameters, size_bytes)]
    return render(f"FlexDraft drafter for {name}", _usage(config), sizes, fields)


def _usage(config: FlexDraftConfig) -> list[str]:
    return [
        "Attention projections, a mask embedding and an anchor calibrator that let a frozen target draft blocks of",
        f"up to {config.block_size - 1} tokens inside its own last {config.num_layers} layers (arXiv 2605.20022).",
        "It works with the target it was trained for and with no other:",
        "",
        "```",
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm flexdraft \\",
        "    --speculative-draft-model-path THIS_FOLDER",
        "```",
    ]


def _sizes(config: FlexDraftConfig) -> list[tuple[str, str]]:
    ids = config.target_layer_ids
    calibrator = "none" if config.calibrator == "none" else f"{config.calibrator} form, rank {config.calibrator_rank}"
    return [
        ("target", config.target_name or "not recorded"),
        ("target architecture", config.target_architecture),
        ("target layers, hidden size, vocabulary", _triple(config)),
        ("heads (query, key/value) and head size", _heads(config)),
        ("vocabulary digest (sha256)", config.vocabulary_digest or "not recorded"),
        ("block size", str(config.block_size)),
        ("layers with mask rows", f"{ids[0]} to {ids[-1]}"),
        ("calibrator", calibrator),
    ]


def _triple(config: FlexDraftConfig) -> str:
    return f"{config.num_target_layers}, {config.hidden_size}, {config.vocab_size}"


def _heads(config: FlexDraftConfig) -> str:
    norm = ", with query/key norms" if config.qk_norm else ""
    return f"{config.num_attention_heads}, {config.num_key_value_heads}; {config.head_dim}{norm}"
