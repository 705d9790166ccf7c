"""Checks everything that only a GPU can tell, in one run of about ten minutes.

    python scripts/gpu/check.py --out results          # on a machine with a GPU
    python scripts/gpu/check.py --out results --dry-run  # small cases on a CPU: imports, plans, arguments

Parts run in this order, each in a process of its own with a time limit; a part that fails or is cut short does not stop
the others. Each writes one line of JSON per result, the whole is in results.json and as a table on the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: Part -> seconds it may take, in the order they run.
PARTS = {"environment": 60, "kernels": 120, "graphs": 100, "pieces": 60, "engine": 170, "steps": 260}
"""With kernels compiled before; the first run on a machine compiles them (``--slack``)."""
DRY_SLACK = 5
"""A dry run may be on a slow or busy machine."""
PACKAGES = ("torch", "triton", "sglang", "flashinfer-python", "sglang-kernel", "transformers", "sglang-flexdraft")


def environment(rows: Any, dry: bool) -> None:
    """Note versions and the device."""
    import torch

    for name in PACKAGES:
        try:
            rows.add(package=name, version=version(name))
        except PackageNotFoundError:
            rows.add(package=name, version=None)
    device = "none" if dry else torch.cuda.get_device_name()
    capability = None if dry else list(torch.cuda.get_device_capability())
    rows.add(python=platform.python_version(), device=device, capability=capability, cuda=torch.version.cuda)


def run_part(part: str, out: Path, dry: bool) -> int:
    """Run one part in this process; return the exit status."""
    # The folder above is the project's, or the top of a bundle.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from setting import Rows, Setting

    setting = Setting(dry, out)
    rows = Rows(setting, part)
    if part == "environment":
        environment(rows, dry)
    else:
        importlib.import_module(f"part_{part}").run(setting, rows)
    return 0 if rows.ok else 1


def supervise(part: str, limit: float, out: Path, dry: bool) -> dict[str, Any]:
    """Run one part in a process of its own and say how it ended."""
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part, "--out", str(out)]
    if dry:
        command.append("--dry-run")
    # FlashInfer looks for ninja and nvcc on the path, which a venv that was not activated is not on.
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if dry and part == "pieces":
        environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    if not dry and "CUDA_HOME" not in environ and shutil.which("nvcc") is None:
        from compile_kernels import find_cuda

        environ["CUDA_HOME"] = str(find_cuda())
    started = time.perf_counter()
    with (out / f"{part}.log").open("w") as log:
        # A process group of its own: servers that a part has started end with it.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
        try:
            status = process.wait(limit)
            ended = {0: "ok", 1: "failed"}.get(status, f"exit {status}")
        except subprocess.TimeoutExpired:
            ended = f"cut after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    results = out / f"{part}.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if ended == "failed" and all(row.get("ok", True) for row in rows):
        ended = "crashed"
    return {"part": part, "ended": ended, "seconds": round(time.perf_counter() - started, 1), "rows": rows}


def table(results: list[dict[str, Any]]) -> str:
    """One line per part, then one per failed result."""
    lines = [f"{'part':<12} {'ended':<16} {'seconds':>8} {'results':>8} {'failed':>7}"]
    failures = []
    for result in results:
        failed = [row for row in result["rows"] if not row.get("ok", True)]
        failures += [f"  {result['part']}: {json.dumps(row)}" for row in failed]
        lines.append(
            f"{result['part']:<12} {result['ended']:<16} {result['seconds']:>8} {len(result['rows']):>8} "
            f"{len(failed):>7}"
        )
    return "\n".join([*lines, *failures])


def main(arguments: list[str] | None = None) -> int:
    """Run the parts asked for; the exit status is 0 if all of them are ok."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="folder for results (default: %(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="small cases on a CPU instead of the GPU")
    parser.add_argument("--slack", type=float, default=1.0, help="multiply every part's time limit (default: 1)")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part:
        return run_part(args.part, args.out, args.dry_run)
    chosen = [part for part in PARTS if not args.only or part in args.only]
    slack = DRY_SLACK if args.dry_run else args.slack
    results = [supervise(part, PARTS[part] * slack, args.out, args.dry_run) for part in chosen]
    (args.out / "results.json").write_text(json.dumps(results, indent=1))
    print(table(results))
    return 0 if all(result["ended"] == "ok" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
