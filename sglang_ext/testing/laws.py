"""Laws any speculative server can be held to, as functions that raise ``AssertionError`` with both sides.

They need nothing of the server but HTTP. Three kinds: an output equals the plain server's (:func:`assert_same`), the
speculative counters of one reply agree with each other (:func:`assert_identities`), and the per-step records line up
with the tokens (:func:`assert_records`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from sglang_ext.core.records import StepRecord
from sglang_ext.testing.mismatch import judge
from sglang_ext.testing.server import Reply, Request, Server

RECORDS_KEY = "speculative"


def assert_same(
    plain: Server, requests: Sequence[Request], expected: Sequence[Reply], got: Sequence[Reply], what: str = ""
) -> None:
    """Hold greedy replies to the plain server's: ids, text, finish reason and token count, ties apart.

    After a tie (see :mod:`sglang_ext.testing.mismatch`) the two texts go their own ways and nothing more is compared.

    Raises:
        AssertionError: naming the prompt, the position, both tokens and their gap.
    """
    for request, left, right in zip(requests, expected, got, strict=True):
        if left.ids == right.ids:
            assert_identical(left, right, f"{what} {request.prompt!r}")
            continue
        prompt = plain.tokenize(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
        difference = judge(plain, prompt, left.ids, right.ids)
        assert difference is not None and difference.is_tie(), (
            f"{what} {request.prompt!r}: {difference}\nplain {left.ids} {left.finish} {left.text!r}\n"
            f"got   {right.ids} {right.finish} {right.text!r}"
        )


def assert_identical(expected: Reply, got: Reply, what: str = "") -> None:
    """Hold what a client sees of two replies to each other (ids, text, finish reason, count); no tie is allowed."""
    left, right = _visible(expected), _visible(got)
    assert left == right, f"{what}\nplain {left}\ngot   {right}"


def assert_identities(reply: Reply, block_size: int) -> None:
    """Hold the speculative counters of one reply to each other.

    Accept length is completion tokens per verification; the histogram counts verifications; its weighted sum counts
    correct drafts; what was proposed is what was verified. The last block may have been cut by the end of the output.

    Args:
        reply: a reply with at least one decoding step.
        block_size: K of the server; at most K - 1 drafts are verified per step.
    """
    meta = reply.meta
    steps = meta["spec_verify_ct"]
    assert steps >= 1, meta
    _close(meta["spec_accept_length"], reply.completion_tokens / steps, "accept length", meta)
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(histogram) == steps, ("histogram counts verifications", meta)
    correct = meta["spec_num_correct_drafts"]
    assert sum(i * count for i, count in enumerate(histogram)) == correct, ("histogram counts drafts", meta)
    # One token per step is the target's own, one came from the prefill; the last block may be cut short.
    assert 0 <= correct + steps + 1 - reply.completion_tokens < block_size, ("tokens", reply.completion_tokens, meta)
    proposed = meta["spec_num_proposed_drafts"]
    assert correct <= proposed <= steps * (block_size - 1), ("proposed", meta)
    if proposed:
        _close(meta["spec_accept_rate"], correct / proposed, "accept rate", meta)


def read_aligned(reply: Reply) -> list[tuple[int, StepRecord]]:
    """Return each step's record with the index of the first token it committed."""
    elements = reply.meta[RECORDS_KEY]
    return [(index, StepRecord.from_dict(element)) for index, element in enumerate(elements) if element is not None]


def assert_records(reply: Reply, block_size: int) -> list[StepRecord]:
    """Hold the step records of one reply to its tokens, and return them.

    One element per completion token; every step's record stands at its first token, and the distance to the next is
    what the step committed: accepted drafts and the target's own token. Where drafts are in the output they are the
    accepted ones, and the token after them is the bonus.
    """
    elements = reply.meta[RECORDS_KEY]
    assert len(elements) == reply.completion_tokens == len(reply.ids), (len(elements), reply.meta)
    steps = read_aligned(reply)
    assert steps[0][0] == 0 and steps[0][1].mode == "prefill", steps[:1]
    ends = [start for start, _ in steps[1:]] + [len(reply.ids)]
    for (start, record), end in zip(steps, ends, strict=True):
        committed = [*record.draft_ids[: record.accepted], record.bonus]
        assert 0 <= record.accepted <= record.verify_length < block_size, record
        assert len(record.draft_ids) == len(record.confidence) == record.verify_length, record
        kept = end - start
        assert committed[:kept] == reply.ids[start:end], (start, record, reply.ids)
        last = end == len(reply.ids)
        assert kept == len(committed) or (last and kept < len(committed)), (start, end, record, reply.finish)
        assert record.step_ms > 0 and record.batch_size >= 1, record
    records = [record for _, record in steps]
    verified = [record for record in records if record.mode != "prefill"]
    if verified and RECORDS_KEY in reply.meta and "spec_verify_ct" in reply.meta:
        assert len(verified) == reply.meta["spec_verify_ct"], (len(verified), reply.meta)
        assert sum(r.verify_length for r in verified) == reply.meta["spec_num_proposed_drafts"], reply.meta
    return records


def assert_stream(chunks: Sequence[Reply], whole: Reply) -> None:
    """Hold the chunks of a stream to the whole answer: growing prefixes, no replacement character, equal end."""
    for left, right in pairwise(chunks):
        assert right.text.startswith(left.text), (left.text, right.text)
    # Only the last chunk may end inside a character, where the answer itself was cut there.
    for chunk in chunks[:-1]:
        assert "�" not in chunk.text, chunk.text
    assert chunks[-1].text == whole.text, (chunks[-1].text, whole.text)
    assert chunks[-1].completion_tokens == whole.completion_tokens, (chunks[-1].meta, whole.meta)
    assert chunks[-1].finish == whole.finish, (chunks[-1].finish, whole.finish)


def assert_idle(server: Server, within_s: float = 5.0) -> None:
    """Hold an idle server to memory conservation: nothing runs, nothing waits, no token of the pool is held.

    Tokens the prefix cache could give up at once do not count as used; :meth:`Server.flush` must leave none at all.
    """
    eventually(lambda: _busy(server) == {}, within_s, lambda: f"still in use after {within_s} s: {_busy(server)}")


def eventually(holds: Callable[[], bool], within_s: float, say: Callable[[], str]) -> float:
    """Wait until ``holds`` and return the seconds that took.

    Raises:
        AssertionError: with ``say()``, after ``within_s`` seconds.
    """
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < within_s, say()
        time.sleep(0.1)
    return time.monotonic() - started


def _visible(reply: Reply) -> tuple[list[int], str, dict[str, object], int]:
    return reply.ids, reply.text, reply.finish, reply.completion_tokens


def _busy(server: Server) -> dict[str, int]:
    load = server.load()
    keys = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return {key: load[key] for key in keys if load[key]}


def _close(given: float, expected: float, what: str, context: object) -> None:
    assert abs(given - expected) <= 1e-6 * max(1.0, abs(expected)), (what, given, expected, context)
