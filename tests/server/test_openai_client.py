"""The ``openai`` client against the FlexDraft server: everything it returns equals the plain server's (law W2)."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from sglang_ext.testing.server import Server
from sglang_ext.testing.speculators import MODES

QUESTIONS = ("What is the capital of France?", "Write a haiku about the sea.", "Count from 1 to 10.")


def client(server: Server) -> openai.OpenAI:
    """Return a client of one server."""
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=300, max_retries=0)


def override(mode: str) -> dict[str, Any]:
    """Return the request fields that force one mode."""
    return {"custom_params": {"speculative": {"mode": mode}}}


def chat(server: Server, question: str, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    """Send one question."""
    return client(server).chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=24,
        extra_body=extra,
        **options,
    )


@pytest.mark.parametrize("mode", MODES)
def test_chat(plain: Server, flexdraft: Server, mode: str) -> None:
    """Content, finish reason and usage of chat completions equal plain."""
    for question in QUESTIONS:
        left, right = chat(plain, question), chat(flexdraft, question, override(mode))
        assert right.choices[0].message.content == left.choices[0].message.content
        assert right.choices[0].finish_reason == left.choices[0].finish_reason
        assert right.usage.completion_tokens == left.usage.completion_tokens
        assert right.usage.prompt_tokens == left.usage.prompt_tokens


@pytest.mark.parametrize("mode", MODES)
def test_streamed_chat(plain: Server, flexdraft: Server, mode: str) -> None:
    """Streamed deltas concatenate to the plain content, and the usage at the end is the same."""
    for question in QUESTIONS:
        whole = chat(plain, question)
        chunks = list(chat(flexdraft, question, override(mode), stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
        assert reasons == [whole.choices[0].finish_reason]
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_several_turns(plain: Server, flexdraft: Server) -> None:
    """A conversation that feeds its own answers back stays equal turn by turn."""

    def talk(server: Server) -> list[str]:
        messages: list[Any] = []
        for question in ("Name a fruit.", "What colour is it?", "Name another one."):
            messages.append({"role": "user", "content": question})
            answer = client(server).chat.completions.create(
                model="default", messages=messages, temperature=0, max_tokens=20
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return [message["content"] for message in messages]

    assert talk(flexdraft) == talk(plain)


def test_completions(plain: Server, flexdraft: Server) -> None:
    """Text completions, several prompts at once, with a stop string, echo of usage included."""

    def complete(server: Server) -> Any:
        return client(server).completions.create(
            model="default",
            prompt=["The capital of Italy is", "1, 2, 3, 4,", "def add(a, b):"],
            temperature=0,
            max_tokens=16,
            stop=["\n\n"],
        )

    left, right = complete(plain), complete(flexdraft)
    assert [(c.text, c.finish_reason) for c in right.choices] == [(c.text, c.finish_reason) for c in left.choices]
    assert right.usage.completion_tokens == left.usage.completion_tokens


def test_streamed_completions(plain: Server, flexdraft: Server) -> None:
    """Streamed completions concatenate to the plain text."""
    options: dict[str, Any] = {"model": "default", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 20}
    whole = client(plain).completions.create(**options)
    chunks = client(flexdraft).completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text


def test_logprobs(plain: Server, flexdraft: Server) -> None:
    """Token log-probabilities of the chat route equal plain within fp32."""
    left, right = (
        chat(server, QUESTIONS[0], logprobs=True, top_logprobs=2).choices[0].logprobs.content
        for server in (plain, flexdraft)
    )
    assert [row.token for row in right] == [row.token for row in left]
    assert all(abs(a.logprob - b.logprob) < 1e-3 for a, b in zip(left, right, strict=True))


def test_records_by_the_chat_route(flexdraft: Server) -> None:
    """Step records reach a client of the chat route that asks for them (and for the host's ``meta_info``)."""
    extra = {"custom_params": {"speculative": {"records": True}}, "return_meta_info": True}
    answer = chat(flexdraft, QUESTIONS[0], extra)
    meta = answer.choices[0].meta_info
    assert len(meta["speculative"]) == answer.usage.completion_tokens
    assert meta["speculative"][0]["mode"] == "prefill"


def test_bad_override_is_a_bad_request(flexdraft: Server) -> None:
    """An unknown mode is answered 400 on the OpenAI routes too."""
    with pytest.raises(openai.BadRequestError) as error:
        chat(flexdraft, QUESTIONS[0], override("paralel"))
    assert "paralel" in str(error.value)
    assert flexdraft.healthy()
