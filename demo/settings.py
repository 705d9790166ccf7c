"""What a visitor asks for, and the request that says it to a server."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from sglang_ext.core.config import REQUEST_KEY

PLAIN_SIDE, FAST_SIDE = "plain", "speculative"
SIDES = (PLAIN_SIDE, FAST_SIDE)
TURNS, LIVE = "turns", "live"
"""One panel after the other, each with the server to itself; or both at once."""
AUTO = "auto"


@dataclass(frozen=True)
class Settings:
    """One run's request.

    Attributes:
        messages: the conversation, ``(role, content)`` pairs ending with a user turn.
        temperature, top_p: 0 decodes greedily.
        max_new_tokens: cap of the answer.
        seed: ``sampling_seed``; ``None`` leaves it to the server.
        mode: mode asked for on the speculative side; ``auto`` leaves it to the server.
        pruning, prune_threshold: overrides of selective verification; ``None`` leaves it to the server.
        background: requests kept going beside each panel.
        timing: ``turns`` or ``live``.
    """

    messages: tuple[tuple[str, str], ...]
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    seed: int | None = None
    mode: str = AUTO
    pruning: str | None = None
    prune_threshold: float | None = None
    background: int = 0
    timing: str = TURNS

    @property
    def greedy(self) -> bool:
        """Whether both sides must answer with the same text."""
        return self.temperature == 0

    def chat(self) -> list[dict[str, str]]:
        """Return the conversation as messages with nothing but role and content."""
        return [{"role": role, "content": content} for role, content in self.messages]

    def overrides(self, side: str) -> dict[str, Any]:
        """Return the request options of one side, without ``records``."""
        if side == PLAIN_SIDE:
            return {"mode": "plain"}
        given: dict[str, Any] = {} if self.mode == AUTO else {"mode": self.mode}
        if self.pruning is not None:
            given["pruning"] = self.pruning
        if self.prune_threshold is not None:
            given["prune_threshold"] = self.prune_threshold
        return given

    def sampling(self, side: str, telemetry: bool) -> dict[str, Any]:
        """Return ``sampling_params`` of one side; without telemetry nothing of ours is in it."""
        params: dict[str, Any] = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}
        if not self.greedy:
            params["top_p"] = self.top_p
            if self.seed is not None:
                params["sampling_seed"] = self.seed
        if telemetry:
            params["custom_params"] = {REQUEST_KEY: {**self.overrides(side), "records": True}}
        return params

    def curl(self, url: str, side: str = FAST_SIDE) -> str:
        """Return a shell command that asks the same of the server's OpenAI route."""
        body: dict[str, Any] = {
            "model": "default",
            "messages": self.chat(),
            "temperature": self.temperature,
            "max_tokens": self.max_new_tokens,
        }
        if not self.greedy:
            body["top_p"] = self.top_p
            if self.seed is not None:
                body["seed"] = self.seed
        if self.overrides(side):
            body["custom_params"] = {REQUEST_KEY: self.overrides(side)}
        data = json.dumps(body, ensure_ascii=False)
        return (
            f"curl -s {shlex.quote(url + '/v1/chat/completions')} -H 'Content-Type: application/json' "
            f"-d {shlex.quote(data)}"
        )
