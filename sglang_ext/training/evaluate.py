"""Offline acceptance: what greedy decoding with a drafter would commit per target step, without a server.

For every anchor of a regenerated response the drafts are computed from the target's own keys and values, and compared
with the response's next tokens. The sequential decode loop is then replayed: from the first response token on, each
step commits the matching drafts and the target's next token (FlexDraft section 3).

Shape legend: A anchors, K block size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from sglang_ext.models.flexdraft.loss import leading_matches
from sglang_ext.models.flexdraft.model import FlexDraftModel
from sglang_ext.training.data import Chunk, Record, StateStore, collate, refuse_foreign_tokens

ANCHORS_PER_CALL = 64


@dataclass
class Acceptance:
    """Totals of one domain.

    ``reached[j]`` counts replayed steps in which slot j+1 had a label and every earlier slot matched; ``accepted[j]``
    those in which it matched too.
    """

    block_size: int
    prompts: int = 0
    steps: int = 0
    tokens: int = 0
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

    def add(self, matches: Sequence[int], rooms: Sequence[int]) -> None:
        """Replay one response. ``matches[i]`` is the leading match of the anchor i tokens after the first one, and
        ``rooms[i]`` how many of its slots have a token to match."""
        self.prompts += 1
        place = 0
        while place < len(matches):
            run, room = matches[place], rooms[place]
            for slot in range(min(run + 1, room)):
                self.reached[slot] += 1
                self.accepted[slot] += slot < run
            self.steps += 1
            # The target's own next token follows the accepted drafts unless the response ends there.
            self.tokens += min(run + 1, len(matches) - place)
            place += run + 1

    def merge(self, other: Acceptance) -> None:
        self.prompts, self.steps, self.tokens = (
            self.prompts + other.prompts,
            self.steps + other.steps,
            self.tokens + other.tokens,
        )
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]


@torch.no_grad()
def record_matches(model: FlexDraftModel, store: StateStore, record: Record) -> tuple[list[int], list[int]]:
    """Leading matches of every anchor of a record, in order, and the number of labels each anchor has."""
    matches: list[int] = []
    rooms: list[int] = []
    anchors = list(record.anchors)
    for start in range(0, len(anchors), ANCHORS_PER_CALL):
        chunk = Chunk(0, tuple(anchors[start : start + ANCHORS_PER_CALL]))
        batch = collate(store, [record], [chunk], model.config.block_size)
        drafts = model.logits(batch.context).argmax(-1)
        matches += leading_matches(drafts == batch.labels, batch.valid)[0].tolist()
        rooms += batch.valid[0].sum(-1).tolist()
    return matches, rooms


def evaluate(model: FlexDraftModel, records: Iterable[Record]) -> dict[str, Acceptance]:
    """Acceptance by domain, and over all records under ``"all"``.

    Raises:
        Refusal: if a record holds a token that the target does not have.
    """
    records = list(records)
    refuse_foreign_tokens(records, model.config.vocab_size)
    store = StateStore(model.target, model.config.num_layers)
    found: dict[str, Acceptance] = defaultdict(lambda: Acceptance(model.config.block_size))
    for record in records:
        one = Acceptance(model.config.block_size)
        one.add(*record_matches(model, store, record))
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
