"""What the page's buttons do: generators of component updates, one group of functions per page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from demo.batch import BatchRun, batch_html
from demo.client import ServerProblem
from demo.clock import PLOT_INTERVAL_S
from demo.controls import BadInput, Controls
from demo.frames import Frame, final, follow, replay
from demo.markup import element, text
from demo.pool import Pool
from demo.recording import MOST_BYTES, Recording, read_recording
from demo.runs import Run
from demo.sessions import Session, Sessions
from demo.settings import FAST_SIDE, PLAIN_SIDE
from demo.tracks import DONE
from sglang_ext.core.refusal import Refusal

Updates = dict[Any, Any]


class Handlers:
    """The page's behaviour.

    Args:
        pool: the servers.
        page: the components by name.
        first: a recording every page opens with; ``None`` for an empty page.
    """

    def __init__(self, pool: Pool, page: dict[str, Any], first: Recording | None) -> None:
        self.pool = pool
        self.page = page
        self.sessions = Sessions()
        self._first = first

    # ------------------------------------------------------------------ opening and closing a page

    async def load(self, request: gr.Request) -> Updates:
        """Greet a new page: what is served, what is wrong, and the recording it opens with."""
        updates = await self._served()
        if self._first is not None:
            session = self.sessions.of(request.session_hash)
            session.recording = self._first
            updates |= self._frame(final(self._first)) | self._ready(session)
        return updates

    async def connect(self) -> Updates:
        """Ask the servers again."""
        return await self._served()

    def close(self, request: gr.Request) -> None:
        """End everything a closed page had going."""
        self.sessions.close(request.session_hash)

    async def _served(self) -> Updates:
        problems = await asyncio.to_thread(self.pool.refresh)
        drafters = self.pool.drafters()
        lines = [
            f"{name} · {facts.model} on {facts.device} · block of {facts.block_size} · "
            f"mode {facts.mode} · pruning {facts.pruning} at {facts.prune_threshold:g} · {facts.url}"
            for name, facts in drafters.items()
            if facts.telemetry
        ]
        if self.pool.empty:
            lines = ["No server: saved runs can be opened and replayed."]
        page, names = self.page, list(drafters)
        first = next(iter(drafters.values()), None)
        pruning = first is not None and first.request_pruning
        seeds = first is not None and first.seeds
        return {
            page["banner"]: banner(problems),
            page["serving"]: element("p", text(" — ".join(lines)), "serving"),
            page["drafter"]: gr.update(choices=names, value=names[0] if names else None, interactive=len(names) > 1),
            page["pruning"]: gr.update(interactive=pruning, info=_pruning_words(pruning)),
            page["threshold"]: gr.update(interactive=pruning),
            page["seed"]: gr.update(info="honoured" if seeds else _NO_SEEDS),
            page["run"]: gr.update(interactive=bool(names)),
            page["batch_run"]: gr.update(interactive=bool(names)),
            page["connect"]: gr.update(visible=bool(problems)),
        }

    # ------------------------------------------------------------------ side by side

    async def run(self, request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        """Ask both sides and show them as they answer."""
        session, controls = self.sessions.of(request.session_hash), Controls(*values)
        try:
            endpoints = self.pool.endpoints(controls.drafter)
            fast = endpoints[FAST_SIDE].facts
            settings = controls.settings(session.conversation, fast.request_pruning)
        except (BadInput, ServerProblem) as problem:
            yield {self.page["banner"]: banner([str(problem)])}
            return
        run = Run(settings, endpoints, self.pool.occupancy)
        generation = session.begin(run)
        yield self._busy() | {
            self.page["curl"]: settings.curl(fast.url),
            self.page["past"]: past(settings.messages[:-1]),
        }
        run.start()
        try:
            async for frame in follow(run, lambda: session.skip):
                if session.generation != generation:
                    return
                yield self._frame(frame)
        finally:
            run.stop()
        yield self._ended(session, run)

    def _ended(self, session: Session, run: Run) -> Updates:
        fast = run.tracks[FAST_SIDE]
        if fast.steps or run.tracks[PLAIN_SIDE].steps:
            session.recording = run.recording()
        if fast.status == DONE:
            session.conversation = (*run.settings.messages, ("assistant", fast.text))
        problems = [run.problem] if run.problem else []
        failed = any(track.message for track in run.tracks.values())
        again = gr.update(visible=bool(problems) or failed)
        return self._ready(session) | {self.page["banner"]: banner(problems), self.page["connect"]: again}

    async def replay(self, request: gr.Request, speed: float) -> AsyncIterator[Updates]:
        """Replay the page's recording."""
        session = self.sessions.of(request.session_hash)
        if session.recording is None:
            yield {self.page["banner"]: banner(["There is nothing to replay yet: run a prompt or open a saved run."])}
            return
        generation = session.begin(None)
        yield self._busy()
        async for frame in replay(session.recording, float(speed), lambda: session.skip):
            if session.generation != generation:
                return
            yield self._frame(frame)
        yield self._ready(session)

    def stop(self, request: gr.Request) -> None:
        """Stop what streams or is replayed; the generator that shows it ends the page's busy state."""
        self.sessions.of(request.session_hash).stop()

    def background(self, request: gr.Request, count: float) -> None:
        """Change how many background requests run beside a run that is going on."""
        work = self.sessions.of(request.session_hash).work
        if isinstance(work, Run) and not work.finished:
            work.resize_background(int(count))

    def open_run(self, request: gr.Request, file: str | None) -> Updates:
        """Open a saved run and show its end."""
        session = self.sessions.of(request.session_hash)
        if file is None:
            return {}
        try:
            recording = read_recording(_read_text(file))
        except Refusal as refusal:
            return {self.page["banner"]: banner([str(refusal)])}
        session.begin(None)
        session.recording = recording
        return self._frame(final(recording)) | self._ready(session) | {self.page["banner"]: banner([])}

    # ------------------------------------------------------------------ batch

    async def batch(self, request: gr.Request, count: float, *values: Any) -> AsyncIterator[Updates]:
        """Ask many prompts at once on both sides."""
        session, controls = self.sessions.of(request.session_hash), Controls(*("batch", *values[1:]))
        page = self.page
        try:
            endpoints = self.pool.endpoints(controls.drafter)
            settings = controls.settings((), endpoints[FAST_SIDE].facts.request_pruning)
        except (BadInput, ServerProblem) as problem:
            yield {page["banner"]: banner([str(problem)])}
            return
        run = BatchRun(settings, endpoints, self.pool.occupancy, int(count))
        generation = session.begin(run)
        yield {page["batch_run"]: gr.update(interactive=False), page["banner"]: banner([])}
        run.start()
        try:
            while not run.finished and session.generation == generation:
                yield {page["batch_view"]: batch_html(run)}
                await asyncio.sleep(PLOT_INTERVAL_S)
        finally:
            run.stop()
        yield {page["batch_view"]: batch_html(run), page["batch_run"]: gr.update(interactive=True)}

    # ------------------------------------------------------------------ pieces

    def _busy(self) -> Updates:
        page = self.page
        return {
            page["run"]: gr.update(interactive=False),
            page["stop"]: gr.update(interactive=True),
            page["replay"]: gr.update(interactive=False),
            page["banner"]: banner([]),
        }

    def _ready(self, session: Session) -> Updates:
        page = self.page
        file = session.save()
        return {
            page["run"]: gr.update(interactive=bool(self.pool.drafters())),
            page["stop"]: gr.update(interactive=False),
            page["replay"]: gr.update(interactive=session.recording is not None),
            page["save"]: gr.update(value=file, interactive=file is not None),
        }

    def _frame(self, frame: Frame) -> Updates:
        page = self.page
        updates = {
            page["plain_head"]: frame.heads[PLAIN_SIDE],
            page["plain_flow"]: frame.flows[PLAIN_SIDE],
            page["fast_head"]: frame.heads[FAST_SIDE],
            page["fast_flow"]: frame.flows[FAST_SIDE],
            page["fast_strip"]: frame.strips[FAST_SIDE],
            page["summary"]: frame.summary,
        }
        return updates if frame.plots is None else updates | {page["plots"]: frame.plots}


def banner(problems: list[str]) -> str:
    """Return the page's message area."""
    if not problems:
        return ""
    return element("div", "".join(element("p", text(problem)) for problem in problems), "banner", role="alert")


def past(messages: tuple[tuple[str, str], ...]) -> str:
    """Return the turns before this one."""
    turns = "".join(element("p", text(f"{role}: {content}")) for role, content in messages)
    return element("div", turns, "past") if turns else ""


_NO_SEEDS = "this server ignores seeds (start it with --enable-deterministic-inference)"


def _pruning_words(per_request: bool) -> str:
    if per_request:
        return "which drafts are verified, for the next run"
    return "fixed by the server: restart it with --speculative-adaptive-config to change it"


def _read_text(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as handle:
            return handle.read(MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            f"the file cannot be read ({error})", "a JSON file saved by this page is allowed", "choose one"
        ) from (error)
