"""A drafter's folder, whatever its method: strict reading of its tensors, byte-stable writing of its three files.

Loading and saving a folder again gives the same files (tensor names sorted, fixed metadata, JSON with sorted keys).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal, nearest
from sglang_ext.models.card import CardFields
from sglang_ext.models.files import json_bytes, read_json_object, write_atomically
from sglang_ext.models.vocabulary import vocabulary_digest

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CARD_FILE = "README.md"
#: The list of tokens a drafter proposes, where it does not propose the whole vocabulary.
DRAFT_TOKENS = "draft_token_ids"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_weights(
    folder: Path,
    files: Mapping[str, Path],
    shapes: Mapping[str, tuple[int, ...]],
    raw: Mapping[str, Any],
    vocab_size: int,
    device: str | torch.device = "cpu",
    unused: Callable[[str], bool] = lambda name: False,
) -> dict[str, Tensor]:
    """Read a drafter's tensors, strictly: every one expected is there with its shape and type, and no other.

    Args:
        folder: the drafter's folder.
        files: which file holds which tensor (:func:`tensor_files`).
        shapes: what config.json asks for.
        raw: config.json as parsed.
        vocab_size: V, the bound of a list of draft tokens.
        device: where the tensors go.
        unused: names that may be there and are skipped unread.

    Raises:
        Refusal: naming the file, what is wrong with it and what to do.
    """
    refuse_other_tensors(folder, files, shapes, unused)
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        wanted = [name for name, where in files.items() if where == file and name in shapes]
        tensors.update(_read_tensors(file, wanted, str(device)))
    _common_dtype(folder, tensors, _declared_dtype(raw, folder))
    _refuse_draft_tokens(folder, tensors, vocab_size)
    return dict(sorted(tensors.items()))


def refuse_other_tensors(
    folder: Path,
    files: Mapping[str, Path],
    shapes: Mapping[str, tuple[int, ...]],
    unused: Callable[[str], bool] = lambda name: False,
) -> None:
    """Compare the names and shapes of a drafter's tensors with what config.json asks for; no weights are read.

    Raises:
        Refusal: on the first that is unknown, missing or of another shape.
    """
    _refuse_names(folder, files, shapes, unused)
    for file in sorted(set(files.values())):
        try:
            with safetensors.safe_open(str(file), framework="pt") as archive:
                for name in (name for name, where in files.items() if where == file and name in shapes):
                    _refuse_shape(file, name, tuple(archive.get_slice(name).get_shape()), shapes[name])
        except (safetensors.SafetensorError, OSError) as error:
            raise _unreadable(file, error) from error


def write_folder(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    raw: dict[str, Any],
    method_key: str,
    fields: CardFields,
    card: Callable[[int, int], str],
) -> Path:
    """Write config.json, model.safetensors and README.md; each file appears whole or not at all.

    Args:
        folder: made if needed.
        shapes: exactly the tensors that must be given.
        tensors: all of one floating type but for the int32 list of draft tokens.
        raw: config.json but for the tensors' type, provenance and acceptance.
        method_key: the object of ``raw`` that carries those two.
        fields: provenance and measured acceptance.
        card: README.md from the number of parameters and of bytes.

    Raises:
        Refusal: on a missing, unknown or misshapen tensor, or when the folder cannot be written.
    """
    names = dict.fromkeys(tensors, folder / WEIGHTS_FILE)
    _refuse_names(folder, names, shapes, lambda name: False)
    for name, tensor in tensors.items():
        _refuse_shape(folder / WEIGHTS_FILE, name, tuple(tensor.shape), shapes[name])
    raw["dtype"] = _common_dtype(folder, tensors, declared=None)
    _refuse_draft_tokens(folder, tensors, raw["vocab_size"])
    if fields.training:
        raw[method_key]["training"] = dict(fields.training)
    if fields.acceptance:
        raw[method_key]["acceptance"] = [row.to_json() for row in fields.acceptance]
    on_cpu = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    write_atomically(folder / WEIGHTS_FILE, safetensors.torch.save(on_cpu, metadata={"format": "pt"}))
    write_atomically(folder / CONFIG_FILE, json_bytes(raw))
    count, size = (sum(values) for values in zip(*((t.numel(), t.nbytes) for t in on_cpu.values()), strict=True))
    write_atomically(folder / CARD_FILE, card(count, size).encode("utf-8"))
    return folder


def fix_of(flag: str) -> str:
    """How to repair a mismatch between drafter and target, ``flag`` being the option that named the drafter."""
    return (
        f"{flag} must name a drafter trained for this target (`sglang-ext inspect DIR` shows what one was trained for)"
    )


def refuse_other_vocabulary(digest: str | None, target_dir: str | Path | None, flag: str) -> None:
    """Compare a drafter's vocabulary with the target's, token by token, where both record one.

    Raises:
        Refusal: with both digests, if they differ.
    """
    if digest is None or target_dir is None or not (Path(target_dir) / "tokenizer.json").exists():
        return
    found = vocabulary_digest(target_dir)
    if found != digest:
        raise Refusal(
            f"the drafter's vocabulary digest is {digest[:12]}...",
            f"the target's tokenizer gives {found[:12]}...",
            fix_of(flag),
        )


def drafter_folder(path: str | Path) -> Path:
    """Return ``path`` as a folder that exists; raises Refusal if it is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise Refusal(
            f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist",
            "a drafter is a folder with config.json and model.safetensors",
            "check the name, or download the drafter first",
        )
    return folder


def tensor_files(folder: Path) -> dict[str, Path]:
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


def _read_tensors(file: Path, names: list[str], device: str) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(str(file), framework="pt", device=device) as archive:
            return {name: archive.get_tensor(name) for name in names}
    except (safetensors.SafetensorError, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> Refusal:
    if not file.exists():
        return Refusal(f"{file} does not exist", f"{INDEX_FILE} names it", "download the drafter again")
    return Refusal(
        f"{file} ({file.stat().st_size:,} bytes) is not a whole safetensors file ({error})",
        "a complete download is needed",
        "delete the file and download or export it again",
    )


def _refuse_names(
    folder: Path, found: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]], unused: Callable[[str], bool]
) -> None:
    """Refuse the first tensor that is unknown or missing; ``unused`` says which others may lie beside them."""
    missing = sorted(set(shapes) - set(found))
    for name in sorted(set(found) - set(shapes)):
        if unused(name):
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


def _common_dtype(folder: Path, tensors: Mapping[str, Tensor], declared: str | None) -> str:
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


def _refuse_draft_tokens(folder: Path, tensors: Mapping[str, Tensor], vocab_size: int) -> None:
    """The list of draft tokens holds increasing int32 ids of the vocabulary."""
    if DRAFT_TOKENS not in tensors:
        return
    ids = tensors[DRAFT_TOKENS]
    increasing = ids.dtype == torch.int32 and bool((ids[1:] > ids[:-1]).all())
    if not increasing or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise Refusal(
            f"{folder} has a {DRAFT_TOKENS!r} that is not a list of tokens",
            f"increasing int32 ids from 0 to {vocab_size - 1} are allowed",
            "export the drafter again",
        )
