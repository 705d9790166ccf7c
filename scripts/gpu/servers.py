"""Servers in processes of their own: one that dies, or hangs, takes nothing with it but its own answers.

    python servers.py JOB.json ANSWERS.jsonl

SGLang ends the process that started a server when the server fails, so none is started from a part's own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PIDS = "servers.pid"
"""File with the process groups that have been started, one a line; whoever cuts a part short ends them."""


@dataclass(frozen=True)
class Ask:
    """One batch of requests.

    Attributes:
        name: in results.
        prompts: token ids of each.
        tokens: to decode after each.
        options: the requests' own, of drafting; None: the server's.
        logprobs: return those of the two likeliest tokens at every place.
    """

    name: str
    prompts: list[list[int]]
    tokens: int
    options: dict[str, Any] | None = None
    logprobs: bool = False


@dataclass(frozen=True)
class Job:
    """A server's arguments, and what to ask of it."""

    args: dict[str, Any]
    asks: list[Ask]


@dataclass
class Outcome:
    """What a server gave before it ended.

    Attributes:
        start: seconds it took to start and memory in use then; empty if it never started.
        answers: those of each ask, in the order asked; some are missing if it ended early.
        error: why it ended early.
    """

    start: dict[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def memory_gb() -> float | None:
    """Return the device's memory in use, of all processes; None without a driver's tool to ask."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    run = subprocess.run(command, capture_output=True, text=True)
    lines = run.stdout.split()
    return round(float(lines[0]) * 2**20 / 1e9, 2) if run.returncode == 0 and lines else None


def serve(job: dict[str, Any], answers: Path) -> None:
    """Start the server, ask, and write a line for each answer."""
    from engines import Engine

    with answers.open("w") as file, Engine(job["args"]) as engine:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        write({"start_seconds": engine.start_seconds, "memory_gb": memory_gb()})
        for ask in job["asks"]:
            started = time.perf_counter()
            found = engine.generate(ask["prompts"], ask["tokens"], ask["options"], logprobs=ask["logprobs"])
            seconds = time.perf_counter() - started
            kept = ("output_top_logprobs", "spec_verify_ct", "spec_accept_length")
            write({
                "name": ask["name"],
                "seconds": seconds,
                "answers": [
                    {
                        "output_ids": one["output_ids"],
                        "meta_info": {key: one["meta_info"][key] for key in kept if key in one["meta_info"]},
                    }
                    for one in found
                ],
            })  # fmt: skip


def ask_one(name: str, job: Job, folder: Path, limit: float) -> Outcome:
    """Run one job in a process of its own for at most ``limit`` seconds."""
    stem = folder / f"server-{name.replace(' ', '-')}"
    job_file, answers, log = (stem.with_suffix(end) for end in (".json", ".jsonl", ".log"))
    job_file.write_text(json.dumps(asdict(job)))
    answers.write_text("")
    command = [sys.executable, str(Path(__file__).resolve()), str(job_file), str(answers)]
    error = None
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        with (folder / PIDS).open("a") as pids:
            pids.write(f"{process.pid}\n")
        try:
            status = process.wait(limit)
            if status:
                error = f"exit {status}: {last_error(log)}"
        except subprocess.TimeoutExpired:
            error = f"cut after {limit:.0f} s"
        finally:
            end_group(process.pid)
            process.wait()
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    return Outcome(lines[0] if lines else {}, lines[1:], error)


def ask_all(jobs: dict[str, Job], folder: Path, *, at_once: int, limit: float) -> dict[str, Outcome]:
    """Run jobs, ``at_once`` of them side by side, each for at most ``limit`` seconds."""
    with ThreadPoolExecutor(at_once) as pool:
        waiting = {name: pool.submit(ask_one, name, job, folder, limit) for name, job in jobs.items()}
        return {name: future.result() for name, future in waiting.items()}


def end_group(group: int) -> None:
    """End every process of a group, if any are left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_all(folder: Path) -> None:
    """End every server that was started with this folder."""
    pids = folder / PIDS
    if pids.exists():
        for line in pids.read_text().splitlines():
            end_group(int(line))
        pids.unlink()


def last_error(log: Path) -> str:
    """Return the last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "Refusal" in line or "Exception" in line]
    return ([*lines[-1:], *named] or ["nothing was printed"])[-1][:300]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    serve(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
