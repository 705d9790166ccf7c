"""Command line of this room: ``regenerate``, ``train flexdraft``, ``evaluate`` and ``export``."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from sglang_ext.core.refusal import Refusal

#: Help of every ``train`` flag that is not self-evident; names are those of TrainConfig.
_TRAIN_HELP = {
    "target": "folder of the target model",
    "data": "files written by `sglang-ext regenerate`",
    "out": "folder of the run: checkpoint, log, status, exports; an interrupted run there is continued",
    "block_size": "slots per block, the bonus token's included",
    "num_layers": "target layers, counted from the last, that carry mask rows",
    "calibrator": "where the calibrator adds its output: hidden, vocabulary, or none",
    "calibrator_rank": "width of the calibrator's hidden layer",
    "optimizer": "adamw, or muon (per attention head, AdamW for the rest)",
    "lr": "learning rate of the attention projections",
    "lr_other": "learning rate of the mask embedding and the calibrator",
    "warmup": "share of the run with rising learning rate",
    "grad_clip": "largest norm of the gradient",
    "gamma": "slot j weighs exp(-(j-1)/gamma) in the loss",
    "blocks_per_step": "blocks per optimizer step",
    "anchors_per_sequence": "blocks taken from one response at a time",
    "frequent": "most frequent tokens that are always in the loss's softmax; 0: the whole vocabulary",
    "drawn": "random other tokens in the softmax, standing for the rest",
    "steps": "length of the run in steps; 0: use --stop-at or --minutes",
    "stop_at": "end of the run in seconds since the epoch; the schedule follows the clock",
    "workers": "processes that share each step's blocks",
    "threads": "compute threads per process; 0: the library's default",
    "seed": "seed of every random choice",
    "checkpoint_seconds": "time between checkpoints",
    "export_seconds": "time between exports of the current weights to OUT/export-latest",
    "held_out_percent": "share of the rows kept for measuring",
    "start_from": "folder of an exported drafter of the same sizes, to train its weights further",
}


def add_parsers(subparsers: Any) -> None:
    """Register the four commands; each sets ``run``, which takes the parsed arguments and returns an exit code."""
    _add_regenerate(subparsers)
    _add_train(subparsers)
    _add_evaluate(subparsers)
    _add_export(subparsers)


def _add_regenerate(subparsers: Any) -> None:
    parser = subparsers.add_parser("regenerate", help="let the target answer prompts: training data")
    parser.add_argument("--target", required=True, help="folder of the target model")
    parser.add_argument("--out", required=True, help="JSONL file; rows already there are kept and not answered again")
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="domain=NAME,path=FILE.jsonl,field=COLUMN (field=messages: chat turns)"
        "[,limit=N][,max_new_tokens=N][,exclude=COLUMN:FIRST-LAST][,strip=REGEX]; repeatable",
    )
    parser.add_argument(
        "--self-written", type=int, default=0, metavar="N", help="instructions the target writes itself"
    )
    parser.add_argument("--slots", type=int, default=96, help="responses generated at once")
    parser.add_argument("--capacity", type=int, default=640, help="longest prompt plus response, in tokens")
    parser.add_argument("--state-layers", type=int, default=0, help="also keep keys and values of the last N layers")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="answer only every N-th prompt, from the I-th")
    parser.add_argument("--threads", type=_count, default=0, help="compute threads; 0: the library's default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="print the bytes the run needs and stop")
    parser.set_defaults(run=_regenerate)


def _add_train(subparsers: Any) -> None:
    from sglang_ext.training.config import TrainConfig

    methods = subparsers.add_parser("train", help="train a drafter").add_subparsers(dest="method", required=True)
    parser = methods.add_parser("flexdraft", help="train a FlexDraft drafter for a Llama or Qwen3 target")
    parser.add_argument("--config", metavar="FILE.json", help="JSON object of these options; flags override it")
    for item in fields(TrainConfig):
        flag = f"--{item.name.replace('_', '-')}"
        shown = "" if item.default is MISSING else f" (default {item.default})"
        text = _TRAIN_HELP[item.name] + shown
        if item.name == "data":
            parser.add_argument(flag, nargs="+", default=argparse.SUPPRESS, help=text)
        else:
            kind = {"int": int, "float": float, "str": str}[str(item.type)]
            parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=text)
    parser.add_argument("--minutes", type=float, default=0.0, help="like --stop-at, counted from now")
    parser.add_argument("--dry-run", action="store_true", help="print the bytes the run needs and stop")
    parser.set_defaults(run=_train)


def _add_evaluate(subparsers: Any) -> None:
    parser = subparsers.add_parser("evaluate", help="accept length of a drafter on regenerated responses")
    parser.add_argument("--target", required=True, help="folder of the target model")
    parser.add_argument("--drafter", required=True, help="drafter folder, or the --out folder of a training run")
    parser.add_argument("--data", nargs="+", required=True, help="files written by `sglang-ext regenerate`")
    parser.add_argument("--held-out-percent", type=_count, default=100, help="measure on this held-out share only")
    parser.add_argument("--limit", type=_count, default=0, help="at most this many responses per domain; 0: all")
    parser.add_argument("--threads", type=_count, default=0, help="compute threads; 0: the library's default")
    parser.set_defaults(run=_evaluate)


def _add_export(subparsers: Any) -> None:
    parser = subparsers.add_parser("export", help="write a training run's weights as a drafter folder")
    parser.add_argument("--run", dest="run_folder", required=True, help="the --out folder of the run")
    parser.add_argument("--out", required=True, help="drafter folder to write")
    parser.add_argument("--target", help="folder of the target model (default: the one the run names)")
    parser.add_argument("--target-name", help="name of the target for the card")
    parser.add_argument(
        "--draft-vocabulary",
        type=_count,
        default=0,
        metavar="N",
        help="let the drafter propose only the N most frequent tokens of its training responses, which makes drafting "
        "faster; 0: every token",
    )
    parser.add_argument(
        "--acceptance", nargs="*", default=[], metavar="FILE", help="regenerated held-out files to measure for the card"
    )
    parser.add_argument("--limit", type=_count, default=0, help="at most this many responses per domain; 0: all")
    parser.add_argument("--threads", type=_count, default=0, help="compute threads; 0: the library's default")
    parser.set_defaults(run=_export)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least 0 is allowed")
    return int(text)


def _use_threads(count: int) -> None:
    import torch

    if count:
        torch.set_num_threads(count)


def _regenerate(arguments: argparse.Namespace) -> int:
    from sglang_ext.training.prompts import PromptSource
    from sglang_ext.training.regenerate import RegenerateConfig, regenerate

    _use_threads(arguments.threads)
    index, _, total = arguments.shard.partition("/")
    if not (index.isdigit() and total.isdigit() and int(index) < int(total)):
        raise Refusal(f"--shard {arguments.shard}", "I/N with I from 0 to N-1", "for example --shard 0/2")
    config = RegenerateConfig(
        target=arguments.target,
        out=arguments.out,
        sources=tuple(PromptSource.parse(text) for text in arguments.source),
        self_written=arguments.self_written,
        slots=arguments.slots,
        capacity=arguments.capacity,
        seed=arguments.seed,
        state_layers=arguments.state_layers,
        shard=int(index),
        shards=int(total),
    )
    count = regenerate(config, arguments.dry_run)
    if not arguments.dry_run:
        print(f"{arguments.out}: {count} responses")
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from sglang_ext.training.config import TrainConfig
    from sglang_ext.training.export import PeriodicExport
    from sglang_ext.training.train import dry_run, train

    names = [item.name for item in fields(TrainConfig)]
    given: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name in names}
    if arguments.minutes:
        given["stop_at"] = time.time() + 60 * arguments.minutes
    if arguments.config:
        base = TrainConfig.from_json(arguments.config)
        if "data" in given:
            given["data"] = tuple(given["data"])
        config = replace(base, **given)
    else:
        config = TrainConfig.from_dict(given, "train flexdraft")
    if arguments.dry_run:
        print(dry_run(config))
        return 0
    train(config, PeriodicExport(config.out))
    return 0


def _model(target_path: str, drafter: str) -> Any:
    from sglang_ext.models.target import Target
    from sglang_ext.training.export import load_drafter, load_training_state, restore
    from sglang_ext.training.train import CHECKPOINT

    target = Target.load(target_path)
    if (Path(drafter) / CHECKPOINT).is_file():
        return restore(target, *load_training_state(drafter))
    return load_drafter(drafter, target)


def _limited(records: list[Any], limit: int) -> list[Any]:
    taken: dict[str, int] = {}
    kept = []
    for record in records:
        taken[record.domain] = taken.get(record.domain, 0) + 1
        if not limit or taken[record.domain] <= limit:
            kept.append(record)
    return kept


def _evaluate(arguments: argparse.Namespace) -> int:
    from sglang_ext.training.data import is_held_out, load_records
    from sglang_ext.training.evaluate import evaluate, table

    _use_threads(arguments.threads)
    records = load_records(arguments.data)
    chosen = [record for record in records if is_held_out(record, arguments.held_out_percent)]
    if not chosen:
        raise Refusal(
            f"--held-out-percent {arguments.held_out_percent} leaves none of {len(records)} responses",
            "at least one is needed",
            "raise it, or leave it out to measure on all",
        )
    print(table(evaluate(_model(arguments.target, arguments.drafter), _limited(chosen, arguments.limit))))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from sglang_ext.models.flexdraft.card import CardFields
    from sglang_ext.models.target import Target
    from sglang_ext.training.data import is_held_out, load_records
    from sglang_ext.training.evaluate import evaluate, table
    from sglang_ext.training.export import (
        acceptance_rows,
        load_training_state,
        provenance,
        refuse_to_replace,
        restore,
        with_draft_tokens,
        write_drafter,
    )
    from sglang_ext.training.train import frequent_tokens

    _use_threads(arguments.threads)
    refuse_to_replace(arguments.out)
    config, state = load_training_state(arguments.run_folder)
    if arguments.target:
        config = replace(config, target=arguments.target)
    model = restore(Target.load(config.target), config, state)
    if arguments.target_name:
        model.config = replace(model.config, target_name=arguments.target_name)
    records = load_records(config.data)
    if arguments.draft_vocabulary:
        used = [record for record in records if not is_held_out(record, config.held_out_percent)]
        ids = frequent_tokens(used, arguments.draft_vocabulary, model.config.vocab_size)
        model = with_draft_tokens(model, ids)
    rows = []
    if arguments.acceptance:
        found = evaluate(model, _limited(load_records(arguments.acceptance), arguments.limit))
        print(table(found), file=sys.stderr)
        rows = [row for row in acceptance_rows(found) if row.dataset != "all"]
    info = provenance(config, state["step"], state["progress"], records)
    print(write_drafter(arguments.out, model, CardFields(info, rows)))
    return 0
