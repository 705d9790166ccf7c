"""Reading, checking and writing a FlexDraft drafter's folder: config.json, model.safetensors, README.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.card import CardFields
from sglang_ext.models.families import target_shape
from sglang_ext.models.files import read_json_object
from sglang_ext.models.flexdraft.card import render_card
from sglang_ext.models.flexdraft.config import CONFIG_KEY, FlexDraftConfig, origin_fields
from sglang_ext.models.weights import (
    CONFIG_FILE,
    DRAFT_TOKENS,
    drafter_folder,
    fix_of,
    read_weights,
    refuse_other_vocabulary,
    tensor_files,
    write_folder,
)

#: Copies of target weights that published files carry and the method never reads; ``{i}`` < D is checked apart.
_UNUSED = re.compile(
    r"layers\.(\d+)\.(mlp\.(gate|up|down)_proj|input_layernorm|post_attention_layernorm)\.weight|norm\.weight"
)
#: What a drafter and its target must have in common, in the order it is checked, and how messages call it.
_LABELS = {
    "architecture": "target architecture",
    "vocab_size": "vocabulary",
    "hidden_size": "hidden size",
    "num_layers": "target layer count",
    "num_attention_heads": "number of attention heads",
    "num_key_value_heads": "number of key/value heads",
    "head_dim": "head size",
    "qk_norm": "use of query/key norms",
}


@dataclass(frozen=True)
class Checkpoint:
    """One drafter as it lies on disk: typed config, tensors by name, config.json as parsed, provenance for the card."""

    config: FlexDraftConfig
    tensors: dict[str, Tensor]
    raw_config: dict[str, Any]
    card_fields: CardFields


def expected_shapes(config: FlexDraftConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a drafter (FlexDraft sections 3.2 and 3.3).

    Shapes follow ``torch.nn.Linear``: ``[out, in]``. H hidden, V vocabulary, r calibrator rank.
    """
    hidden = config.hidden_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"mask_embedding": (hidden,)}
    for i in range(config.num_layers):
        attention = f"layers.{i}.self_attn"
        shapes[f"{attention}.q_proj.weight"] = (query, hidden)
        shapes[f"{attention}.k_proj.weight"] = (key, hidden)
        shapes[f"{attention}.v_proj.weight"] = (key, hidden)
        shapes[f"{attention}.o_proj.weight"] = (hidden, query)
        if config.qk_norm:
            shapes[f"{attention}.q_norm.weight"] = (config.head_dim,)
            shapes[f"{attention}.k_norm.weight"] = (config.head_dim,)
    if config.calibrator != "none":
        rank = config.calibrator_rank
        out = config.vocab_size if config.calibrator == "vocabulary" else hidden
        shapes["anchor_bias_mlp.0.weight"] = (rank, 2 * hidden)
        shapes["anchor_bias_mlp.0.bias"] = (rank,)
        shapes["anchor_bias_mlp.2.weight"] = (out, rank)
        shapes["anchor_bias_mlp.2.bias"] = (out,)
    if config.draft_vocab_size is not None:
        shapes[DRAFT_TOKENS] = (config.draft_vocab_size,)
    return shapes


def load_config(path: str | Path) -> tuple[FlexDraftConfig, dict[str, Any]]:
    """Read and check only ``config.json``; return it typed and as parsed.

    Raises:
        Refusal: if the folder or the file is missing or wrong.
    """
    folder = drafter_folder(path)
    raw = read_json_object(folder / CONFIG_FILE)
    return FlexDraftConfig.from_hf_dict(raw, str(folder / CONFIG_FILE)), raw


def load(path: str | Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Read a drafter's folder, strictly: every tensor expected is there with its shape and type, and no other.

    Copies of target weights that published files carry are skipped unread.

    Raises:
        Refusal: naming the file, what is wrong with it and what to do.
    """
    folder = drafter_folder(path)
    config, raw = load_config(folder)

    def unused(name: str) -> bool:
        match = _UNUSED.fullmatch(name)
        return match is not None and int(match.group(1) or 0) < config.num_layers

    files, shapes = tensor_files(folder), expected_shapes(config)
    tensors = read_weights(folder, files, shapes, raw, config.vocab_size, device, unused)
    training, acceptance = origin_fields(raw, str(folder / CONFIG_FILE))
    fields = CardFields.from_json(training, acceptance, str(folder / CONFIG_FILE))
    return Checkpoint(config, tensors, raw, fields)


def save(
    path: str | Path,
    config: FlexDraftConfig,
    tensors: Mapping[str, Tensor],
    target_hf_config: Mapping[str, Any],
    card_fields: CardFields | None = None,
) -> Path:
    """Write a drafter's folder and return it.

    Args:
        path: the folder, made if needed; each file appears whole or not at all.
        config: the drafter.
        tensors: exactly the names and shapes of :func:`expected_shapes`, all of one floating type but for the int32
            list of draft tokens.
        target_hf_config: the target's parsed config.json (or a drafter's, on re-export).
        card_fields: provenance and measured acceptance; None says that neither is known.

    Raises:
        Refusal: on a missing, unknown or misshapen tensor, or when the folder cannot be written.
    """
    fields = card_fields if card_fields is not None else CardFields()
    raw = config.to_hf_dict(target_hf_config)

    def card(parameters: int, size_bytes: int) -> str:
        return render_card(config, fields, parameters, size_bytes)

    return write_folder(Path(path), expected_shapes(config), tensors, raw, CONFIG_KEY, fields, card)


def validate_against_target(
    config: FlexDraftConfig,
    target_hf_config: Mapping[str, Any],
    target_dir: str | Path | None = None,
    flag: str = "--speculative-draft-model-path",
) -> None:
    """Check that a drafter was trained for this target.

    Args:
        config: the drafter.
        target_hf_config: the target's parsed config.json.
        target_dir: the target's folder; its vocabulary is compared token by token where both record one.
        flag: the option to name in the message.

    Raises:
        Refusal: with both values of the first number that differs.
    """
    ours = asdict(config.target_shape)
    theirs = asdict(target_shape(target_hf_config, "the target's config.json"))
    for name, label in _LABELS.items():
        drafter_value, target_value = ours[name], theirs[name]
        if drafter_value != target_value:
            raise Refusal(f"the drafter's {label} is {drafter_value}", f"the target's is {target_value}", fix_of(flag))
    refuse_other_vocabulary(config.vocabulary_digest, target_dir, flag)
