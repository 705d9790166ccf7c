"""Command line of this room: ``ablate``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from sglang_ext.core.refusal import Refusal

REPORT, PICTURE = "ablation.md", "ablation.png"


def add_parsers(subparsers: Any) -> None:
    """Register the command; it sets ``run``, which takes the parsed arguments and returns an exit code."""
    from sglang_ext.ablation.arms import STUDIES

    parser = subparsers.add_parser(
        "ablate",
        help="train variants of a drafter for the same number of blocks and compare them",
        description="Every arm of every study is trained from the same rows for the same number of steps and measured "
        "on held-out responses. Started again, the command continues: finished arms are found, an interrupted one is "
        "resumed. The report is written after every arm.",
    )
    parser.add_argument("--target", required=True, help="folder of the target model")
    parser.add_argument("--data", nargs="+", required=True, help="files written by `sglang-ext regenerate`")
    parser.add_argument("--held-out", nargs="+", required=True, help="such files for measuring")
    parser.add_argument("--out", required=True, help="folder for runs, report and picture")
    parser.add_argument(
        "--study", nargs="+", default=["all"], metavar="NAME", help=f"all, or some of: {', '.join(STUDIES)}"
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of every arm (default 300)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="training option of all arms that have it and do not set it themselves",
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long; 0: when all arms are done")
    parser.add_argument("--limit", type=int, default=0, help="at most this many held-out responses per domain")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: the library's default")
    parser.add_argument("--dry-run", action="store_true", help="list the arms and stop")
    parser.set_defaults(run=_ablate)


def _ablate(arguments: argparse.Namespace) -> int:
    from sglang_ext.ablation.arms import chosen_studies, parse_settings, refuse_settings

    studies, settings = chosen_studies(arguments.study), parse_settings(arguments.set)
    refuse_settings(settings, studies)
    for flag, value, least in (
        ("steps", arguments.steps, 1),
        ("limit", arguments.limit, 0),
        ("threads", arguments.threads, 0),
    ):
        if value < least:
            raise Refusal(f"--{flag} {value}", f"at least {least}", "leave the flag out for the default")
    if arguments.dry_run:
        for name, arms in studies.items():
            print(f"{name}: {', '.join(arm.label for arm in arms)}")
        trainings = {arm.training_key(settings) for arms in studies.values() for arm in arms}
        print(f"{len(trainings)} trainings of {arguments.steps} steps")
        return 0
    from sglang_ext.ablation.runner import Runner

    if arguments.threads:
        import torch

        torch.set_num_threads(arguments.threads)
    out = _out_folder(arguments.out)
    common = {"threads": arguments.threads, **settings}
    runner = Runner(arguments.target, arguments.data, arguments.held_out, out, arguments.steps, common, arguments.limit)
    # Now, not after the hours that the arms before it take.
    runner.check([arm for arms in studies.values() for arm in arms])
    deadline = time.time() + 60 * arguments.minutes if arguments.minutes else float("inf")
    return _run(runner, studies, out, deadline)


def _out_folder(given: str) -> Path:
    out = Path(given)
    try:
        out.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(out, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise Refusal(f"--out {given} cannot be written ({reason})", "a writable folder", "name another")
    return out


def _run(runner: Any, studies: Any, out: Path, deadline: float) -> int:
    from sglang_ext.ablation import report
    from sglang_ext.bench.plot import is_available
    from sglang_ext.models.files import write_atomically

    found: dict[str, list[Any]] = {name: [] for name in studies}
    left: dict[str, list[str]] = {name: [] for name in studies}
    for name, arms in studies.items():
        for arm in arms:
            measured = runner.run(arm, deadline)
            if measured is None:
                left[name].append(arm.label)
                continue
            found[name].append(measured)
            text = report.render(found, left, "Ablations")
            write_atomically(out / REPORT, text.encode())
            print(f"{name}: {arm.label} done", file=sys.stderr, flush=True)
    print(report.render(found, left, "Ablations"))
    if is_available() and any(found.values()):
        try:
            report.draw(out / PICTURE, found)
        except OSError as error:
            raise Refusal(
                f"{out / PICTURE} cannot be written ({error.strerror})",
                "a writable file",
                "remove what is in its place",
            ) from error
        print(f"{out / PICTURE}", file=sys.stderr)
    return 0 if not any(left.values()) else 3
