"""A stand-in for SGLang's HTTP side, for what a real server cannot be made to do on demand: fail, die, know nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """What the server does, and what it saw.

    Attributes:
        telemetry: whether it decodes speculatively with this package.
        algorithm: which drafter, if so.
        fail: status of every streaming answer; 200 for none.
        die_after: chunks after which a stream is cut; ``None`` for never.
        interval_s: time between chunks.
        bodies: the ``/generate`` bodies it got.
        closed: when a client left in the middle of a stream, by ``time.monotonic()``.
        aborted: request ids it was asked to drop.
        most: highest number of streams at once.
    """

    telemetry: bool = True
    fail: int = 200
    die_after: int | None = None
    interval_s: float = 0.01
    bodies: list[dict[str, Any]] = field(default_factory=list)
    closed: list[float] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    algorithm: str = "FLEXDRAFT"
    lock: threading.Lock = field(default_factory=threading.Lock)
    active: int = 0
    most: int = 0


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """Run the stand-in and yield its address."""

    class Handler(_Handler):
        told = behaviour

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    told: Behaviour
    protocol_version = "HTTP/1.0"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/server_info":
            state = {"speculative_plan": {**_PLAN, "algorithm": self.told.algorithm}} if self.told.telemetry else {}
            self._json(
                {
                    "model_path": "/models/tiny",
                    "dtype": "float32",
                    "device": "cpu",
                    "enable_deterministic_inference": False,
                    "internal_states": [state],
                }
            )
        elif self.path == "/v1/loads":
            self._json({"loads": [{"num_running_reqs": self.told.active, "num_waiting_reqs": 0}]})
        else:
            self._json({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._json({"tokens": [1, 2, 3]})
        elif self.path == "/detokenize":
            self._json({"text": ["".join(f"w{token} " for token in ids if token < 64) for ids in body["tokens"]]})
        elif self.path == "/abort_request":
            self.told.aborted.append(body["rid"])
            self._json({})
        elif self.path == "/generate" and body.get("stream"):
            self.told.bodies.append(body)
            self._stream(body)
        else:
            self._json({"text": "", "output_ids": [], "meta_info": {}})

    def _stream(self, body: dict[str, Any]) -> None:
        told = self.told
        if told.fail != 200:
            self._json({"error": {"message": "the scheduler fell over"}}, told.fail)
            return
        self.send_response(200)
        self.end_headers()
        with told.lock:
            told.active += 1
            told.most = max(told.most, told.active)
        try:
            self._chunks(body)
        except OSError:
            told.closed.append(time.monotonic())
        with told.lock:
            told.active -= 1
        with suppress(OSError):
            self.wfile.write(b"" if told.die_after is not None else b"data: [DONE]\n\n")

    def _chunks(self, body: dict[str, Any]) -> None:
        total = body["sampling_params"]["max_new_tokens"]
        custom = body["sampling_params"].get("custom_params", {}).get("speculative")
        for count in range(1, total + 1):
            if self.told.die_after is not None and count > self.told.die_after:
                return
            meta = {
                "prompt_tokens": 3,
                "cached_tokens": 2,
                "completion_tokens": count,
                "finish_reason": {"type": "length"} if count == total else None,
            }
            ids = [index % 64 for index in range(count)]
            if custom is not None and self.told.telemetry:
                meta["speculative"] = [_record(token, first=not index) for index, token in enumerate(ids)]
            chunk = {"text": "".join(f"w{token} " for token in ids), "output_ids": ids, "meta_info": meta}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(self.told.interval_s)

    def _json(self, document: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _record(token: int, first: bool) -> dict[str, Any]:
    return {
        "mode": "prefill" if first else "plain",
        "verify_length": 0,
        "draft_ids": [],
        "accepted": 0,
        "bonus": token,
        "groups": 0,
        "confidence": [],
        "step_ms": 1.0,
        "batch_size": 1,
    }


_PLAN = {
    "algorithm": "FLEXDRAFT",
    "block_size": 8,
    "options": {"mode": "auto", "pruning": "none", "prune_threshold": 0.01},
}
