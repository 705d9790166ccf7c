"""Everything resolved at start-up, in one frozen object: printed once, served back by ``/server_info``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.core.config import OPTIONS_FLAG, SpecOptions, load_options
from sglang_ext.core.refusal import Refusal
from sglang_ext.core.schedule import Mode
from sglang_ext.models.files import read_json_object
from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.flexdraft.config import FlexDraftConfig
from sglang_ext.models.shipped import find_shipped
from sglang_ext.models.tapped import checkpoint as tapped
from sglang_ext.models.tapped.config import TappedConfig

DRAFTER_FLAG = "--speculative-draft-model-path"
BLOCK_FLAG = "--speculative-num-draft-tokens"
SCRIPTED_BLOCK = 8
DFLARE_TARGETS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM")
"""Architectures whose layers can be tapped while the host serves them."""

_KINDS = {"flexdraft": "FlexDraft", "dflare": "DFlare or DFlash"}


@dataclass(frozen=True)
class SpecPlan:
    """The resolved start-up decision of one server.

    Attributes:
        algorithm: ``FLEXDRAFT``, ``DFLARE`` (DFlare and DFlash drafters) or ``SCRIPTED``.
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
    if algorithm == "DFLARE":
        return _dflare_plan(model_path, drafter_path, block_size, spec_options)
    folder = _drafter_folder(model_path, drafter_path, "flexdraft")
    config, _ = checkpoint.load_config(folder)
    _check_target(config, model_path)
    return SpecPlan(algorithm, str(folder), _block_size(config, block_size, folder), spec_options)


def _dflare_plan(model_path: str, drafter_path: str | None, block_size: int | None, options: SpecOptions) -> SpecPlan:
    """Resolve the plan of a DFlare or DFlash drafter; which of the two it is, its tensors decide."""
    if options.mode == Mode.PARALLEL.value:
        raise Refusal(
            f"{OPTIONS_FLAG}: mode is {options.mode!r} together with --speculative-algorithm dflare",
            "a drafter with layers of its own never joins the target's pass: auto, sequential and plain are allowed",
            'set "mode" to "sequential", or leave it out',
        )
    folder = _drafter_folder(model_path, drafter_path, "dflare")
    config, _ = tapped.load_config(folder)
    check_taps(config)
    target_config = Path(model_path) / "config.json"
    if target_config.is_file():  # a hub target is resolved by the host; the worker checks it once it is loaded
        raw = read_json_object(target_config)
        check_tapped_target((raw.get("architectures") or [None])[0])
        tapped.validate_against_target(config, raw, Path(model_path), DRAFTER_FLAG)
    return SpecPlan("DFLARE", str(folder), _block_size(config, block_size, folder), options)


def check_taps(config: TappedConfig) -> None:
    """Refuse taps that the host cannot hand out: it gives what enters a layer, and nothing follows the last one."""
    last = config.num_target_layers - 2
    if config.target_layer_ids[-1] > last:
        raise Refusal(
            f"the drafter taps target layers {list(config.target_layer_ids)}",
            f"0 to {last} can be tapped while serving a target of {config.num_target_layers} layers",
            f"{DRAFTER_FLAG} must name a drafter that does not tap the last layer",
        )


def check_tapped_target(architecture: str | None) -> None:
    """Refuse a target whose layers cannot be tapped."""
    if architecture not in DFLARE_TARGETS:
        raise Refusal(
            f"the target's architecture is {architecture}",
            f"--speculative-algorithm dflare supports {', '.join(DFLARE_TARGETS)}",
            "serve a supported target or drop the flag",
        )


def locate_drafter(name: str) -> Path:
    """Return the folder of the drafter that ``--speculative-draft-model-path`` names, downloaded if it is a hub id.

    Raises:
        Refusal: there is no such folder or hub repository.
    """
    folder = Path(name)
    return folder if folder.is_dir() else _hub_folder(name)


def _drafter_folder(model_path: str, drafter_path: str | None, method: str) -> Path:
    if drafter_path is not None:
        return locate_drafter(drafter_path)
    shipped = find_shipped(Path(model_path), method=method) if Path(model_path).is_dir() else None
    if shipped is None:
        raise Refusal(
            f"no drafter was given and none is shipped for the target {model_path}",
            f"{DRAFTER_FLAG} must name a {_KINDS[method]} checkpoint trained for this target",
            f"train one with `sglang-ext train {method}`, or serve the target that `sglang-ext prepare` builds",
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


def _block_size(config: FlexDraftConfig | TappedConfig, asked: int | None, folder: Path) -> int:
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
