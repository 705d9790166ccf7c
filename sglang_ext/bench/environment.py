"""What a measurement ran on: versions, hardware, source revision, and whether anything else was running."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("sglang-flexdraft", "sglang", "torch", "transformers")
BUSY_SHARE = 0.25


def describe() -> dict[str, Any]:
    """Return versions, hardware and load as plain JSON types."""
    return {
        "argv": sys.argv,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git": _git(),
        "hardware": {
            "cpu": cpu_model(),
            "cores": psutil.cpu_count(logical=False),
            "logical_cpus": psutil.cpu_count(),
            "usable_cpus": len(os.sched_getaffinity(0)),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpus": _gpus(),
        },
        "load_average": list(os.getloadavg()),
    }


def warn_if_busy(seconds: float = 1.0) -> float:
    """Return the share of CPU time other processes use now, after a warning on stderr if timings would suffer."""
    busy = psutil.cpu_percent(interval=seconds) / 100.0
    if busy > BUSY_SHARE:
        print(
            f"warning: other processes use {busy:.0%} of this machine's CPU time; the speeds below will be off",
            file=sys.stderr,
        )
    return busy


def summary(environment: dict[str, Any]) -> str:
    """Return one line for the head of a report."""
    hardware, versions = environment["hardware"], environment["versions"]
    threads = hardware["omp_num_threads"] or "default"
    parts = [
        ", ".join(hardware["gpus"]) or f"{hardware['cpu']}, {hardware['usable_cpus']} CPUs, OMP_NUM_THREADS {threads}",
        *(f"{name} {number}" for name, number in versions.items() if number),
    ]
    if environment["git"]:
        parts.append(f"revision {environment['git']}")
    return "; ".join(parts)


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name as the kernel reports it."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> str | None:
    """Short commit id of the source tree this package is imported from, with ``+`` if it has local changes."""
    folder = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(folder), "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
