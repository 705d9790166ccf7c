"""The text of single tokens, so that the pieces of an answer always join to exactly the text the server streamed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"
PREFETCH_BLOCK = 8192
PREFETCH_MOST = 1 << 19

Detokenize = Callable[[list[list[int]], bool], list[str]]


class Vocabulary:
    """What each token id says, asked from the server and remembered; safe to share between threads.

    Args:
        detokenize: ``(sequences, special) -> texts``, special tokens spelled out if ``special``.
    """

    def __init__(self, detokenize: Detokenize) -> None:
        self.decode = detokenize
        self._spelled: dict[int, str] = {}
        self._visible: dict[int, str] = {}
        self._complete = False

    def prefetch(self) -> None:
        """Learn every token now, so that no later call disturbs a measurement."""
        for start in range(0, PREFETCH_MOST, PREFETCH_BLOCK):
            if self._complete:
                return
            block = list(range(start, start + PREFETCH_BLOCK))
            self._learn(block)
            self._complete = not any(self._spelled[token] for token in block)

    def visible(self, ids: Sequence[int]) -> list[str]:
        """Return what each token adds to a text; nothing for special tokens."""
        self._learn(ids)
        return [self._visible[token] for token in ids]

    def spelled(self, ids: Sequence[int]) -> list[str]:
        """Return the name of each token, special ones included."""
        self._learn(ids)
        return [self._spelled[token] for token in ids]

    def _learn(self, ids: Iterable[int]) -> None:
        new = sorted({token for token in ids if token not in self._visible})
        if new:
            single = [[token] for token in new]
            self._spelled.update(zip(new, self.decode(single, True), strict=True))
            self._visible.update(zip(new, self.decode(single, False), strict=True))


class TokenTexts:
    """Splits a streamed text by token: :meth:`feed` returns one text per id, and their join is the streamed text.

    A character that takes several tokens belongs to the one that completes it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._open: list[int] = []  # tokens of a character not complete yet

    def feed(self, ids: Sequence[int], text: str) -> list[str]:
        """Return the share of ``text`` of each id."""
        if not ids:
            return []
        pieces = self._vocabulary.visible(ids)
        if not self._open and "".join(pieces) == text:
            return pieces
        run = [*self._open, *ids]
        prefixes = self._vocabulary.decode([run[: end + 1] for end in range(len(run))], False)
        shown = [""] + [prefix.rstrip(REPLACEMENT) for prefix in prefixes]
        shares = [after.removeprefix(before) for before, after in itertools.pairwise(shown)][len(self._open) :]
        self._open = run if prefixes[-1].endswith(REPLACEMENT) else []
        if "".join(shares) == text:
            return shares
        # A tokenizer whose pieces depend on their neighbours: keep the text right, give it to the chunk's first token.
        self._open = []
        return [text, *[""] * (len(ids) - 1)]
