"""Requests that run beside a panel, so that the batch grows while people look."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

from demo.client import Client, ServerProblem, Stream
from demo.settings import Settings

TOPICS = (
    "the sea",
    "a long train journey",
    "how bread is made",
    "the history of clocks",
    "a city at night",
    "bees and flowers",
    "an old library",
    "the first snow",
)
TOKENS = 512
WAIT_S = 20.0
PAUSE_S = 0.2


class Background:
    """Keeps a number of requests going on one server; nobody reads their answers.

    Args:
        client: the server.
        settings: whose mode and pruning they use.
        side: which side's options they carry.
        telemetry: whether the server knows those options.
    """

    def __init__(self, client: Client, settings: Settings, side: str, telemetry: bool) -> None:
        self._client = client
        params = settings.sampling(side, telemetry)
        if telemetry:
            custom = dict(params["custom_params"])
            params["custom_params"] = {key: {**value, "records": False} for key, value in custom.items()}
        self._params: dict[str, Any] = {**params, "max_new_tokens": TOKENS, "ignore_eos": True}
        self._lock = threading.Lock()
        self._wanted = 0
        self._workers = 0
        self._streams: dict[int, Stream] = {}
        self._decoding: set[int] = set()

    def resize(self, count: int) -> None:
        """Have ``count`` requests going from now on; those too many are ended here and on the server."""
        with self._lock:
            self._wanted = count
            surplus = [stream for index, stream in self._streams.items() if index >= count]
            new = range(self._workers, count)
            self._workers = max(self._workers, count)
        for stream in surplus:
            threading.Thread(target=stream.close, daemon=True).start()
        for index in new:
            threading.Thread(target=self._keep_going, args=(index,), daemon=True, name="demo-background").start()

    def wait_busy(self) -> None:
        """Wait until all of them decode, or a while."""
        deadline = time.monotonic() + WAIT_S
        while len(self._decoding) < self._wanted and time.monotonic() < deadline:
            time.sleep(0.02)

    def _keep_going(self, index: int) -> None:
        turn = 0
        while True:
            topic = TOPICS[(index + turn) % len(TOPICS)]
            body = {"text": f"Request {index}. A long text about {topic}:\n", "rid": uuid.uuid4().hex}
            stream = self._client.stream({**body, "sampling_params": {**self._params, "stream_interval": 16}})
            with self._lock:
                if index >= self._wanted:
                    self._workers = min(self._workers, index)
                    return
                self._streams[index] = stream
            try:
                for _ in stream:
                    self._decoding.add(index)
            except ServerProblem:
                time.sleep(PAUSE_S)
            finally:
                with self._lock:
                    self._streams.pop(index, None)
                    self._decoding.discard(index)
            turn += 1
