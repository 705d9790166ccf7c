"""From what the page's controls hold to :class:`Settings`; what cannot be meant is said, not repaired."""

from __future__ import annotations

from dataclasses import dataclass

from demo.settings import AUTO, Settings

MODES = (AUTO, "parallel", "sequential", "plain")
PRUNING_CHOICES = ("as the server", "cumulative_product", "min_confidence", "none")
MOST_TOKENS = 2048
MOST_BACKGROUND = 15


class BadInput(ValueError):
    """A control holds something that cannot be asked for."""


@dataclass(frozen=True)
class Controls:
    """The raw values of the page's controls, in the page's order."""

    prompt: str
    system: str
    follow_up: bool
    temperature: float
    top_p: float
    max_tokens: float
    seed: str
    drafter: str | None
    mode: str
    pruning: str
    prune_threshold: float
    background: float
    timing: str

    def settings(self, conversation: tuple[tuple[str, str], ...], request_pruning: bool) -> Settings:
        """Return the run's settings.

        Args:
            conversation: messages of the last run with its answer, used for a follow-up.
            request_pruning: whether the server takes pruning options per request.

        Raises:
            BadInput: an empty prompt, or a number out of range.
        """
        if not self.prompt.strip():
            raise BadInput("Type a prompt, or press one of the examples.")
        if not 1 <= self.max_tokens <= MOST_TOKENS:
            raise BadInput(f"Max tokens is {self.max_tokens:g}; 1 to {MOST_TOKENS} is allowed.")
        if self.mode not in MODES:
            raise BadInput(f"Mode is {self.mode!r}; allowed: {', '.join(MODES)}.")
        override = request_pruning and self.pruning != PRUNING_CHOICES[0]
        return Settings(
            messages=self._messages(conversation),
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            max_new_tokens=int(self.max_tokens),
            seed=self._seed(),
            mode=self.mode,
            pruning=self.pruning if override else None,
            prune_threshold=float(self.prune_threshold) if override and self.pruning != "none" else None,
            background=int(self.background),
            timing=self.timing,
        )

    def _seed(self) -> int | None:
        if not self.seed.strip():
            return None
        try:
            return int(self.seed)
        except ValueError as error:
            raise BadInput(f"Seed is {self.seed!r}; a whole number, or nothing, is allowed.") from error

    def _messages(self, conversation: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        user = ("user", self.prompt.strip())
        if self.follow_up and conversation:
            return (*conversation, user)
        system = (("system", self.system.strip()),) if self.system.strip() else ()
        return (*system, user)
