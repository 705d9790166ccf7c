"""Wait until a server is ready, with visible progress, then send it one chat request and show what came back."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

QUESTION = "Natalia has 12 apples and buys 3 bags of 8. How many apples does she have? Explain step by step."


def main() -> int:
    """Return 0 once the request was answered, 1 if the server died or never became ready."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, required=True, help="process of the server")
    parser.add_argument("--log", type=Path, required=True, help="its log file, shown if it fails")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    args = parser.parse_args()
    base = f"http://127.0.0.1:{args.port}"
    problem = wait_until_ready(base, args.pid, args.timeout) or show_one_chat(base)
    if problem is not None:
        print(f"\n{args.log}:", file=sys.stderr)
        print("\n".join(args.log.read_text(errors="replace").splitlines()[-40:]), file=sys.stderr)
        print(f"error: {problem}; the end of its log is above", file=sys.stderr)
        return 1
    return 0


def wait_until_ready(base: str, pid: int, timeout_s: float) -> str | None:
    """Poll ``/health`` once a second; return None when it answers, otherwise what went wrong."""
    start = time.monotonic()
    shown = -10.0
    while (waited := time.monotonic() - start) < timeout_s:
        if not alive(pid):
            return f"the server stopped after {waited:.0f} s"
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=30) as answer:
                if answer.status == 200:
                    print(f"\rready after {waited:.0f} s" + " " * 20, file=sys.stderr, flush=True)
                    return None
        except OSError:  # not listening yet, or 503 while it loads
            pass
        if sys.stderr.isatty():
            print(f"\rwaiting for the server: {waited:.0f} s", end="", file=sys.stderr, flush=True)
        elif waited - shown >= 10:
            shown = waited
            print(f"waiting for the server: {waited:.0f} s", file=sys.stderr, flush=True)
        time.sleep(1)
    return f"the server was not ready within {timeout_s:.0f} s"


def alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def show_one_chat(base: str) -> str | None:
    """Ask one question; print the answer, its speed, and how many tokens each target step committed.

    Returns None, or what went wrong.
    """
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 160,
        "return_meta_info": True,
    }
    request = urllib.request.Request(
        f"{base}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        return f"the first request was answered with {error.code}: {error.read().decode(errors='replace')[:500]}"
    except OSError as error:
        return f"the first request got no answer ({error})"
    seconds = time.monotonic() - start
    choice, tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
    print(f"\nQ: {QUESTION}\nA: {choice['message']['content']}\n")
    accept = choice["meta_info"].get("spec_accept_length")
    drafting = f", {accept:.2f} tokens per target step" if accept is not None else ""
    print(f"{tokens} tokens in {seconds:.1f} s{drafting}")
    return None


if __name__ == "__main__":
    sys.exit(main())
