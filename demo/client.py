"""HTTP to one SGLang server: short calls, and streams that another thread can close at any moment.

Every failure is a :class:`ServerProblem` whose text can be shown to whoever looks at the page.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from sglang_ext.core.refusal import Refusal

CALL_TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 600.0
_START_ONE = "start one with `sglang-ext serve`, or name another with --url"


class ServerProblem(RuntimeError):
    """Something a server did or did not do, in words for the page."""


class Client:
    """One server's address; every call opens its own connection, so threads may share a client.

    Args:
        url: ``http://HOST:PORT``; ``https`` works too, and the scheme may be left out.

    Raises:
        Refusal: ``url`` is no address.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.path not in ("", "/"):
            raise Refusal(f"{url!r} is no server address", "http://HOST:PORT is allowed", "correct --url")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port or (443 if self._secure else 80)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{parts.scheme}://{host}:{self._port}"

    @property
    def local(self) -> bool:
        """Whether the server runs on this machine."""
        return self._host == "localhost" or self._host == "::1" or self._host.startswith("127.")

    def get(self, path: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Return the JSON document at ``path``."""
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Send a JSON document and return the answer, ``None`` if it is not JSON (some routes answer with words)."""
        return self._call("POST", path, body, timeout_s)

    def tokenize_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a conversation under the server's chat template, ready for its next answer."""
        answer = self.post("/tokenize", {"model": "default", "messages": messages})
        return [int(token) for token in answer["tokens"]]

    def detokenize(self, sequences: list[list[int]], special: bool) -> list[str]:
        """Return the text of each sequence, special tokens spelled out or left out."""
        if not sequences:
            return []
        body = {"model": "default", "tokens": sequences, "skip_special_tokens": not special}
        return [str(text) for text in self.post("/detokenize", body)["text"]]

    def busy(self) -> int | None:
        """Return how many requests the server has in hand; ``None`` if it does not say."""
        try:
            loads = self.get("/v1/loads")["loads"]
            return sum(int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) for load in loads)
        except (ServerProblem, KeyError, TypeError, ValueError):
            return None

    def idle(self, patience_s: float = 1.5) -> bool:
        """Return whether the server has nothing to do, or gets there soon: it publishes its load now and then."""
        deadline = time.monotonic() + patience_s
        while self.busy():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def abort(self, request_id: str) -> None:
        """Ask the server to drop a request; says nothing if the server is gone."""
        with contextlib.suppress(ServerProblem):
            self.post("/abort_request", {"rid": request_id}, timeout_s=2.0)

    def stream(self, body: dict[str, Any]) -> Stream:
        """Send a streaming ``/generate`` request."""
        return Stream(self, body)

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return an open connection."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        try:
            connection.connect()
        except socket.gaierror as error:
            raise ServerProblem(f"the host name in {self.url} is not known: correct the address") from error
        except ConnectionRefusedError as error:
            raise ServerProblem(f"no server answers at {self.url} (connection refused): {_START_ONE}") from error
        except OSError as error:
            raise ServerProblem(f"{self.url} cannot be reached ({error}): {_START_ONE}") from error
        return connection

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        connection = self.connect(timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerProblem(f"{self.url}{path} gave no answer ({type(error).__name__}: {error})") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ServerProblem(describe_status(f"{self.url}{path}", response.status, text))
        try:
            return json.loads(text)
        except ValueError:
            return None


class Stream:
    """One streaming answer; iterate it in one thread, :meth:`close` it from any.

    Args:
        client: where to send it.
        body: body of ``/generate``; ``stream`` is added. Its ``rid`` is what :meth:`close` aborts.
    """

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        self._client = client
        self._body = {**body, "stream": True}
        self._socket: socket.socket | None = None
        self.closed = False

    def __iter__(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield ``(seconds since sending, chunk)``; ends early, without an error, after :meth:`close`.

        Raises:
            ServerProblem: the server refused, failed, or went away before the answer was complete.
        """
        connection = self._client.connect(STREAM_TIMEOUT_S)
        self._socket = connection.sock
        try:
            if self.closed:
                return
            sent = time.perf_counter()
            yield from self._chunks(connection, sent)
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self.closed:
                raise ServerProblem(
                    f"{self._client.url} went away in the middle of an answer ({type(error).__name__}: {error})"
                ) from error
        finally:
            connection.close()

    def close(self) -> None:
        """Close the connection and have the server drop the request."""
        if self.closed:
            return
        self.closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._client.abort(self._body["rid"])

    def _chunks(self, connection: http.client.HTTPConnection, sent: float) -> Iterator[tuple[float, dict[str, Any]]]:
        connection.request("POST", "/generate", json.dumps(self._body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ServerProblem(describe_status(f"{self._client.url}/generate", response.status, response.read()))
        complete = False
        for line in response:
            at_s = time.perf_counter() - sent
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise ServerProblem(f"{self._client.url} gave up: {error_text(chunk)}")
            complete = chunk["meta_info"]["finish_reason"] is not None
            yield at_s, chunk
        if not complete and not self.closed:
            raise ServerProblem(f"{self._client.url} closed the stream before the answer was complete")


def describe_status(where: str, status: int, body: bytes) -> str:
    """Return one readable line for an answer other than 200."""
    try:
        said = error_text(json.loads(body))
    except ValueError:
        said = body.decode("utf-8", errors="replace").strip().splitlines()[0][:200] if body.strip() else ""
    said = f": {said}" if said else ""
    if status == 404:
        return f"{where} does not exist (404): is this an SGLang server?"
    if status >= 500:
        return f"{where} failed with status {status}{said}"
    return f"{where} refused the request with status {status}{said}"


def error_text(document: Any) -> str:
    """Return the message inside one of the shapes in which SGLang reports errors."""
    if isinstance(document, dict):
        for key in ("error", "message", "detail"):
            if key in document:
                return error_text(document[key])
    return str(document)[:500]
