"""``sglang-ext demo``: starts a server unless told where one is, and opens the page on localhost."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_ext.core.refusal import Refusal

DEFAULT_PORT = 7860


def add_parsers(subparsers: Any) -> None:
    """Attach ``demo``."""
    command = subparsers.add_parser(
        "demo",
        help="show drafts being accepted and rejected beside plain decoding, on a page in the browser",
        description="Open a page that asks one prompt twice, plainly and speculatively. Without --url a server with "
        "the default target is started and stopped with the page; one server answers both sides unless --baseline-url "
        "names another for the plain one.",
    )
    command.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="URL",
        help="a running server; give it once per drafter to compare",
    )
    command.add_argument("--baseline-url", metavar="URL", help="a running plain server of the same target")
    command.add_argument(
        "--server-args",
        metavar="FLAGS",
        default="",
        help='flags for the server started here, as for `sglang-ext serve`: --server-args="--model-path DIR"',
    )
    command.add_argument(
        "--replay", metavar="FILE", type=Path, help="open with a saved run; without --url no server is started"
    )
    command.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1, this machine only")
    command.add_argument("--port", type=int, default=DEFAULT_PORT, metavar="PORT", help=f"default: {DEFAULT_PORT}")
    command.add_argument("--open", action="store_true", help="open the page in the browser")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve the page until it is interrupted.

    Raises:
        Refusal: Gradio is missing, an address is malformed, the file holds no run, or the server does not start.
    """
    _require_gradio()
    from demo.app import build, launch_options
    from demo.pool import Pool
    from demo.recording import read_recording

    first = None if args.replay is None else read_recording(_read(args.replay))
    if args.server_args and (args.url or args.replay):
        raise Refusal("--server-args was given", "it is for a server started here", "leave out --url and --replay")
    if args.baseline_url and not args.url:
        raise Refusal("--baseline-url was given alone", "it needs --url", "name the speculative server with --url too")
    signal.signal(signal.SIGTERM, _leave)  # so that a server started here ends with the page
    with contextlib.ExitStack() as stack:
        urls = args.url
        if not urls and first is None:
            urls = [stack.enter_context(_own_server(shlex.split(args.server_args)))]
        pool = Pool(urls, args.baseline_url)
        for problem in pool.refresh():
            print(f"warning: {problem}", file=sys.stderr)
        blocks, handlers = build(pool, first)
        stack.callback(handlers.sessions.close_all)
        try:
            blocks.launch(
                server_name=args.host,
                server_port=args.port,
                inbrowser=args.open,
                prevent_thread_lock=True,
                **launch_options(),
            )
        except OSError as error:
            raise Refusal(
                f"--port {args.port} cannot be used ({error})", "a free port is needed", "choose another"
            ) from (error)
        print(f"The page is at http://{args.host}:{args.port} (Ctrl+C ends it).", flush=True)
        blocks.block_thread()
    return 0


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _require_gradio() -> None:
    try:
        import gradio
    except ImportError as error:
        raise Refusal(
            f"the page needs Gradio ({error})", "it comes with the demo extra", "pip install 'sglang-flexdraft[demo]'"
        ) from error
    del gradio


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            f"--replay {file} cannot be read ({error})", "a saved run is allowed", "check the name"
        ) from error


@contextlib.contextmanager
def _own_server(flags: Sequence[str]) -> Iterator[str]:
    """Start a server as ``sglang-ext serve`` would and stop it at the end; yields its address."""
    from sglang_ext.bench.server import ServerProcess
    from sglang_ext.cli import serve_command

    with tempfile.TemporaryDirectory(prefix="sglang-ext-demo-") as folder:
        arguments = serve_command(flags)[3:]
        server = ServerProcess("demo", arguments, Path(folder) / "server.log")
        started = time.monotonic()
        with server:
            print(f"server ready after {time.monotonic() - started:.0f} s: {server.client.url}", file=sys.stderr)
            yield server.client.url
