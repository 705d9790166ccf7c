"""Everything resolved at start-up, in one frozen object: printed once, served back by ``/server_info``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.core.config import SpecOptions, load_options
from sglang_ext.core.refusal import Refusal
from sglang_ext.models.files import read_json_object
from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.flexdraft.config import FlexDraftConfig
from sglang_ext.models.shipped import find_shipped

DRAFTER_FLAG = "--speculative-draft-model-path"
BLOCK_FLAG = "--speculative-num-draft-tokens"
SCRIPTED_BLOCK = 8


@dataclass(frozen=True)
class SpecPlan:
    """The resolved start-up decision of one server.

    Attributes:
        algorithm: ``FLEXDRAFT`` or ``SCRIPTED``.
        drafter_path: folder of the drafter checkpoint; ``None`` for scripted drafters.
        block_size: K, rows of one draft block; at most K - 1 drafts are verified per step.
        options: the user's options with defaults filled in.
    """

    algorithm: str
    drafter_path: str | None
    block_size: int
    options: SpecOptions

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return dataclasses.asdict(self)


def resolve_plan(
    algorithm: str,
    *,
    model_path: str,
    drafter_path: str | None,
    block_size: int | None,
    options: str | None,
) -> SpecPlan:
    """Resolve the flags into a :class:`SpecPlan`, reading only JSON (no weights).

    Raises:
        Refusal: missing or mismatched drafter, bad block size, bad options.
    """
    spec_options = load_options(options)
    if algorithm == "SCRIPTED":
        size = SCRIPTED_BLOCK if block_size is None else block_size
        if size < 2:
            raise Refusal(f"{BLOCK_FLAG} is {size}", "at least 2 is allowed", "leave the flag out for the default")
        return SpecPlan(algorithm, None, size, spec_options)
    folder = _drafter_folder(model_path, drafter_path)
    config, _ = checkpoint.load_config(folder)
    _check_target(config, model_path)
    return SpecPlan(algorithm, str(folder), _block_size(config, block_size, folder), spec_options)


def locate_drafter(name: str) -> Path:
    """Return the folder of the drafter that ``--speculative-draft-model-path`` names, downloaded if it is a hub id.

    Raises:
        Refusal: there is no such folder or hub repository.
    """
    folder = Path(name)
    return folder if folder.is_dir() else _hub_folder(name)


def _drafter_folder(model_path: str, drafter_path: str | None) -> Path:
    if drafter_path is not None:
        return locate_drafter(drafter_path)
    shipped = find_shipped(Path(model_path)) if Path(model_path).is_dir() else None
    if shipped is None:
        raise Refusal(
            f"no drafter was given and none is shipped for the target {model_path}",
            f"{DRAFTER_FLAG} must name a FlexDraft checkpoint trained for this target",
            "train one with `sglang-ext train flexdraft`, or serve the target that `sglang-ext prepare` builds",
        )
    return shipped


def _hub_folder(name: str) -> Path:
    from huggingface_hub import snapshot_download

    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise Refusal(
            f"{DRAFTER_FLAG} {name!r} is not a folder",
            "a local folder or a hub id (owner/name) is allowed",
            "correct the path",
        )
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub client raises many unrelated types; all mean the same to the user
        raise Refusal(
            f"{DRAFTER_FLAG} {name!r} is no local folder and could not be downloaded ({type(error).__name__}: {error})",
            "a local folder or a reachable hub id is allowed",
            "check the name, the network, or download it first and pass the folder",
        ) from error


def _check_target(config: FlexDraftConfig, model_path: str) -> None:
    target_config = Path(model_path) / "config.json"
    if target_config.is_file():  # a hub target is resolved by the host; the worker checks it once it is loaded
        checkpoint.validate_against_target(config, read_json_object(target_config), Path(model_path), DRAFTER_FLAG)


def _block_size(config: FlexDraftConfig, asked: int | None, folder: Path) -> int:
    if asked is None:
        return config.block_size
    if not 2 <= asked <= config.block_size:
        raise Refusal(
            f"{BLOCK_FLAG} is {asked}",
            f"2 to {config.block_size} is allowed (the block size that {folder} was trained with; "
            "a larger block predicts noise)",
            "lower the value or leave the flag out",
        )
    return asked
