"""``sglang-ext bench``: the comparison itself, and the commands under it; ``bench-attention`` is attached here too."""

from __future__ import annotations

import argparse
import http.client
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ext.bench import attention, datasets, environment, memory, steps
from sglang_ext.bench.client import Client, Sampling, ServerError
from sglang_ext.bench.datasets import DEFAULT_DATASETS, FILES
from sglang_ext.bench.interleave import Size
from sglang_ext.bench.methods import ALGORITHMS, ServedMethod, parse_methods
from sglang_ext.bench.server import ServerProcess, target_arguments
from sglang_ext.core.refusal import Refusal
from sglang_ext.core.schedule import MODE_NAMES

DEFAULT_OUT = Path("bench-results")
TIE_GAP = 0.02
SMOKE = {"prompts": 10, "max_new_tokens": 96, "rounds": 3, "record_prompts": 6}
FULL = {"prompts": 40, "max_new_tokens": 256, "rounds": 6, "record_prompts": 20}


def add_parsers(subparsers: Any) -> None:
    """Attach ``bench`` with the commands under it, and ``bench-attention``."""
    bench = subparsers.add_parser(
        "bench",
        help="measure speculative against plain decoding: speed, accept length, text equality",
        description="Measure FlexDraft, or several methods, against plain decoding on the same prompts, interleaved "
        "by round: with a stock server without speculation and, for a single method, with requests that switch it off "
        "on the same server. Without --url the servers are started here. Writes results.json, report.md and plot.png.",
    )
    add_server_options(bench)
    add_prompt_options(
        bench,
        f"{FULL['prompts']} per dataset; {SMOKE['prompts']} with --smoke",
        f"{FULL['max_new_tokens']}; {SMOKE['max_new_tokens']} with --smoke",
    )
    bench.add_argument("--smoke", action="store_true", help="a short run (about 10 minutes on two CPU cores)")
    bench.add_argument(
        "--methods",
        metavar="NAME[=DIR],...",
        type=lambda text: text.split(","),
        default=["flexdraft"],
        help=f"what to compare, with drafters, from {', '.join(ALGORITHMS)} (default: flexdraft); a server each",
    )
    bench.add_argument("--url", metavar="URL", help="a running server of the method, instead of starting one")
    bench.add_argument("--baseline-url", metavar="URL", help="a running plain server of the same target; needs --url")
    bench.add_argument("--no-baseline", action="store_true", help="compare with plain requests of the same server only")
    bench.add_argument(
        "--batch",
        metavar="N,N,...",
        type=_batches,
        default=(1, 4, 16),
        help="requests in flight at once (default: 1,4,16)",
    )
    bench.add_argument(
        "--rounds", metavar="N", type=_positive, help="rounds per batch size, at least (default: 6; 3 with --smoke)"
    )
    bench.add_argument("--temperature", metavar="T", type=float, default=0.0, help="default: 0, greedy")
    bench.add_argument(
        "--mode",
        choices=MODE_NAMES,
        default="auto",
        help="how the requests draft, ngram's apart (default: auto, as the server is configured)",
    )
    bench.add_argument(
        "--tie-gap",
        metavar="NATS",
        type=float,
        default=TIE_GAP,
        help="texts that part where two tokens' log-probabilities are closer than this count as near "
        f"ties (default: {TIE_GAP})",
    )
    bench.set_defaults(run=_guarded(run))
    inner = bench.add_subparsers(dest="bench_command", required=False, metavar="COMMAND")
    _add_steps(inner)
    _add_memory(inner)
    attention.add_parser(subparsers)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what is served."""
    parser.add_argument("--target", metavar="DIR", help="the target (default: the one `sglang-ext prepare` builds)")
    parser.add_argument("--drafter", metavar="DIR", help="the first method's drafter (default: the shipped one)")
    parser.add_argument(
        "--options",
        metavar="JSON",
        help="--speculative-adaptive-config of the servers that this package's methods run on",
    )
    parser.add_argument(
        "--server-args",
        metavar="FLAGS",
        type=shlex.split,
        default=[],
        help="further flags of every server, quoted as one argument, such as '--dtype float32'",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help=f"where results go (default: {DEFAULT_OUT}/TIME)")


def add_prompt_options(parser: argparse.ArgumentParser, prompts: str, tokens: str) -> None:
    """Add the flags that say what is asked; ``prompts`` and ``tokens`` describe their defaults."""
    parser.add_argument(
        "--data",
        metavar="PATH",
        type=Path,
        help="folder with the prompts, or one JSON-lines file (default: a few built-in prompts)",
    )
    parser.add_argument(
        "--datasets",
        metavar="NAME,...",
        type=lambda text: text.split(","),
        default=DEFAULT_DATASETS,
        help=f"datasets of the folder, from {', '.join(FILES)} (default: {','.join(DEFAULT_DATASETS)})",
    )
    parser.add_argument("--prompts", metavar="N", type=_positive, help=f"prompts (default: {prompts})")
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=_positive,
        help=f"tokens per request at most (default: {tokens})",
    )


def run(args: argparse.Namespace) -> int:
    """Run the comparison and print its table."""
    from sglang_ext.bench import report, runner

    defaults = SMOKE if args.smoke else FULL
    size = Size(args.batch, args.prompts or defaults["prompts"], args.rounds or defaults["rounds"])
    settings = {
        **asdict(size),
        "max_new_tokens": args.max_new_tokens or defaults["max_new_tokens"],
        "temperature": args.temperature,
        "mode": args.mode,
        "tie_gap": args.tie_gap,
        "methods": args.methods,
        "datasets": list(args.datasets) if args.data else "built-in",
    }
    _check_urls(args)
    methods = parse_methods(args.methods, args.drafter)
    _check_methods(args, methods)
    chosen = datasets.load(args.data, args.datasets, size.pool)
    out = out_folder(args)
    with ExitStack() as stack:
        arms = _arms(args, methods, settings, out, stack)
        prompts = datasets.encode(chosen, _target_of(args, arms[0].client))
        context = environment.describe()
        context["server_info"] = _plan(arms[0].client)
        runner.Switch(arms).none()  # an idle server looks busy
        context["busy_share_before"] = environment.warn_if_busy()
        measurements = runner.run(arms, prompts, size)
        options = {} if args.mode == "auto" else {"mode": args.mode}
        records = runner.collect_records(arms, prompts, defaults["record_prompts"], options)
        score = arms[-1].client.logprobs_after if args.temperature == 0 else None
        table = report.rows(measurements, score, args.tie_gap)
    accepted = report.acceptance(records)
    report.write(out, report.markdown(table, accepted, context), measurements, table, accepted, context, settings)
    _draw(out, table, accepted, context)
    print("\n".join(report.summary_table(table)))
    print(f"\nresults: {out}")
    return 0


def out_folder(args: argparse.Namespace) -> Path:
    """Make and return the folder for results."""
    out: Path = args.out or DEFAULT_OUT / time.strftime("%Y%m%d-%H%M%S")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refusal(f"--out {out} cannot be made ({error})", "a writable folder is needed", "name another") from error
    return out


def target_folder(args: argparse.Namespace) -> str:
    """Return the target to serve, preparing the default one if need be."""
    if args.target is not None:
        return str(args.target)
    from sglang_ext.targets import prepare

    return str(prepare())


def server_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags every server started here shares."""
    from sglang_ext.doctor import accelerator_name

    device = None if accelerator_name() or "--device" in args.server_args else "cpu"
    return target_arguments(target_folder(args), device, args.server_args)


