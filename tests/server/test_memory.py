"""Memory of the servers that draft: nothing is lost, and what a client gives up is free at once (laws M2 and M3)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.testing.conservation import assert_conserves, named_request
from sglang_ext.testing.laws import assert_idle, eventually
from sglang_ext.testing.prompts import PROMPTS
from sglang_ext.testing.server import Request, Server
from sglang_ext.testing.speculators import DFLARE

DRAFTING = ("flexdraft", DFLARE)
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", DRAFTING)
def test_no_token_is_lost(drafting_servers: dict[str, Server], name: str) -> None:
    """Law M2 with pages of one token."""
    assert_conserves(drafting_servers[name])


@pytest.mark.parametrize("name", DRAFTING)
def test_client_gone(drafting_servers: dict[str, Server], name: str) -> None:
    """Law M3: when the client closes its connection, the request's tokens are free within 5 s."""
    server = drafting_servers[name]
    server.flush()
    body = {**Request(PROMPTS[12], {"max_new_tokens": 1500, "ignore_eos": True}).body(), "stream": True}
    response = server.post("/generate", body, stream=True)
    lines = (line for line in response.iter_lines() if line)
    # The load is published every few steps only: read on until it shows the request.
    eventually(lambda: bool(next(lines)) and server.load()["num_running_reqs"] == 1, 60, lambda: f"{server.load()}")
    response.close()
    assert_idle(server, within_s=5.0)


@pytest.mark.parametrize("name", DRAFTING)
def test_abort_while_decoding(drafting_servers: dict[str, Server], name: str) -> None:
    """Law M3: /abort_request ends a decoding request, and nobody else's."""
    server = drafting_servers[name]
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(server.generate, named_request("decoding", max_new_tokens=1500))
        other = pool.submit(server.generate, named_request("other", max_new_tokens=40))
        eventually(lambda: server.load()["num_running_reqs"] == 2, 30, lambda: f"{server.load()}")
        server.abort("decoding")
        assert long.result(timeout=10).finish["type"] == "abort"
        assert other.result(timeout=60).finish["type"] == "length"
    assert_idle(server, within_s=5.0)
