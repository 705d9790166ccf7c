"""Keeps streamed text from repeating itself when a step ends inside a character.

While the last character is incomplete, the host sends the printable beginning of the pending text and remembers how
much that was. Its rule for "printable" looks at the last letters only, so with several new tokens per step the
printable part can become shorter than what was sent already, and the difference is sent twice.
"""

from __future__ import annotations

HOOK = "sglang.utils.find_printable_text"


def printable_text(text: str) -> str:
    """Return all of ``text`` but an incomplete character at its end (shown as U+FFFD); replaces the host's rule.

    Law: as a text grows, its printable part only grows, so what was sent stays a prefix of what will be sent.
    """
    return text.rstrip("�")