def _arms(
    args: argparse.Namespace, methods: Sequence[ServedMethod], settings: dict[str, Any], out: Path, stack: ExitStack
) -> list[Any]:
    """Return the arms, the methods first and the best plain reference last; servers end with ``stack``."""
    from sglang_ext.bench.runner import OVERRIDE, PLAIN, PLAIN_PARAMS, Arm

    mode = None if args.mode == "auto" else {"speculative": {"mode": args.mode}}
    cap, temperature = settings["max_new_tokens"], settings["temperature"]
    fast, plain = Sampling(cap, temperature, mode), Sampling(cap, temperature)
    override = Sampling(cap, temperature, PLAIN_PARAMS)
    if args.url is not None:
        client, (method,) = _running(args.url, "--url"), methods
        arms = [Arm(method.name, client, fast, has_records=not method.is_stock)]
        if not method.is_stock:
            arms.append(Arm(OVERRIDE, client, override))
        if args.baseline_url is not None:
            arms.append(Arm(PLAIN, _running(args.baseline_url, "--baseline-url"), plain))
        return arms
    flags, arms = server_flags(args), []
    for method in methods:
        log = out / f"server-{method.name}.log"
        server = stack.enter_context(ServerProcess(method.name, [*flags, *method.arguments(args.options)], log))
        sampling = plain if method.is_stock else fast
        arms.append(Arm(method.name, server.client, sampling, server, has_records=not method.is_stock))
        if len(methods) == 1 and not method.is_stock:
            arms.append(Arm(OVERRIDE, server.client, override, server))
        server.pause()
    if not args.no_baseline:
        stock = stack.enter_context(ServerProcess("plain", flags, out / "server-plain.log"))
        arms.append(Arm(PLAIN, stock.client, plain, stock))
    for arm in arms:
        if arm.process is not None:
            arm.process.resume()
    return arms


