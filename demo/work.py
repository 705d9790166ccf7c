"""What every run of the page is: a thread that streams answers from servers and can be stopped at any moment."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Any, Self

from demo.client import Client, ServerProblem, Stream
from demo.tracks import DONE, FAILED, RUNNING, STOPPED, Track, Writer


class Work(ABC):
    """A thread with the streams it has open.

    Args:
        name: of the thread.

    Attributes:
        problem: why the work could not begin.
        finished: whether the thread has ended.
        started_s: ``time.monotonic()`` at which each side was first asked.
    """

    def __init__(self, name: str) -> None:
        self.problem = ""
        self.finished = False
        self.started_s: dict[str, float] = {}
        self._stopping = threading.Event()
        self._streams: list[Stream] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> Self:
        """Begin; answers fill from now on."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End every stream here and on the server, within moments; later calls do nothing."""
        self._stopping.set()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            threading.Thread(target=stream.close, daemon=True).start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)

    @abstractmethod
    def _work(self) -> None:
        """Do it all, and set ``finished`` at the end whatever happens."""

    def _open(self, client: Client, body: dict[str, Any]) -> Stream:
        """Return the stream of a request; :meth:`stop` closes it from now on."""
        stream = client.stream(body)
        with self._lock:
            self._streams.append(stream)
        return stream

    def _read(self, track: Track, stream: Stream, writer: Writer) -> None:
        """Write a stream's answer into ``track`` until it ends, fails or is stopped."""
        if self._stopping.is_set():
            return
        track.status = RUNNING
        try:
            self.started_s.setdefault(track.side, time.monotonic())
            for at_s, chunk in stream:
                writer.chunk(at_s, chunk)
        except ServerProblem as problem:
            stream.close()
            track.status, track.message = FAILED, str(problem)
            return
        track.status = STOPPED if self._stopping.is_set() or track.finish == "abort" else DONE
