"""What compiled, kept in one JSON file that later runs add to, and what an object holds."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = ("flashinfer-python", "torch", "triton", "sglang-flexdraft")
ROOT = Path(__file__).resolve().parents[2]
#: What names one row of the table.
KEY = ("arch", "variant", "kernel")


def first_line(command: list[str], marker: str = "") -> str | None:
    """Return the first line a command prints that has ``marker`` in it, or None where it cannot run."""
    try:
        printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return None
    lines = [line.strip() for line in printed.stdout.splitlines() if marker in line]
    return lines[0] if printed.returncode == 0 and lines else None


def revision() -> str | None:
    """Return the commit of this source tree, with ``+`` behind it if tracked files have changed."""
    commit = first_line(["git", "rev-parse", "--short=12", "HEAD"])
    changed = first_line(["git", "status", "--porcelain", "--untracked-files=no", "--", "scripts", "sglang_ext"])
    return None if commit is None else commit + ("+" if changed else "")


def describe(nvcc: Path | None) -> dict[str, Any]:
    """Return versions, revision and command line of this run."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    if nvcc is not None:
        versions["nvcc"] = first_line([str(nvcc), "--version"], "release")
    versions["gcc"] = first_line(["gcc", "--version"])
    return {
        "date": time.strftime("%Y-%m-%d"),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git": revision(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": versions,
    }


def architectures(binary: Path) -> list[str] | None:
    """Return the GPUs an object or cubin has code for, such as ``sm_90a``; None if nothing can list them."""
    tools = [shutil.which("cuobjdump")]
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        tools.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"))
    for tool in tools:
        if tool is not None and Path(tool).exists():
            listed = subprocess.run([tool, "--list-elf", str(binary)], capture_output=True, text=True).stdout
            return sorted({part for part in listed.replace("\n", ".").split(".") if part.startswith("sm_")})
    return None


class Results:
    """The table; every row is written at once, so that an interrupted run keeps what it has.

    Args:
        file: where the table is kept, or None to keep it in memory only.
        run: what this run is, from :func:`describe`.
        again: forget what the file already holds for a row that is asked for again.
    """

    def __init__(self, file: Path | None, run: dict[str, Any], again: bool = False) -> None:
        self._file, self._again = file, again
        kept = json.loads(file.read_text()) if file is not None and file.exists() else {"runs": [], "rows": []}
        self._runs, self.rows = [*kept["runs"], run], kept["rows"]
        self._kept = len(self.rows)

    def has(self, row: dict[str, Any]) -> bool:
        """Return whether an earlier run has compiled this row."""
        same = [old for old in self.rows[: self._kept] if all(old[key] == row[key] for key in KEY)]
        return not self._again and any(old["ok"] for old in same)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row in place of an older one of the same name."""
        others = [old for old in self.rows if any(old[key] != row[key] for key in KEY)]
        self._kept -= len(self.rows) - len(others)
        self.rows = [*others, row | {"run": len(self._runs) - 1}]
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            runs = json.dumps(self._runs, indent=1)
            lines = ",\n".join(json.dumps(line) for line in sorted(self.rows, key=lambda r: [r[key] for key in KEY]))
            self._file.write_text(f'{{"runs": {runs},\n"rows": [\n{lines}\n]}}\n')


class Progress:
    """Says what was done and about how long the rest will take."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._started = total, 0, time.monotonic()

    def say(self, text: str) -> None:
        """Count one more piece of work as done."""
        self._done += 1
        left = (time.monotonic() - self._started) / self._done * (self._total - self._done)
        print(f"[{self._done}/{self._total}, about {left / 60:.0f} min left] {text}", flush=True)
