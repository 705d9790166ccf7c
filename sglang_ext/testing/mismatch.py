"""The mismatch rule: when may two greedy texts differ?

Two exact implementations may break a tie differently, because sums are taken in another order. So the first token at
which two outputs differ is judged by the plain server: both continuations are read as prompts (teacher forcing), and
the difference is a failure unless the two tokens' log-probabilities are closer than floating point can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.testing.server import Request, Server

TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest log-probability gap that still counts as a tie, by the dtype of the servers."""


@dataclass(frozen=True)
class Mismatch:
    """The first difference of two outputs and what the plain server thinks of it.

    Attributes:
        position: index of the first differing output token.
        expected, got: the two tokens there; ``None`` where an output had ended.
        gap: difference of their log-probabilities in nats; infinite where an output had ended.
    """

    position: int
    expected: int | None
    got: int | None
    gap: float

    def is_tie(self, dtype: str = "float32") -> bool:
        """Return whether the gap is within what ``dtype`` can tell apart."""
        return self.gap < TOLERANCE[dtype]


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the index of the first difference of two token lists, or None if they are equal."""
    for position, (left, right) in enumerate(zip(expected, got, strict=False)):
        if left != right:
            return position
    return None if len(expected) == len(got) else min(len(expected), len(got))


def judge(plain: Server, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]) -> Mismatch | None:
    """Compare two greedy outputs of one prompt; ask ``plain`` about the first difference.

    Args:
        plain: a server that decodes without speculation.
        prompt: the prompt's token ids.
        expected: token ids of the plain output.
        got: token ids of the output under test.
    """
    position = first_difference(expected, got)
    if position is None:
        return None
    if position >= len(expected) or position >= len(got):
        ended = [tokens[position] if position < len(tokens) else None for tokens in (expected, got)]
        return Mismatch(position, ended[0], ended[1], float("inf"))
    prefix = [*prompt, *expected[:position]]
    left, right = (forced_logprobs(plain, prefix, [token])[0] for token in (expected[position], got[position]))
    return Mismatch(position, expected[position], got[position], abs(left - right))


def forced_logprobs(plain: Server, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Return the log-probability of each token of ``output`` after ``prompt``, read by prefill (nats)."""
    reply = plain.generate(
        Request(
            [*prompt, *output],
            {"max_new_tokens": 1},
            {"return_logprob": True, "logprob_start_len": len(prompt) - 1},
        )
    )
    rows = reply.meta["input_token_logprobs"][-len(output) :]
    if [row[1] for row in rows] != list(output):
        raise AssertionError(f"the server scored tokens {[row[1] for row in rows]}, not {list(output)}")
    return [float(row[0]) for row in rows]
