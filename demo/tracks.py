"""A track: one side's answer of a run, filled while it streams and replayed afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from demo.client import ServerProblem
from demo.steps import Step, merge
from demo.texts import TokenTexts, Vocabulary
from sglang_ext.core.config import REQUEST_KEY

WAITING, RUNNING, DONE, STOPPED, FAILED = "waiting", "running", "done", "stopped", "failed"
STATUSES = (WAITING, RUNNING, DONE, STOPPED, FAILED)


@dataclass
class Track:
    """One answer. Its run's thread writes; the page's readers only look (lists only grow).

    Attributes:
        side: ``plain`` or ``speculative``.
        steps: what arrived so far.
        status: ``waiting``, ``running``, ``done``, ``stopped`` or ``failed``.
        message: why it failed.
        prompt_tokens, cached_tokens: the prompt's length and how much of it was in the prefix cache.
        finish: the server's finish reason, as a word.
        shared: why its times are no measurement; empty if it had the server to itself.
        machine: what else kept the machine busy, if it is this one and was busy; such times are worth less.
    """

    side: str
    steps: list[Step] = field(default_factory=list)
    status: str = WAITING
    message: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: str = ""
    shared: list[str] = field(default_factory=list)
    machine: str = ""

    @property
    def ids(self) -> list[int]:
        """All token ids."""
        return [token for step in self.steps for token in step.ids]

    @property
    def text(self) -> str:
        """The answer, exactly as the server streamed it."""
        return "".join(text for step in self.steps for text in step.texts)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.status in (DONE, STOPPED, FAILED)

    @property
    def measured(self) -> bool:
        """Whether its speed may be quoted."""
        return self.status == DONE and not self.shared

    def share(self, reason: str) -> None:
        """Note that its times are no measurement."""
        if reason not in self.shared:
            self.shared.append(reason)

    def end_s(self) -> float:
        """When the last token arrived, in seconds after sending."""
        return self.steps[-1].at_s if self.steps else 0.0


class Writer:
    """Turns the chunks of a stream into a track's steps.

    Args:
        track: what to fill.
        vocabulary: the server's tokens.
        company: how many other requests belong in the same batch; more than that are strangers.
    """

    def __init__(self, track: Track, vocabulary: Vocabulary, company: int = 0) -> None:
        self._company = company
        self._track = track
        self._vocabulary = vocabulary
        self._texts = TokenTexts(vocabulary)
        self._tokens = 0
        self._length = 0

    def chunk(self, at_s: float, data: dict[str, Any]) -> None:
        """Add one chunk.

        Raises:
            ServerProblem: the chunk is not what ``/generate`` sends, or its records do not spell its tokens.
        """
        try:
            self._add(at_s, data)
        except (KeyError, TypeError, ValueError) as error:
            raise ServerProblem(f"the server sent a chunk that makes no sense ({error})") from error

    def _add(self, at_s: float, data: dict[str, Any]) -> None:
        meta = data["meta_info"]
        ids, text = list(data["output_ids"]), str(data["text"])
        elements: Sequence[dict[str, Any] | None] = meta.get(REQUEST_KEY) or []
        whole = len(ids) == meta["completion_tokens"]
        if whole:  # everything so far; with --incremental-streaming-output only what is new
            ids, elements = ids[self._tokens :], elements[self._tokens :]
            # A character that is not complete yet may be taken back: never go behind what was shown.
            text, self._length = text[self._length :], max(self._length, len(text))
        self._tokens += len(ids)
        track = self._track
        steps = merge(at_s, ids, self._texts.feed(ids, text), elements)
        track.steps.extend(self._with_drafts(step) for step in steps)
        track.prompt_tokens, track.cached_tokens = int(meta["prompt_tokens"]), int(meta["cached_tokens"])
        if meta["finish_reason"] is not None:
            track.finish = str(meta["finish_reason"]["type"])
        strangers = any(step.record is not None and step.record.batch_size > 1 + self._company for step in steps)
        if strangers and not track.shared:
            track.share("other requests were in the batch")

    def _with_drafts(self, step: Step) -> Step:
        if step.record is None or not step.record.draft_ids:
            return step
        texts = tuple(self._vocabulary.spelled(step.record.draft_ids))
        return Step(step.at_s, step.ids, step.texts, step.record, texts)
