"""The client against a local server that speaks the same protocol."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sglang_ext.bench.client import Client, Sampling, ServerError
from sglang_ext.core.refusal import Refusal
from tests.bench.fake_server import FakeServer, serving


def echo(body: dict[str, Any]) -> dict[str, Any]:
    ids = [token + 1 for token in body["input_ids"]]
    meta = {"completion_tokens": len(ids), "finish_reason": {"type": "length"}, "spec_verify_ct": 2, "id": "x"}
    return {"output_ids": ids, "text": "".join(chr(97 + token) for token in ids), "meta_info": meta}


@pytest.mark.parametrize("incremental", [False, True])
def test_a_streamed_answer_is_whole_whichever_way_it_is_streamed(incremental: bool) -> None:
    with serving(FakeServer(echo, incremental)) as fake:
        answer = Client(fake.url).generate([1, 2, 3], Sampling(3))
    assert answer.output_ids == (2, 3, 4)
    assert answer.text == "cde"
    assert answer.spec == {"spec_verify_ct": 2}
    assert answer.verify_count == 2
    assert answer.finish == "length"
    assert answer.sent_s <= answer.first_s <= answer.last_s


def test_the_request_carries_the_sampling_as_it_is() -> None:
    custom = {"speculative": {"mode": "plain"}}
    with serving(FakeServer(echo)) as fake:
        Client(fake.url).generate([5], Sampling(7, 0.5, custom))
    params = fake.bodies[0]["sampling_params"]
    assert (params["max_new_tokens"], params["temperature"], params["custom_params"]) == (7, 0.5, custom)


def test_prompts_sent_together_are_in_flight_together_and_answered_in_order() -> None:
    barrier = threading.Barrier(4)

    def slow(body: dict[str, Any]) -> dict[str, Any]:
        barrier.wait(timeout=20)  # breaks unless all four are in flight at once
        return echo(body)

    with serving(FakeServer(slow)) as fake:
        answers = Client(fake.url).generate_together([[number] for number in range(4)], Sampling(1))
    assert [answer.output_ids for answer in answers] == [(1,), (2,), (3,), (4,)]
    assert fake.most_at_once == 4


def test_a_refused_request_raises_the_servers_own_words() -> None:
    with serving(FakeServer(lambda body: {"status": 400, "error": "unknown mode"})) as fake:
        with pytest.raises(ServerError, match=r"400.*unknown mode"):
            Client(fake.url).generate([1], Sampling(1))
        with pytest.raises(ServerError, match="unknown mode"):
            Client(fake.url).generate_together([[1], [2]], Sampling(1))


def test_scores_come_back_in_the_order_of_the_candidates() -> None:
    def scores(body: dict[str, Any]) -> dict[str, Any]:
        rows = [[-0.5 * token, token, None] for token in sorted(body["token_ids_logprob"])]
        return {"output_ids": [0], "text": "", "meta_info": {"output_token_ids_logprobs": [rows]}}

    with serving(FakeServer(scores)) as fake:
        assert Client(fake.url).logprobs_after([1, 2], [9, 4]) == [-4.5, -2.0]


def test_a_server_without_records_is_named() -> None:
    with serving(FakeServer(echo)) as fake, pytest.raises(ServerError, match="no step records"):
        Client(fake.url).records([1], Sampling(1), {})


def test_a_dead_address_is_not_ready() -> None:
    with serving(FakeServer(echo)) as fake:
        client = Client(fake.url)
        assert client.is_ready()
    assert not client.is_ready()


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(Refusal, match="--url"):
        Client("ftp://example")


@pytest.mark.parametrize("url", ("http://host:99999", "host:port", "http://[::1", "http://"))
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(Refusal, match="--url"):
        Client(url)
