"""Reading, checking and writing the folder of a drafter over taps; which method it is, its tensors decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.card import CardFields
from sglang_ext.models.dflare.config import FUSION_WEIGHTS, DFlareConfig
from sglang_ext.models.dflash.config import FUSION_MATRIX, DFlashConfig
from sglang_ext.models.files import read_json_object
from sglang_ext.models.tapped.card import render_card
from sglang_ext.models.tapped.config import CONFIG_KEY, TappedConfig, origin_fields
from sglang_ext.models.weights import (
    CONFIG_FILE,
    DRAFT_TOKENS,
    drafter_folder,
    fix_of,
    read_weights,
    refuse_other_tensors,
    refuse_other_vocabulary,
    tensor_files,
    write_folder,
)

#: The tensor that only files of one method have.
_TELLTALE: dict[str, type[TappedConfig]] = {FUSION_WEIGHTS: DFlareConfig, FUSION_MATRIX: DFlashConfig}
METHODS: dict[str, type[TappedConfig]] = {kind.METHOD: kind for kind in _TELLTALE.values()}


@dataclass(frozen=True)
class Checkpoint:
    """One drafter as it lies on disk: typed config, tensors by name, config.json as parsed, provenance for the card."""

    config: TappedConfig
    tensors: dict[str, Tensor]
    raw_config: dict[str, Any]
    card_fields: CardFields


def expected_shapes(config: TappedConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a drafter; shapes follow ``torch.nn.Linear``: ``[out, in]``."""
    hidden, width = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes.update(config.fusion_shapes())
    for i in range(config.num_layers):
        layer, attention = f"layers.{i}", f"layers.{i}.self_attn"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{attention}.q_proj.weight"] = (query, hidden)
        for name in ("k_proj", "v_proj"):
            shapes[f"{attention}.{name}.weight"] = (key, hidden)
            if config.separate_context_projections:
                shapes[f"{attention}.{name}_target.weight"] = (key, hidden)
        shapes[f"{attention}.o_proj.weight"] = (hidden, query)
        shapes[f"{attention}.q_norm.weight"] = shapes[f"{attention}.k_norm.weight"] = (config.head_dim,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}.mlp.{name}.weight"] = (width, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, width)
    if config.mask_token_id is None:
        shapes["mask_embedding"] = (hidden,)
    if config.draft_vocab_size is not None:
        shapes[DRAFT_TOKENS] = (config.draft_vocab_size,)
    return shapes


def method_of(names: Iterable[str]) -> type[TappedConfig] | None:
    """Return the method whose own tensor is among ``names``, or None if it is neither DFlare nor DFlash."""
    present = set(names)
    return next((kind for name, kind in _TELLTALE.items() if name in present), None)


def load_config(path: str | Path) -> tuple[TappedConfig, dict[str, Any]]:
    """Read and check ``config.json`` and the tensors' names and shapes; return it typed and as parsed.

    Raises:
        Refusal: if the folder or a file is missing or wrong, or the tensors are those of no known method.
    """
    folder = drafter_folder(path)
    files = tensor_files(folder)
    config, raw = _config(folder, files)
    refuse_other_tensors(folder, files, expected_shapes(config))
    return config, raw


def _config(folder: Path, files: Mapping[str, Path]) -> tuple[TappedConfig, dict[str, Any]]:
    kind = method_of(files)
    if kind is None:
        raise Refusal(
            f"{folder} has neither {' nor '.join(map(repr, _TELLTALE))} among its tensors",
            "a DFlare drafter has the first, a DFlash drafter the second",
            "name a folder that holds such a drafter",
        )
    raw = read_json_object(folder / CONFIG_FILE)
    return kind.from_hf_dict(raw, str(folder / CONFIG_FILE)), raw


def load(path: str | Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Read a drafter's folder, strictly: every tensor expected is there with its shape and type, and no other.

    Raises:
        Refusal: naming the file, what is wrong with it and what to do.
    """
    folder = drafter_folder(path)
    files = tensor_files(folder)
    config, raw = _config(folder, files)
    tensors = read_weights(folder, files, expected_shapes(config), raw, config.vocab_size, device)
    training, acceptance = origin_fields(raw, str(folder / CONFIG_FILE))
    fields = CardFields.from_json(training, acceptance, str(folder / CONFIG_FILE))
    return Checkpoint(config, tensors, raw, fields)


def save(
    path: str | Path, config: TappedConfig, tensors: Mapping[str, Tensor], card_fields: CardFields | None = None
) -> Path:
    """Write a drafter's folder in the released form and return it.

    Args:
        path: the folder, made if needed; each file appears whole or not at all.
        config: the drafter.
        tensors: exactly the names and shapes of :func:`expected_shapes`, all of one floating type but for the int32
            list of draft tokens.
        card_fields: provenance and measured acceptance; None says that neither is known.

    Raises:
        Refusal: on a missing, unknown or misshapen tensor, or when the folder cannot be written.
    """
    fields = card_fields if card_fields is not None else CardFields()

    def card(parameters: int, size_bytes: int) -> str:
        return render_card(config, fields, parameters, size_bytes)

    return write_folder(Path(path), expected_shapes(config), tensors, config.to_hf_dict(), CONFIG_KEY, fields, card)


def validate_against_target(
    config: TappedConfig,
    target_hf_config: Mapping[str, Any],
    target_dir: str | Path | None = None,
    flag: str = "--speculative-draft-model-path",
) -> None:
    """Check that a drafter was trained for this target, as far as the drafter records it.

    Args:
        config: the drafter.
        target_hf_config: the target's parsed config.json.
        target_dir: the target's folder; its vocabulary is compared token by token where both record one.
        flag: the option to name in the message.

    Raises:
        Refusal: with both values of the first number that differs.
    """
    compared: list[tuple[str, object, object]] = [
        (label, ours, target_hf_config.get(key))
        for label, ours, key in (
            ("vocabulary", config.vocab_size, "vocab_size"),
            ("hidden size", config.hidden_size, "hidden_size"),
            ("target layer count", config.num_target_layers, "num_hidden_layers"),
        )
    ]
    if config.target_architecture is not None:
        architecture = (target_hf_config.get("architectures") or [None])[0]
        compared.insert(0, ("target architecture", config.target_architecture, architecture))
    for label, ours, theirs in compared:
        if ours != theirs:
            raise Refusal(f"the drafter's {label} is {ours}", f"the target's is {theirs}", fix_of(flag))
    refuse_other_vocabulary(config.vocabulary_digest, target_dir, flag)
