"""The scripts of the scripted drafters, free of any engine.

A server started with ``--speculative-algorithm scripted`` drafts by script, chosen per request:
``custom_params={"speculative": {"script": "oracle"}, "speculative_transcript": [ids...]}``, where the transcript is the
plain server's output for the same request. The law they serve: *the output must not depend on the drafter.*
"""

from __future__ import annotations

import random
from collections.abc import Sequence

SCRIPTS = ("oracle", "wrong", "half", "eos", "noise", "bad", "nan")
TRANSCRIPT_KEY = "speculative_transcript"


def draft(
    script: str, *, transcript: Sequence[int], start: int, width: int, vocabulary: int, eos: int
) -> tuple[list[int], list[float]]:
    """Return ``width`` draft ids and confidences for output positions ``start .. start + width - 1``.

    Args:
        script: ``oracle`` replays the transcript; ``wrong`` always differs from it; ``half`` is right, then wrong;
            ``eos`` drafts end-of-sequence; ``noise`` draws random ids; ``bad`` drafts ids outside the vocabulary;
            ``nan`` reports NaN confidences.
        transcript: the output the target is expected to produce; past its end the oracle drafts ``eos``.
        start: output position of the first draft.
        width: number of drafts.
        vocabulary: V.
        eos: an end-of-sequence id.

    Raises:
        ValueError: unknown script.
    """
    truth = [transcript[i] if i < len(transcript) else eos for i in range(start, start + width)]
    wrong = [(token + 1) % vocabulary for token in truth]
    sure = [1.0] * width
    if script == "oracle":
        return truth, sure
    if script == "wrong":
        return wrong, sure
    if script == "half":
        return truth[: width // 2] + wrong[width // 2 :], sure
    if script == "eos":
        return [eos] * width, sure
    if script == "noise":
        source = random.Random(start * 7919 + len(transcript))
        return [source.randrange(vocabulary) for _ in range(width)], [source.random() for _ in range(width)]
    if script == "bad":
        return [vocabulary + i if i % 2 else -1 - i for i in range(width)], sure
    if script == "nan":
        return truth, [float("nan")] * width
    raise ValueError(f"script is {script!r}; allowed: {', '.join(SCRIPTS)}")
