"""The one shape of every start-up refusal, and the nearest-match helper behind unknown-key errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Refusal(ValueError):
    """Say in one line what was given, what is allowed, and how to fix it.

    Raised at start-up (server, trainer, CLI) for anything that cannot work; never at run time for a user's request.
    """

    def __init__(self, given: str, allowed: str, fix: str) -> None:
        self.given = given
        self.allowed = allowed
        self.fix = fix
        super().__init__(f"{given}; {allowed}: {fix}")


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return ``' (did you mean X?)'`` for the closest allowed name, or an empty string."""
    match = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def refuse_unknown(where: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse the first name in ``given`` that is not in ``allowed``, naming the nearest match.

    Raises:
        Refusal: if any name is unknown.
    """
    allowed = sorted(allowed)
    for name in given:
        if name not in allowed:
            raise Refusal(
                f"{where} has unknown key {name!r}{nearest(name, allowed)}",
                f"known keys are {', '.join(allowed)}",
                "remove or correct the key",
            )
