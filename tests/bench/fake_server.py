"""A local HTTP server that answers like SGLang as far as the benchmark client asks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Request body -> final chunk (``output_ids``, ``text``, ``meta_info``), or ``{"status": 400, ...}``."""


class FakeServer:
    """Records what it was asked; ``incremental`` streams only what is new in each chunk."""

    def __init__(self, answer: Answer, incremental: bool = False) -> None:
        self.answer = answer
        self.incremental = incremental
        self.bodies: list[dict[str, Any]] = []
        self.flushes = 0
        self.documents: dict[str, dict[str, Any]] = {}
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        self.url = ""

    def entered(self, change: int) -> None:
        with self._lock:
            self._now += change
            self.most_at_once = max(self.most_at_once, self._now)


@contextmanager
def serving(fake: FakeServer) -> Iterator[FakeServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/health":
                self._send(200, b"")
            elif self.path in fake.documents:
                self._send(200, json.dumps(fake.documents[self.path]).encode())
            else:
                self._send(404, b"no such document")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
            if self.path == "/flush_cache":
                fake.flushes += 1
                self._send(200, b"flushed")
                return
            fake.bodies.append(body)
            fake.entered(1)
            final = fake.answer(body)
            fake.entered(-1)
            if "status" in final:
                self._send(final["status"], json.dumps(final).encode())
            elif body["stream"]:
                self._send(200, self._events(final))
            else:
                self._send(200, json.dumps(final).encode())

        def _events(self, final: dict[str, Any]) -> bytes:
            ids, text = final["output_ids"], final["text"]
            first = {"output_ids": ids[:1], "text": text[:1], "meta_info": {"completion_tokens": 1}}
            last = dict(final)
            if fake.incremental:
                last.update(output_ids=ids[1:], text=text[1:])
            return (
                b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in (first, last))
                + b"data: [DONE]\n\n"
            )

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
