"""Reading, checking and writing a drafter's folder: config.json, model.safetensors, README.md.

The folder is byte stable: loading and saving it again gives the same files (tensor names sorted, fixed metadata, JSON
with sorted keys).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal, nearest
from sglang_ext.models.families import target_shape
from sglang_ext.models.files import json_bytes, read_json_object, write_atomically
from sglang_ext.models.flexdraft.card import CardFields, render_card
from sglang_ext.models.flexdraft.config import CONFIG_KEY, FlexDraftConfig, origin_fields
from sglang_ext.models.vocabulary import vocabulary_digest

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DRAFT_TOKENS = "draft_token_ids"
CARD_FILE = "README.md"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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
    folder = _folder(path)
    raw = read_json_object(folder / CONFIG_FILE)
    return FlexDraftConfig.from_hf_dict(raw, str(folder / CONFIG_FILE)), raw


def load(path: str | Path, device: str | torch.device = "cpu") -> Checkpoint:
    """Read a drafter's folder, strictly: every tensor expected is there with its shape and type, and no other.

    Copies of target weights that published files carry are skipped unread.

    Raises:
        Refusal: naming the file, what is wrong with it and what to do.
    """
    folder = _folder(path)
    config, raw = load_config(folder)
    shapes = expected_shapes(config)
    files = _tensor_files(folder)
    _refuse_names(folder, files, shapes, config.num_layers)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        wanted = [name for name, where in files.items() if where == file and name in shapes]
        tensors.update(_read_tensors(file, wanted, shapes, str(device)))
    _refuse_dtypes(folder, tensors, _declared_dtype(raw, folder))
    _refuse_draft_tokens(folder, tensors, config)
    training, acceptance = origin_fields(raw, str(folder / CONFIG_FILE))
    fields = CardFields.from_json(training, acceptance, str(folder / CONFIG_FILE))
    return Checkpoint(config, dict(sorted(tensors.items())), raw, fields)


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
    folder = Path(path)
    fields = card_fields if card_fields is not None else CardFields()
    shapes = expected_shapes(config)
    names = dict.fromkeys(tensors, folder / WEIGHTS_FILE)
    _refuse_names(folder, names, shapes, skip_unused_below=0)
    for name, tensor in tensors.items():
        _refuse_shape(folder / WEIGHTS_FILE, name, tuple(tensor.shape), shapes[name])
    dtype = _refuse_dtypes(folder, tensors, declared=None)
    _refuse_draft_tokens(folder, tensors, config)
    raw = config.to_hf_dict(target_hf_config)
    raw["dtype"] = dtype
    if fields.training:
        raw[CONFIG_KEY]["training"] = dict(fields.training)
    if fields.acceptance:
        raw[CONFIG_KEY]["acceptance"] = [row.to_json() for row in fields.acceptance]
    on_cpu = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    write_atomically(folder / WEIGHTS_FILE, safetensors.torch.save(on_cpu, metadata={"format": "pt"}))
    write_atomically(folder / CONFIG_FILE, json_bytes(raw))
    size = sum(tensor.numel() * tensor.element_size() for tensor in on_cpu.values())
    card = render_card(config, fields, parameters=sum(tensor.numel() for tensor in on_cpu.values()), size_bytes=size)
    write_atomically(folder / CARD_FILE, card.encode("utf-8"))
    return folder


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
    hint = "`sglang-ext inspect DIR` shows what one was trained for"
    fix = f"{flag} must name a drafter trained for this target ({hint})"
    for name, label in _LABELS.items():
        drafter_value, target_value = ours[name], theirs[name]
        if drafter_value != target_value:
            raise Refusal(f"the drafter's {label} is {drafter_value}", f"the target's is {target_value}", fix)
    if config.vocabulary_digest is None or target_dir is None or not (Path(target_dir) / "tokenizer.json").exists():
        return
    digest = vocabulary_digest(target_dir)
    if digest != config.vocabulary_digest:
        raise Refusal(
            f"the drafter's vocabulary digest is {config.vocabulary_digest[:12]}...",
            f"the target's tokenizer gives {digest[:12]}...",
            fix,
        )


def _folder(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise Refusal(
            f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist",
            "a drafter is a folder with config.json and model.safetensors",
            "check the name, or download the drafter first",
        )
    return folder


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor: one model.safetensors, or the shards that the index names."""
    index = folder / INDEX_FILE
    single = folder / WEIGHTS_FILE
    if not index.exists():
        if not single.exists():
            raise Refusal(
                f"{single} does not exist",
                f"a drafter has {WEIGHTS_FILE} or {INDEX_FILE} with its shards",
                "download the drafter again",
            )
        return dict.fromkeys(_names_in(single), single)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise Refusal(f"{index} has no weight_map", "it maps tensor names to files", "download the drafter again")
    files: dict[str, Path] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise Refusal(f"{index} names the file {file!r}", "shards lie beside the index", "download it again")
        for name in _names_in(folder / file):
            if weight_map.get(name) != file:
                raise Refusal(
                    f"{folder / file} holds {name!r}, which {index.name} places in {weight_map.get(name)!r}",
                    "index and shards must agree",
                    "download the drafter again",
                )
            files[name] = folder / file
    absent = sorted(set(weight_map) - set(files))
    if absent:
        raise Refusal(
            f"{folder / weight_map[absent[0]]} lacks {absent[0]!r}",
            f"{index.name} places it there",
            "download the drafter again",
        )
    return files


