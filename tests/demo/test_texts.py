"""Whatever the tokenizer does, the shares of the tokens join to the streamed text."""

from __future__ import annotations

import random

from demo.texts import REPLACEMENT, TokenTexts, Vocabulary


def byte_vocabulary(calls: list[int] | None = None) -> Vocabulary:
    """Tokens 0..255 are bytes; 256 is a special token; nothing above."""

    def decode(sequences: list[list[int]], special: bool) -> list[str]:
        if calls is not None:
            calls.append(len(sequences))
        return [_decode(sequence, special) for sequence in sequences]

    return Vocabulary(decode)


def _decode(sequence: list[int], special: bool) -> str:
    parts, run = [], bytearray()
    for token in [*sequence, -1]:
        if 0 <= token < 256:
            run.append(token)
            continue
        parts.append(run.decode("utf-8", errors="replace"))
        run = bytearray()
        if token == 256 and special:
            parts.append("<end>")
    return "".join(parts)


TEXT = "Grüße: 世界 👨‍👩‍👧 done\n"


def stream(ids: list[int], cuts: list[int]) -> list[tuple[list[int], str]]:
    """Cut ids at random places; the text of a chunk holds complete characters only, as servers stream them."""
    chunks, sent, start = [], 0, 0
    for end in [*cuts, len(ids)]:
        text = _decode(ids[:end], False).rstrip(REPLACEMENT)
        chunks.append((ids[start:end], text[sent:]))
        sent, start = len(text), end
    return chunks


def test_shares_join_to_the_text_for_any_chunks() -> None:
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    rng, ids = random.Random(seed), [*TEXT.encode(), 256]
    for _ in range(50):
        cuts = sorted(rng.sample(range(1, len(ids)), rng.randrange(0, 12)))
        texts, shares = TokenTexts(byte_vocabulary()), []
        for part, text in stream(ids, cuts):
            shares += texts.feed(part, text)
        assert len(shares) == len(ids)
        assert "".join(shares) == TEXT
        assert all(REPLACEMENT not in share for share in shares)


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    texts = TokenTexts(byte_vocabulary())
    first, second, third = "世".encode()
    assert texts.feed([first], "") == [""]
    assert texts.feed([second, third, ord("!")], "世!") == ["", "世", "!"]


def test_special_tokens_are_spelled_only_where_asked() -> None:
    vocabulary = byte_vocabulary()
    assert vocabulary.visible([65, 256]) == ["A", ""]
    assert vocabulary.spelled([65, 256]) == ["A", "<end>"]


def test_a_tokenizer_that_looks_at_neighbours_keeps_the_text() -> None:
    lonely = Vocabulary(lambda sequences, special: ["x" * len(sequence) for sequence in sequences])
    assert TokenTexts(lonely).feed([1, 2, 3], "a b c") == ["a b c", "", ""]


def test_after_prefetch_nothing_is_asked_again() -> None:
    calls: list[int] = []
    vocabulary = byte_vocabulary(calls)
    vocabulary.prefetch()
    asked = len(calls)
    vocabulary.visible(range(257))
    vocabulary.spelled(range(257))
    vocabulary.prefetch()
    assert len(calls) == asked
