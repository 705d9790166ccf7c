"""The methods a comparison can serve, as ``--methods`` names them: ``flexdraft,dflare=DIR,dflash=DIR,ngram``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.core.refusal import Refusal, refuse_unknown

#: Method -> the server's ``--speculative-algorithm``. A DFlash drafter is one of those that ``dflare`` serves.
ALGORITHMS = {"flexdraft": "flexdraft", "dflare": "dflare", "dflash": "dflare", "ngram": "NGRAM"}
#: SGLang's own: no drafter, none of this package's options, requests or step records.
STOCK = ("ngram",)
#: What no flag's default provides.
NGRAM_FLAGS = ("--speculative-num-draft-tokens", "8")


@dataclass(frozen=True)
class ServedMethod:
    """A method and the drafter that was named for it.

    Attributes:
        name: one of :data:`ALGORITHMS`.
        drafter: its folder, or None for the one shipped for the target.
    """

    name: str
    drafter: str | None = None

    @property
    def is_stock(self) -> bool:
        """Whether SGLang serves it without this package."""
        return self.name in STOCK

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes it drafts in; empty where no request can choose."""
        if self.is_stock:
            return ()
        return ("parallel", "sequential") if self.name == "flexdraft" else ("sequential",)

    def arguments(self, options: str | None) -> list[str]:
        """Return the flags that add this method to a plain server; ``options`` is for this package's methods only."""
        arguments = ["--speculative-algorithm", ALGORITHMS[self.name]]
        if self.is_stock:
            return [*arguments, *NGRAM_FLAGS]
        if self.drafter is not None:
            arguments += ["--speculative-draft-model-path", self.drafter]
        if options is not None:
            arguments += ["--speculative-adaptive-config", options]
        return arguments


def parse_methods(words: Sequence[str], drafter: str | None) -> list[ServedMethod]:
    """Read the words of ``--methods``; ``drafter`` (``--drafter``) belongs to the first method.

    Raises:
        Refusal: on an unknown method, one named twice, or a drafter where none is used or one is missing.
    """
    found: list[ServedMethod] = []
    for word in words:
        name, sign, folder = word.partition("=")
        refuse_unknown("--methods", [name], ALGORITHMS)
        if name in (method.name for method in found):
            raise Refusal(f"--methods has {name} twice", "each method once", "drop one")
        if sign and (not folder or name in STOCK):
            allowed = "no drafter" if name in STOCK else "the drafter's folder behind ="
            raise Refusal(f"--methods {word}", f"{allowed} for {name}", "correct it")
        if not found and drafter is not None:
            if sign or name in STOCK:
                raise Refusal(f"--drafter {drafter} and --methods {word}", "one drafter for a method", "drop one")
            folder = drafter
        found.append(ServedMethod(name, folder or None))
    for method in found:
        if method.name == "dflash" and method.drafter is None:
            raise Refusal("--methods dflash", "the drafter's folder, none is shipped", "write dflash=DIR")
    return found


def parse_method(word: str, drafter: str | None) -> ServedMethod:
    """Read ``--method`` of the commands that look at one of this package's methods.

    Raises:
        Refusal: as :func:`parse_methods`, and on one of SGLang's own.
    """
    (method,) = parse_methods([word], drafter)
    if method.is_stock:
        ours = ", ".join(name for name in ALGORITHMS if name not in STOCK)
        raise Refusal(f"--method {word}", f"one of this package's methods: {ours}", "name one of them")
    return method
