"""A SGLang server in a process of its own, and the few HTTP calls the laws need.

Everything here talks to the server from outside: command line, HTTP, log file. It imports neither torch nor SGLang, so
other plugins can use it to test themselves.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S = 300.0
POLL_S = 0.25


class ServerError(RuntimeError):
    """The server did not start, died, or answered something other than 200."""


@dataclass(frozen=True)
class Launch:
    """One server's command line.

    Attributes:
        model: folder of the target.
        flags: further flags of ``sglang.launch_server``, as typed.
        environment: variables to add to this process's own.
        threads: ``OMP_NUM_THREADS`` of the server.
        quick: add the flags that make a CPU server start fast and stay small (fp32, 2048-token context).
        left_out: quick flags not to add.
    """

    model: Path
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    quick: bool = True
    left_out: tuple[str, ...] = ()

    def command(self, port: int) -> list[str]:
        """Return the argument vector for ``port``; a flag given in ``flags`` wins over the quick ones."""
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), "--port", str(port)]
        if self.quick:
            for flag, value in _QUICK_FLAGS:
                if flag not in (*self.flags, *self.left_out):
                    command += [flag] if value is None else [flag, value]
        return [*command, *self.flags]

    def env(self) -> dict[str, str]:
        """Return the process environment."""
        return {**os.environ, "OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1", **self.environment}


_QUICK_FLAGS: tuple[tuple[str, str | None], ...] = (
    ("--device", "cpu"),
    ("--dtype", "float32"),
    ("--context-length", "2048"),
    ("--max-total-tokens", "8192"),
    ("--max-running-requests", "16"),
    ("--random-seed", "1"),
    ("--skip-server-warmup", None),
    ("--sleep-on-idle", None),
    # Under overlapped scheduling the host counts a token towards penalties one step late; the reference must not.
    ("--disable-overlap-schedule", None),
)


@dataclass(frozen=True)
class Reply:
    """One answer of ``/generate``.

    Attributes:
        text: the generated text.
        ids: the generated token ids.
        meta: ``meta_info`` as sent.
    """

    text: str
    ids: list[int]
    meta: dict[str, Any]

    @property
    def finish(self) -> dict[str, Any]:
        """The finish reason: ``type`` and what matched or how long."""
        reason: dict[str, Any] = self.meta["finish_reason"]
        return reason

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, as the server counts them."""
        return int(self.meta["completion_tokens"])


@dataclass(frozen=True)
class Request:
    """One call of ``/generate``.

    Attributes:
        prompt: text, or token ids.
        sampling: ``sampling_params``; temperature 0 and 32 new tokens unless said otherwise.
        fields: further top-level fields of the request, such as ``return_logprob``.
    """

    prompt: str | Sequence[int]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        key = "text" if isinstance(self.prompt, str) else "input_ids"
        prompt = self.prompt if isinstance(self.prompt, str) else list(self.prompt)
        sampling = {"temperature": 0, "max_new_tokens": 32, **self.sampling}
        return {key: prompt, "sampling_params": sampling, **self.fields}

    def speculative(self, options: Mapping[str, Any], transcript: Sequence[int] | None = None) -> Request:
        """Return the same request with overrides in ``custom_params`` (and what a scripted oracle should replay)."""
        custom: dict[str, Any] = {**self.sampling.get("custom_params", {}), "speculative": dict(options)}
        if transcript is not None:
            custom["speculative_transcript"] = list(transcript)
        return Request(self.prompt, {**self.sampling, "custom_params": custom}, self.fields)


