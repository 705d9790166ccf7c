"""Starts, pauses and stops the servers of a measurement.

An idle scheduler may poll its sockets without sleeping and keep a core busy, so a server that is not being measured is
paused (SIGSTOP to its process group) while another one is.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from sglang_ext.bench.client import Client
from sglang_ext.bench.console import finished, status
from sglang_ext.core.refusal import Refusal

READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 20.0
SIGNAL_TIMEOUT_S = 20.0


class ServerProcess:
    """A server started by this process, in a process group of its own.

    Args:
        name: shown to the user.
        arguments: flags of ``python -m sglang.launch_server`` without host and port.
        log: file that receives the server's output.
    """

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self.command = [sys.executable, "-m", "sglang.launch_server", *arguments]
        self.command += ["--host", "127.0.0.1", "--port", str(free_port())]
        self.client = Client(f"http://127.0.0.1:{self.command[-1]}")
        self._paused = False
        self._process: subprocess.Popen[bytes] | None = None
        self.ready_s = 0.0

    def __enter__(self) -> ServerProcess:
        started = time.perf_counter()
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        try:
            self._wait_ready(started)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def pause(self) -> None:
        """Stop every process of the server where it is; it uses no CPU until :meth:`resume`."""
        self._signal(signal.SIGSTOP)
        self._paused = True
        self._wait_stopped(True)

    def resume(self) -> None:
        """Let a paused server go on; nothing happens if it runs."""
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False
            self._wait_stopped(False)

    def stop(self) -> None:
        """End the server and everything it started."""
        process = self._process
        if process is None:
            return
        self._process = None
        members = [process.pid, *(child.pid for child in _descendants(process.pid))]
        for number, wait in ((signal.SIGCONT, 0.0), (signal.SIGTERM, STOP_TIMEOUT_S), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline and any(psutil.pid_exists(pid) for pid in members):
                process.poll()
                time.sleep(0.1)
        process.poll()

    def scheduler(self) -> psutil.Process:
        """Return the process that holds the model.

        Raises:
            RuntimeError: if it cannot be found among the server's processes.
        """
        assert self._process is not None
        for child in _descendants(self._process.pid):
            if "scheduler" in " ".join(child.cmdline()) or "scheduler" in child.name():
                return child
        raise RuntimeError(f"no scheduler among the processes of the {self.name} server")

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _wait_stopped(self, stopped: bool) -> None:
        """Wait for the signal to arrive everywhere: it is delivered when each process is next scheduled."""
        assert self._process is not None
        members = [psutil.Process(self._process.pid), *_descendants(self._process.pid)]
        deadline = time.monotonic() + SIGNAL_TIMEOUT_S
        while any(_is_stopped(member) != stopped for member in members if _is_alive(member)):
            if time.monotonic() > deadline:
                verb = "pause" if stopped else "resume"
                raise RuntimeError(f"the {self.name} server did not {verb} within {SIGNAL_TIMEOUT_S:.0f} s")
            time.sleep(0.005)

    def _wait_ready(self, started: float) -> None:
        assert self._process is not None
        while not self.client.is_ready():
            seconds = time.perf_counter() - started
            if self._process.poll() is not None or seconds > READY_TIMEOUT_S:
                state = "ended" if self._process.poll() is not None else f"was not ready after {seconds:.0f} s"
                raise Refusal(
                    f"the {self.name} server {state} ({' '.join(self.command)})",
                    "it must come up",
                    f"see {self.log}, which ends:\n{_tail(self.log)}",
                )
            status(f"{self.name} server: starting, {seconds:.0f} s")
            time.sleep(1.0)
        finished(f"{self.name} server: ready after {time.perf_counter() - started:.0f} s")


def free_port() -> int:
    """Return a TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def target_arguments(target: str, device: str | None, extra: Sequence[str]) -> list[str]:
    """Return the flags every server of one measurement shares."""
    arguments = ["--model-path", target]
    if device is not None:
        arguments += ["--device", device]
    return [*arguments, *extra]


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _tail(path: Path, lines: int = 15, width: int = 300) -> str:
    return "\n".join(line[:width] for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
