"""A small HTTP client for ``/generate``: exact token ids in, token ids and times out.

The measured requests stream with a long stream interval: the server sends the first token at once and the rest at the
end, so both ends of decoding are timed while neither side spends time on per-token messages.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sglang_ext.core.records import StepRecord, read_records
from sglang_ext.core.refusal import Refusal

STREAM_INTERVAL = 1_000_000
TIMEOUT_S = 900.0


class ServerError(RuntimeError):
    """The server answered a request with an error."""


@dataclass(frozen=True)
class Sampling:
    """How the measured requests decode.

    Attributes:
        max_new_tokens: cap per request.
        temperature: 0 decodes greedily.
        custom_params: sent as they are; ``{"speculative": {"mode": "plain"}}`` switches speculation off.
    """

    max_new_tokens: int
    temperature: float = 0.0
    custom_params: dict[str, Any] | None = None

    def body(self, input_ids: Sequence[int], stream: bool) -> dict[str, Any]:
        """Return the request body for ``/generate``."""
        params: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        if self.custom_params is not None:
            params["custom_params"] = self.custom_params
        if stream:
            params["stream_interval"] = STREAM_INTERVAL
        return {"input_ids": list(input_ids), "sampling_params": params, "stream": stream}


@dataclass(frozen=True)
class Completion:
    """One answered request; times are ``perf_counter`` seconds of the client.

    Attributes:
        output_ids: generated token ids.
        text: their text.
        sent_s, first_s, last_s: when the request was sent, and when its first and last tokens arrived.
        finish: the server's finish reason.
        spec: the ``spec_*`` fields of ``meta_info``; empty under plain decoding.
    """

    output_ids: tuple[int, ...]
    text: str
    sent_s: float
    first_s: float
    last_s: float
    finish: str
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return len(self.output_ids)

    @property
    def verify_count(self) -> int:
        """Target passes that decoded this request, the prefill left out; 0 when the server does not count them."""
        return int(self.spec.get("spec_verify_ct", 0))


class Client:
    """Talks to one server; safe to use from several threads (every request has its own connection)."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:  # a port that is no number, or too large
            scheme, host, port = "", None, None
        if scheme != "http" or host is None:
            raise Refusal(f"--url {url!r} is no address", "http://HOST:PORT is allowed", "correct it")
        self._host = host
        self._port = port or 80
        self.url = f"http://{host}:{self._port}"

    def is_ready(self) -> bool:
        """Return whether the server answers its health check."""
        try:
            return self._call("GET", "/health")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def get_json(self, path: str) -> dict[str, Any]:
        """Return a JSON document such as ``/server_info``."""
        status, body = self._call("GET", path)
        if status != 200:
            raise ServerError(f"{self.url}{path} answered {status}: {body[:500]!r}")
        return dict(json.loads(body))

    def flush_cache(self) -> None:
        """Drop cached prefixes so that the next prompts are read from the start."""
        for _ in range(100):
            status, body = self._call("POST", "/flush_cache")
            if status == 200:
                return
            time.sleep(0.05)  # the last request is still being released
        raise ServerError(f"{self.url}/flush_cache answered {status}: {body[:500]!r}")

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send one unstreamed ``/generate`` request and return the whole answer."""
        status, answer = self._call("POST", "/generate", body)
        if status != 200:
            raise ServerError(f"{self.url}/generate answered {status}: {answer[:500]!r}")
        return dict(json.loads(answer))

    def records(self, input_ids: Sequence[int], sampling: Sampling, options: dict[str, Any]) -> list[StepRecord]:
        """Answer one prompt with step records switched on and return them."""
        custom = {"speculative": {**options, "records": True}}
        body = Sampling(sampling.max_new_tokens, sampling.temperature, custom).body(input_ids, stream=False)
        meta = self.post(body)["meta_info"]
        if "speculative" not in meta:
            raise ServerError(f"{self.url} returned no step records; is it a FlexDraft server?")
        return read_records(meta["speculative"])

    def generate(self, input_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Answer one prompt, timing its first and last token."""
        sent = time.perf_counter()
        output_ids: tuple[int, ...] = ()
        text, first, meta = "", None, {}
        for chunk in self._stream(sampling.body(input_ids, stream=True)):
            now = time.perf_counter()
            first = now if first is None else first
            meta = chunk["meta_info"]
            ids = tuple(chunk["output_ids"])
            # Chunks hold everything so far, or only what is new (--incremental-streaming-output).
            whole = len(ids) == meta["completion_tokens"]
            output_ids = ids if whole else output_ids + ids
            text = chunk["text"] if whole else text + chunk["text"]
        if first is None:
            raise ServerError(f"{self.url}/generate streamed nothing")
        reason = (meta.get("finish_reason") or {}).get("type", "")
        spec = {key: value for key, value in meta.items() if key.startswith("spec_")}
        return Completion(output_ids, text, sent, first, now, reason, spec)

    def generate_together(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """Answer several prompts at once, all sent at the same moment, and return them in the order given."""
        if len(prompts) == 1:
            return [self.generate(prompts[0], sampling)]
        answers: list[Completion | BaseException | None] = [None] * len(prompts)
        start = threading.Barrier(len(prompts))

        def answer(index: int) -> None:
            start.wait()
            try:
                answers[index] = self.generate(prompts[index], sampling)
            except (ServerError, OSError, http.client.HTTPException, ValueError, KeyError) as error:
                answers[index] = error

        threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done = []
        for item in answers:
            if not isinstance(item, Completion):
                raise ServerError(f"a request to {self.url} failed: {item!r}")
            done.append(item)
        return done

    def logprobs_after(self, input_ids: Sequence[int], candidates: Sequence[int]) -> list[float]:
        """Return the log-probabilities of candidate next tokens after ``input_ids``, from one plain prefill.

        The prefix cache is emptied first: how much of a prompt is cached changes the rounding of the rest.
        """
        self.flush_cache()
        body = Sampling(1).body(input_ids, stream=False)
        body.update(return_logprob=True, logprob_start_len=-1, token_ids_logprob=list(candidates))
        meta = self.post(body)["meta_info"]
        by_id = {int(entry[1]): float(entry[0]) for entry in meta["output_token_ids_logprobs"][0]}
        return [by_id[token] for token in candidates]

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        connection = self._connect()
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(f"{self.url}/generate answered {response.status}: {response.read()[:500]!r}")
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(f"{self.url}/generate: {chunk['error']}")
                yield chunk
        finally:
            connection.close()