class Server:
    """A running server, as its clients see it. :meth:`launch` starts one; the constructor takes one that runs already.

    Args:
        url: its address.
        log: the file it prints to, if known.
        process: its process, if it is ours to stop.
    """

    def __init__(self, url: str, log: Path | None = None, process: subprocess.Popen[bytes] | None = None) -> None:
        self.url = url.rstrip("/")
        self.log = log
        self.process = process

    @classmethod
    def launch(cls, launch: Launch, log: Path) -> Server:
        """Start a server's process and return at once; :meth:`wait_ready` waits for it."""
        port = free_port()
        with log.open("wb") as output:
            process = subprocess.Popen(
                launch.command(port), stdout=output, stderr=subprocess.STDOUT, env=launch.env(), start_new_session=True
            )
        return cls(f"http://127.0.0.1:{port}", log, process)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> Server:
        """Wait until the server generates its first token.

        Raises:
            ServerError: with the end of the log, if the server ends or stays silent.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                raise ServerError(f"the server ended with code {self.process.returncode}:\n{self.log_tail()}")
            try:
                if requests.get(self.url + "/health_generate", timeout=30).status_code == 200:
                    return self
            except requests.RequestException:
                pass
            time.sleep(POLL_S)
        self.stop()
        raise ServerError(f"the server was not ready after {timeout_s:.0f} s:\n{self.log_tail()}")

    def stop(self) -> None:
        """End the server and every process it started, if they are ours."""
        if self.process is None:
            return
        for sent in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sent)
            except ProcessLookupError:
                break
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue

    def log_text(self) -> str:
        """Return everything the server has printed.

        Raises:
            ServerError: its log is not known.
        """
        if self.log is None:
            raise ServerError(f"the log of {self.url} is not known")
        return self.log.read_text(encoding="utf-8", errors="replace")

    def log_tail(self, characters: int = 4000) -> str:
        """Return the end of the log."""
        return self.log_text()[-characters:]

    # ------------------------------------------------------------------ calls

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, stream: bool = False) -> requests.Response:
        """POST a JSON body and return the raw response, whatever its status."""
        return requests.post(self.url + path, json=body, stream=stream, timeout=REQUEST_TIMEOUT_S)

    def get(self, path: str) -> Any:
        """GET a JSON document."""
        return _checked(requests.get(self.url + path, timeout=REQUEST_TIMEOUT_S)).json()

    def healthy(self) -> bool:
        """Return whether the server still generates."""
        return requests.get(self.url + "/health_generate", timeout=60).status_code == 200

    def generate(self, request: Request) -> Reply:
        """Answer one request.

        Raises:
            ServerError: the status is not 200; the message carries the server's own.
        """
        return _reply(_checked(self.post("/generate", request.body())).json())

    def generate_all(self, requests_: Sequence[Request], concurrency: int = 16) -> list[Reply]:
        """Answer many requests at once, in order of the arguments."""
        with ThreadPoolExecutor(max_workers=max(1, min(concurrency, len(requests_)))) as pool:
            return list(pool.map(self.generate, requests_))

    def stream(self, request: Request) -> Iterator[Reply]:
        """Yield the chunks of a streamed answer; each carries the whole text so far."""
        response = _checked(self.post("/generate", {**request.body(), "stream": True}, stream=True))
        for data in sse(response):
            yield _reply(data)

    def tokenize(self, text: str) -> list[int]:
        """Return the prompt's token ids as the server sees them."""
        body = {"model": "default", "prompt": text}
        tokens: list[int] = _checked(self.post("/tokenize", body)).json()["tokens"]
        return tokens

    def flush(self) -> None:
        """Empty the prefix cache; the server must be idle."""
        _checked(requests.post(self.url + "/flush_cache", params={"timeout": 30}, timeout=REQUEST_TIMEOUT_S))

    def load(self) -> dict[str, Any]:
        """Return the scheduler's load: running and waiting requests, used tokens, pool size."""
        (load,) = self.get("/v1/loads")["loads"]
        return dict(load)

    def abort(self, request_id: str) -> None:
        """Abort one request by the ``rid`` it was sent with."""
        _checked(self.post("/abort_request", {"rid": request_id}))


def start(launch: Launch, log: Path) -> Server:
    """Start a server and wait until it is ready."""
    return Server.launch(launch, log).wait_ready()


@dataclass(frozen=True)
class Starter:
    """Starts servers of one target, with their logs in one folder.

    Attributes:
        target: the target's folder.
        logs: where each server's log goes.
        threads: ``OMP_NUM_THREADS`` of each.
    """

    target: Path
    logs: Path
    threads: int

    def launch(self, *flags: str, environment: dict[str, str] | None = None) -> Launch:
        """Return a command line with the common flags."""
        return Launch(self.target, flags, environment or {}, self.threads)

    @contextmanager
    def running(self, **launches: Launch) -> Iterator[dict[str, Server]]:
        """Start servers together, wait until all are ready, and stop them at the end."""
        servers = {name: Server.launch(launch, self.logs / f"{name}.log") for name, launch in launches.items()}
        try:
            with ThreadPoolExecutor(max(1, len(servers))) as pool:
                list(pool.map(Server.wait_ready, servers.values()))
            yield servers
        finally:
            for server in servers.values():
                server.stop()


@dataclass(frozen=True)
class Refused:
    """A launcher that ended by itself.

    Attributes:
        code: its exit code.
        seconds: how long it took.
        output: everything it printed.
    """

    code: int
    seconds: float
    output: str

    def line(self, *words: str) -> str:
        """Return the first line that holds every one of ``words``, or an empty string."""
        for line in self.output.splitlines():
            if all(word in line for word in words):
                return line
        return ""


def run_until_exit(launch: Launch, log: Path, timeout_s: float = 300.0) -> Refused:
    """Run a launcher that is expected to refuse and return what it said.

    Raises:
        ServerError: it was still running after ``timeout_s``.
    """
    started = time.monotonic()
    server = Server.launch(launch, log)
    assert server.process is not None
    try:
        code = server.process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ServerError(f"still running after {timeout_s:.0f} s:\n{server.log_tail()}") from error
    finally:
        seconds = time.monotonic() - started
        server.stop()
    return Refused(code, seconds, server.log_text())


def free_port() -> int:
    """Return a TCP port nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sse(response: requests.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON documents of a server-sent event stream."""
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])


def _checked(response: requests.Response) -> requests.Response:
    if response.status_code != 200:
        raise ServerError(f"{response.request.url} answered {response.status_code}: {response.text[:2000]}")
    return response


def _reply(data: dict[str, Any]) -> Reply:
    # A server started with --skip-tokenizer-init answers with ids only.
    return Reply(data.get("text", ""), list(data["output_ids"]), data["meta_info"])
