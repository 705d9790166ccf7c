"""Sampling parameters: each one holds at every position of a block, and sampling really samples."""

from __future__ import annotations

from collections import Counter

import pytest

from sglang_ext.testing.laws import assert_identical, assert_same
from sglang_ext.testing.prompts import PROMPTS, requests
from sglang_ext.testing.sampling import POSITIONS, assert_same_law, chi_square_p, chi_square_tail
from sglang_ext.testing.server import Request
from sglang_ext.testing.speculators import FEW, Answers, Speculator

few = pytest.mark.parametrize("speculator", FEW, indirect=True)


@few
def test_logit_bias_ban(speculator: Speculator, reference: Answers) -> None:
    """Law S1: banned tokens never appear, and the rest equals plain under the same ban."""
    for request, whole in zip(requests(4), reference(requests(4)), strict=True):
        banned = [token for token, _ in Counter(whole.ids).most_common(4)]
        bias = {str(token): -100.0 for token in banned}
        asked = [Request(request.prompt, {"max_new_tokens": 20, "logit_bias": bias})]
        (got,) = speculator.ask(asked)
        assert not set(banned) & set(got.ids), (banned, got.ids)
        assert_identical(reference(asked)[0], got, speculator.name)


@few
@pytest.mark.parametrize(
    "penalty",
    ({"frequency_penalty": 1.5}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.3}),
    ids=lambda p: next(iter(p)),
)
def test_penalties(speculator: Speculator, reference: Answers, penalty: dict[str, float]) -> None:
    """Law S2: penalties count every token of the output, also those accepted in one step."""
    asked = requests(6, **penalty)
    free = reference(requests(6))
    expected = reference(asked)
    assert any(e.ids != f.ids for e, f in zip(expected, free, strict=True)), "the penalty must change something"
    # A request without penalties rides along in the same batch.
    extra = requests(8)[6:]
    got = speculator.ask([*asked, *extra])
    for left, right in zip([*expected, *reference(extra)], got, strict=True):
        assert_identical(left, right, f"{speculator.name} {penalty}")


@few
@pytest.mark.parametrize("narrow", ({"top_k": 1}, {"top_p": 1e-4}, {"min_p": 1.0}), ids=("top_k", "top_p", "min_p"))
def test_narrow_sampling_is_greedy(speculator: Speculator, reference: Answers, narrow: dict[str, float]) -> None:
    """Laws S5 and S6: temperature 1 with only one token left to choose from equals greedy."""
    greedy = requests(10)
    asked = [
        speculator.request(Request(r.prompt, {**r.sampling, "temperature": 1.0, **narrow}), expected)
        for r, expected in zip(greedy, reference(greedy), strict=True)
    ]
    replies = speculator.server.generate_all(asked)
    assert_same(speculator.plain, greedy, reference(greedy), replies, f"{speculator.name} {narrow}")


@pytest.mark.parametrize("speculator", ("oracle", "noise", "sequential"), indirect=True)
def test_temperature_one_samples_as_plain_does(speculator: Speculator, reference: Answers) -> None:
    """Law S4: the first tokens at temperature 1 are distributed as the plain server's (chi-square)."""
    request = Request(PROMPTS[15], {"max_new_tokens": POSITIONS + 1})
    transcript = reference([request])[0]
    sampled = Request(request.prompt, {**request.sampling, "temperature": 1.0, "ignore_eos": True})
    assert_same_law(speculator.plain, speculator.server, sampled, speculator.request(sampled, transcript))


def test_chi_square_table() -> None:
    """The helper agrees with the textbook table."""
    assert abs(chi_square_tail(3.841, 1) - 0.05) < 1e-3
    assert abs(chi_square_tail(18.307, 10) - 0.05) < 1e-3
    assert chi_square_p([1] * 50 + [2] * 50, [1] * 50 + [2] * 50) == 1.0
    assert chi_square_p([1] * 90 + [2] * 10, [1] * 10 + [2] * 90) < 1e-9