def _check_urls(args: argparse.Namespace) -> None:
    if args.baseline_url is not None and args.url is None:
        raise Refusal("--baseline-url without --url", "both servers run already, or none", "add --url")
    if args.baseline_url is not None and args.no_baseline:
        raise Refusal("--baseline-url and --no-baseline contradict each other", "one of them is allowed", "drop one")


def _check_methods(args: argparse.Namespace, methods: Sequence[ServedMethod]) -> None:
    given = f"--methods {','.join(args.methods)}"
    for method in methods:
        if args.mode == "parallel" and not method.is_stock and args.mode not in method.modes:
            raise Refusal(f"--mode {args.mode} and {method.name} in {given}", "it has no such mode", "drop one of them")
    if args.url is not None and len(methods) > 1:
        raise Refusal(f"{given} with --url", "one method on one server", "name one method")
    has_baseline = not args.no_baseline if args.url is None else args.baseline_url is not None
    if not has_baseline and (len(methods) > 1 or methods[0].is_stock):
        fix = "drop --no-baseline" if args.no_baseline else "add --baseline-url"
        raise Refusal(f"{given} without a plain server", "one to compare with", fix)


def _running(url: str, flag: str) -> Client:
    client = Client(url)
    if not client.is_ready():
        raise Refusal(
            f"{flag} {url}: no server answers there", "a running, healthy server is needed", "check the address"
        )
    return client


def _target_of(args: argparse.Namespace, client: Client) -> str:
    """Return where the target's tokenizer is: ``--target``, or what the server says it serves."""
    if args.target is not None:
        return str(args.target)
    return str(client.get_json("/model_info")["model_path"])


def _plan(client: Client) -> dict[str, Any]:
    state = client.get_json("/server_info")["internal_states"][0]
    return {key: state[key] for key in ("speculative_plan", "memory_usage") if key in state}


def _draw(out: Path, table: Sequence[Any], accepted: Sequence[Any], context: dict[str, Any]) -> None:
    from sglang_ext.bench import plot

    if plot.is_available():
        plot.draw(out / "plot.png", table, accepted, environment.summary(context))
    else:
        print("no plot.png: matplotlib is missing; pip install 'sglang-flexdraft[bench]'", file=sys.stderr)


def _add_steps(inner: Any) -> None:
    parser = inner.add_parser(
        "steps",
        help="split one step's time at batch 1: target pass, drafting, heads, sampling, bookkeeping",
        description="Start a speculative server with step profiling and a plain server, decode the same prompts one "
        "at a time in each mode, and print where a step's time goes.",
    )
    add_server_options(parser)
    add_prompt_options(parser, str(steps.PROMPTS), str(steps.MAX_NEW_TOKENS))
    _add_method(parser)
    parser.set_defaults(run=_guarded(lambda args: steps.run(args, server_flags(args), out_folder(args))))


def _add_memory(inner: Any) -> None:
    parser = inner.add_parser(
        "memory",
        help="compare the memory of a plain and a speculative server with the same KV pool",
        description="Start a plain and a speculative server one after the other, decode the same prompts, and compare "
        "the memory of the processes that hold the model.",
    )
    add_server_options(parser)
    add_prompt_options(parser, str(memory.PROMPTS), str(memory.MAX_NEW_TOKENS))
    _add_method(parser)
    parser.set_defaults(run=_guarded(lambda args: memory.run(args, server_flags(args), out_folder(args))))


def _add_method(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--method", metavar="NAME[=DIR]", default="flexdraft", help="flexdraft (default), dflare, or dflash=DIR"
    )


def _guarded(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Turn a server's failure into one line and exit code 1; a termination signal still stops the servers."""

    def guarded(args: argparse.Namespace) -> int:
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            return command(args)
        except (ServerError, OSError, http.client.HTTPException) as error:
            print(f"error: {error or type(error).__name__}", file=sys.stderr)
            return 1

    return guarded


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number of at least 1 is allowed")
    return value


def _batches(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))
