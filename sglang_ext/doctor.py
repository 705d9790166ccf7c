"""The checks behind ``sglang-ext doctor``: does this installation fit the installed SGLang and this machine."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from sglang_ext.core.refusal import Refusal

ENTRY_POINTS = (("sglang.srt.plugins", "sglang_ext"), ("sglang.srt.platforms", "sglang_ext_cpu"))


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    detail: str


def run_checks() -> list[Check]:
    """Run every check; a check that cannot be made is a failed one, with its reason."""
    return [check for function in _CHECKS for check in _guarded(function)]


def accelerator_name() -> str | None:
    """Return the name of the accelerator torch sees, or None."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else None


def _guarded(function: Callable[[], list[Check]]) -> list[Check]:
    name = function.__name__.strip("_").replace("_", " ")
    try:
        return function()
    except Refusal as refusal:
        return [Check(name, False, str(refusal))]
    except Exception as error:  # a broken installation can raise anything, and the report must still be printed
        return [Check(name, False, f"{type(error).__name__}: {error}")]


def _python() -> list[Check]:
    return [Check("python", True, platform.python_version())]


def _packages() -> list[Check]:
    checks = []
    for name in ("sglang", "torch", "transformers", "safetensors", "accelerate", "gguf"):
        try:
            checks.append(Check(name, True, version(name)))
        except PackageNotFoundError:
            checks.append(Check(name, False, "not installed: pip install sglang-flexdraft"))
    return checks


def _sglang_version() -> list[Check]:
    from sglang_ext.serving.host_symbols import SUPPORTED_VERSIONS, host_version

    found = host_version()
    return [
        Check("supported sglang", found in SUPPORTED_VERSIONS, f"{found}; supported: {', '.join(SUPPORTED_VERSIONS)}")
    ]


def _sglang_symbols() -> list[Check]:
    from sglang_ext.serving.host_symbols import SYMBOLS, check

    problems = check()
    if not problems:
        return [Check("sglang symbols", True, f"{len(SYMBOLS)} names are as expected")]
    return [Check("sglang symbols", False, str(problem)) for problem in problems]


def _entry_points() -> list[Check]:
    checks = []
    for group, name in ENTRY_POINTS:
        found = [entry for entry in entry_points(group=group) if entry.name == name]
        detail = found[0].value if found else "not installed: pip install sglang-flexdraft (or -e . in a checkout)"
        checks.append(Check(f"entry point {name}", bool(found), detail))
    return checks


def _device() -> list[Check]:
    from sglang_ext.plugin import activate_platform

    ours = activate_platform() is not None
    found = accelerator_name() or ("CPU (start servers with --device cpu)" if ours else "another platform package's")
    return [Check("device", True, f"{found}; {os.cpu_count()} CPU cores")]


def _default_target() -> list[Check]:
    from sglang_ext.models.shipped import find_shipped
    from sglang_ext.targets import default_target_dir

    target = default_target_dir()
    if not (target / "config.json").is_file():
        return [Check("default target", True, "not prepared yet: `sglang-ext prepare` builds it")]
    drafter = find_shipped(target)
    detail = str(drafter) if drafter else "none is shipped: servers need --speculative-draft-model-path"
    return [Check("default target", True, str(target)), Check("its drafter", True, detail)]


def _disk() -> list[Check]:
    from sglang_ext.targets import cache

    folder = cache.root()
    while not folder.exists():
        folder = folder.parent
    return [Check("cache", True, f"{cache.root()}, {shutil.disk_usage(folder).free / 1e9:.1f} GB free")]


_CHECKS = (_python, _packages, _sglang_version, _sglang_symbols, _entry_points, _device, _default_target, _disk)