def _names_in(file: Path) -> list[str]:
    try:
        with safetensors.safe_open(str(file), framework="pt") as archive:
            return list(archive.keys())
    except (safetensors.SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


def _read_tensors(
    file: Path, names: list[str], shapes: Mapping[str, tuple[int, ...]], device: str
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    try:
        with safetensors.safe_open(str(file), framework="pt", device=device) as archive:
            for name in names:
                _refuse_shape(file, name, tuple(archive.get_slice(name).get_shape()), shapes[name])
                tensors[name] = archive.get_tensor(name)
    except (safetensors.SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error
    return tensors


def _unreadable(file: Path, error: Exception) -> Refusal:
    if not file.exists():
        return Refusal(f"{file} does not exist", f"{INDEX_FILE} names it", "download the drafter again")
    return Refusal(
        f"{file} ({file.stat().st_size:,} bytes) is not a whole safetensors file ({error})",
        "a complete download is needed",
        "delete the file and download or export it again",
    )


def _refuse_names(
    folder: Path, found: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], skip_unused_below: int
) -> None:
    """Refuse the first tensor that is unknown or missing, but skip unused copies of layers < ``skip_unused_below``."""
    missing = sorted(set(shapes) - set(found))
    for name in sorted(set(found) - set(shapes)):
        match = _UNUSED.fullmatch(name)
        if match and skip_unused_below and int(match.group(1) or 0) < skip_unused_below:
            continue
        raise Refusal(
            f"{found[name]} has unknown tensor {name!r}{nearest(name, missing or shapes)}",
            f"this config.json asks for {len(shapes)} tensors and no other",
            f"export the drafter again or correct {folder / CONFIG_FILE}",
        )
    if missing:
        raise Refusal(
            f"{folder} lacks tensor {missing[0]!r} of shape {list(shapes[missing[0]])} ({len(missing)} missing)",
            f"this config.json asks for {len(shapes)} tensors",
            "download or export the drafter again",
        )


def _refuse_shape(file: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise Refusal(
            f"{file} has {name!r} of shape {list(found)}",
            f"config.json asks for {list(expected)}",
            "use the config.json that belongs to these weights",
        )


def _declared_dtype(raw: Mapping[str, Any], folder: Path) -> str | None:
    declared = raw.get("dtype", raw.get("torch_dtype"))
    if declared is None:
        return None
    if not isinstance(declared, str) or declared not in DTYPES:
        raise Refusal(
            f"{folder / CONFIG_FILE} has dtype {declared!r}", f"it is one of {', '.join(DTYPES)}", "correct config.json"
        )
    return declared


def _refuse_dtypes(folder: Path, tensors: Mapping[str, Tensor], declared: str | None) -> str:
    """Return the one type of all tensors; it must be the declared one where config.json names it."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    expected = declared
    for name in sorted(set(tensors) - {DRAFT_TOKENS}):
        found = names.get(tensors[name].dtype, str(tensors[name].dtype).removeprefix("torch."))
        if found not in DTYPES or found != (expected or found):
            allowed = f"config.json says {declared}" if declared else f"all tensors share one of {', '.join(DTYPES)}"
            raise Refusal(f"{folder} has {name!r} of type {found}", allowed, "convert the drafter to one type")
        expected = found
    return str(expected)


def _refuse_draft_tokens(folder: Path, tensors: Mapping[str, Tensor], config: FlexDraftConfig) -> None:
    """The list of draft tokens holds increasing int32 ids of the vocabulary."""
    if config.draft_vocab_size is None:
        return
    ids = tensors[DRAFT_TOKENS]
    increasing = ids.dtype == torch.int32 and bool((ids[1:] > ids[:-1]).all())
    if not increasing or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise Refusal(
            f"{folder} has a {DRAFT_TOKENS!r} that is not a list of tokens",
            f"increasing int32 ids from 0 to {config.vocab_size - 1} are allowed",
            "export the drafter again",
        )
