"""Offline acceptance: what greedy decoding with a drafter would commit per target step, without a server.

For every anchor of a regenerated response the drafts are computed from the target's own states, and compared
with the response's next tokens. The sequential decode loop is then replayed: from the first response token on, each
step commits the matching drafts and the target's next token (FlexDraft section 3).

Shape legend: A anchors, K block size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_ext.core.prune import PruneConfig, verify_lengths
from sglang_ext.models.loss import leading_matches
from sglang_ext.training.data import Chunk, ContextStore, Record, collate, refuse_foreign_tokens
from sglang_ext.training.methods import method_of

ANCHORS_PER_CALL = 64


@dataclass
class Acceptance:
    """Totals of one domain.

    ``reached[j]`` counts replayed steps in which slot j+1 had a label and every earlier slot matched; ``accepted[j]``
    those in which it matched too. ``verified`` counts the drafts handed to the target over all steps.
    """

    block_size: int
    prompts: int = 0
    steps: int = 0
    tokens: int = 0
    verified: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached = self.reached or [0] * (self.block_size - 1)
        self.accepted = self.accepted or [0] * (self.block_size - 1)

    @property
    def accept_length(self) -> float:
        """Mean tokens committed per target step, bonus included."""
        return self.tokens / max(1, self.steps)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Probability that slot j = 1..K-1 is accepted given that the slots before it were."""
        return tuple(a / max(1, r) for a, r in zip(self.accepted, self.reached, strict=True))

    def add(self, matches: Sequence[int], rooms: Sequence[int], lengths: Sequence[int] | None = None) -> None:
        """Replay one response. ``matches[i]`` is the leading match of the anchor i tokens after the first one,
        ``rooms[i]`` how many of its slots have a token to match, and ``lengths[i]`` how many drafts would be verified
        there (None: all)."""
        self.prompts += 1
        place = 0
        while place < len(matches):
            length = self.block_size - 1 if lengths is None else lengths[place]
            run, room = min(matches[place], length), min(rooms[place], length)
            for slot in range(min(run + 1, room)):
                self.reached[slot] += 1
                self.accepted[slot] += slot < run
            self.steps += 1
            self.verified += length
            # The target's own next token follows the accepted drafts unless the response ends there.
            self.tokens += min(run + 1, len(matches) - place)
            place += run + 1

    def merge(self, other: Acceptance) -> None:
        self.prompts, self.steps = self.prompts + other.prompts, self.steps + other.steps
        self.tokens, self.verified = self.tokens + other.tokens, self.verified + other.verified
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]


@torch.no_grad()
def replay(model: Any, store: ContextStore, record: Record, prune: PruneConfig | None = None) -> Acceptance:
    """Acceptance of one response; ``prune`` chooses how many drafts each step verifies, None verifies all."""
    matches: list[int] = []
    rooms: list[int] = []
    lengths: list[int] = []
    anchors = list(record.anchors)
    for start in range(0, len(anchors), ANCHORS_PER_CALL):
        chunk = Chunk(0, tuple(anchors[start : start + ANCHORS_PER_CALL]))
        batch = collate(store, [record], [chunk], model.config.block_size)
        logits = model.logits(batch.context)
        matches += leading_matches(logits.argmax(-1) == batch.labels, batch.valid)[0].tolist()
        rooms += batch.valid[0].sum(-1).tolist()
        if prune is not None:
            confidence = logits[0].float().softmax(-1).amax(-1)
            lengths += verify_lengths(confidence, prune).tolist()
    found = Acceptance(model.config.block_size)
    found.add(matches, rooms, lengths if prune is not None else None)
    return found


def evaluate(model: Any, records: Iterable[Record], store: ContextStore | None = None) -> dict[str, Acceptance]:
    """Acceptance of a drafter module by domain, and over all records under ``"all"``.

    Raises:
        Refusal: if a record holds a token that the target does not have.
    """
    records = list(records)
    refuse_foreign_tokens(records, model.config.vocab_size)
    store = store if store is not None else method_of(model).store(model)
    found: dict[str, Acceptance] = defaultdict(lambda: Acceptance(model.config.block_size))
    for record in records:
        one = replay(model, store, record)
        found[record.domain].merge(one)
        found["all"].merge(one)
    return dict(found)


def table(found: dict[str, Acceptance]) -> str:
    """A plain-text table: domain, prompts, tokens, accept length, acceptance by position."""
    lines = [f"{'domain':<14}{'prompts':>8}{'tokens':>9}{'accept length':>15}  by position"]
    for domain in sorted(found, key=lambda name: (name == "all", name)):
        row = found[domain]
        positions = " ".join(f"{value:.2f}" for value in row.by_position)
        lines.append(f"{domain:<14}{row.prompts:>8}{row.tokens:>9}{row.accept_length:>15.3f}  {positions}")
    return "\n".join(lines)
