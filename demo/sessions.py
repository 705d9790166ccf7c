"""What belongs to one open page: its run, its recording, its conversation. Closing the page ends all of it."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from demo.recording import Recording


class Stoppable(Protocol):
    """Something that streams from a server."""

    def stop(self) -> None:
        """End it, here and on the server."""


@dataclass
class Session:
    """One page.

    Attributes:
        work: what streams now or streamed last.
        generation: counts runs and replays; a generator of an older one ends itself.
        skip: the visitor wants the end of what is replayed.
        recording: the last complete run, or the one opened from a file.
        conversation: messages of the last run with its answer, for a follow-up.
    """

    work: Stoppable | None = None
    generation: int = 0
    skip: bool = False
    recording: Recording | None = None
    conversation: tuple[tuple[str, str], ...] = ()
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="sglang-ext-demo-")))

    def begin(self, work: Stoppable | None) -> int:
        """End what streams now, take up ``work`` and return its generation."""
        self.stop()
        self.work, self.skip = work, False
        self.generation += 1
        return self.generation

    def stop(self) -> None:
        """End what streams or is replayed."""
        self.skip = True
        if self.work is not None:
            self.work.stop()

    def save(self) -> str | None:
        """Write the recording and return the file's name, ``None`` if there is none."""
        if self.recording is None:
            return None
        stamp = "".join(character for character in self.recording.created if character.isalnum())
        file = self.folder / f"run-{stamp}.json"
        file.write_text(self.recording.to_json(), encoding="utf-8")
        return str(file)


class Sessions:
    """All open pages, by the name Gradio gives them."""

    def __init__(self) -> None:
        self._by_name: dict[str, Session] = {}

    def of(self, name: str | None) -> Session:
        """Return a page's session, a new one at its first call."""
        return self._by_name.setdefault(name or "", Session())

    def close(self, name: str | None) -> None:
        """End a page's work and forget it."""
        session = self._by_name.pop(name or "", None)
        if session is not None:
            session.stop()
            shutil.rmtree(session.folder, ignore_errors=True)

    def close_all(self) -> None:
        """End everything."""
        for name in list(self._by_name):
            self.close(name)
