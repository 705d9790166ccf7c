"""Law M2: whatever a server was asked, and however the asking ended, an empty cache holds nothing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from sglang_ext.testing.laws import assert_idle
from sglang_ext.testing.prompts import LONG_TEXT, PROMPTS
from sglang_ext.testing.server import Reply, Request, Server


def assert_conserves(server: Server, count: int = 200) -> None:
    """Send ``count`` mixed requests, some aborted, some left by their client; then the pool must be empty.

    Raises:
        AssertionError: tokens are still held after a flush, or the server is not healthy.
    """
    asked = [mixed_request(i) for i in range(count)]
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda pair: _send(server, *pair), enumerate(asked)))
    assert_idle(server)
    server.flush()
    load = server.load()
    assert load["num_used_tokens"] == 0 == load["num_total_tokens"], load
    assert server.healthy()


def named_request(name: str, **sampling: object) -> Request:
    """Return a request that can be aborted by its name."""
    return Request(f"{name}: once upon a time", {"ignore_eos": True, **sampling}, {"rid": name})


def mixed_request(index: int) -> Request:
    """Return one of eight kinds of request, none of them long."""
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"stop": [" the", "."]},
        {"frequency_penalty": 0.5},
        {"regex": "[a-z]{3,6}"},
        {"min_new_tokens": 3, "max_new_tokens": 4},
        {"ignore_eos": True, "max_new_tokens": 9},
        {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
    ]
    fields = {"return_logprob": True} if index % 11 == 0 else {}
    prompt = PROMPTS[index % len(PROMPTS)] if index % 5 else LONG_TEXT[: 40 + 7 * (index % 60)]
    return Request(prompt, {"max_new_tokens": 1 + index % 6, **kinds[index % len(kinds)]}, fields)


def _send(server: Server, index: int, request: Request) -> Reply | None:
    """Send a request; every 13th client leaves after its first chunk, every 17th is aborted."""
    if index % 13 == 0:
        response = server.post("/generate", {**request.body(), "stream": True}, stream=True)
        next(response.iter_lines())
        response.close()
        return None
    if index % 17 == 0:
        named = Request(request.prompt, request.sampling, {**request.fields, "rid": f"mixed {index}"})
        threading.Timer(0.2, server.abort, [f"mixed {index}"]).start()
        return server.generate(named)
    return server.generate(request)
