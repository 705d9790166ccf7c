"""Checking that a local folder holds a complete target of a supported family."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.families import TargetShape, target_shape
from sglang_ext.models.files import read_json_object

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def check(path: Path) -> TargetShape:
    """Return the target's sizes if ``path`` holds configuration, all weights and a tokenizer.

    Raises:
        Refusal: naming what is missing or unsupported.
    """
    shape = target_shape(read_json_object(path / "config.json"), str(path / "config.json"))
    for name in _weight_files(path):
        if not (path / name).is_file():
            raise Refusal(
                f"{path} lacks {name}", "a target's weights are safetensors files", "download the target again"
            )
        _refuse_truncated(path / name)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise Refusal(f"{path} has no tokenizer", f"one of {', '.join(TOKENIZER_FILES)} is needed", "copy it there")
    return shape


def _weight_files(path: Path) -> list[str]:
    if not (path / INDEX).is_file():
        return [WEIGHTS]
    weight_map = read_json_object(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Refusal(f"{path / INDEX} has no weight_map", "it maps tensors to files", "download the target again")
    return sorted({str(name) for name in weight_map.values()})


def _refuse_truncated(file: Path) -> None:
    """A safetensors file says in its header how long it is; opening it checks that, without reading the weights."""
    import safetensors

    try:
        with safetensors.safe_open(str(file), framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise Refusal(
            f"{file} ({file.stat().st_size:,} bytes) is not a whole safetensors file ({error})",
            "a complete download is needed",
            "delete the file and download the target again",
        ) from error
