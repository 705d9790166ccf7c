"""The batch view: n prompts at once, first plainly, then speculatively, and the throughput of both."""

from __future__ import annotations

import threading
import time
import uuid
from dataclasses import dataclass, field, replace

from demo import stats
from demo.client import ServerProblem
from demo.identity import IDENTICAL, compare
from demo.markup import element, number, text
from demo.prompts import BATCH_PROMPTS
from demo.runs import OTHER_CLIENT, Endpoint, Occupancy
from demo.settings import FAST_SIDE, PLAIN_SIDE, SIDES, Settings
from demo.tracks import DONE, STOPPED, Track, Writer
from demo.work import Work


@dataclass
class Row:
    """One prompt of a batch and its answers."""

    prompt: str
    ids: list[int] = field(default_factory=list)
    tracks: dict[str, Track] = field(default_factory=lambda: {side: Track(side) for side in SIDES})


class BatchRun(Work):
    """``count`` prompts at once on each side, one side after the other.

    Args:
        settings: sampling and mode; its messages give the system prompt, if any.
        endpoints: the server of each side.
        occupancy: shared by all runs of this process.
        count: prompts in flight at once.

    Attributes:
        rows: the prompts and their answers.
        seconds: per side, from sending to the last token, the prefill of all prompts included.
        shared: why the times are no measurement; empty if they are.
    """

    def __init__(self, settings: Settings, endpoints: dict[str, Endpoint], occupancy: Occupancy, count: int) -> None:
        super().__init__("demo-batch")
        prompts = [BATCH_PROMPTS[index % len(BATCH_PROMPTS)] for index in range(count)]
        self.rows = [Row(prompt) for prompt in prompts]
        self.settings = settings
        self.seconds: dict[str, float] = {}
        self.side = ""
        self._marker = Track(FAST_SIDE)
        self._endpoints = endpoints
        self._occupancy = occupancy

    @property
    def shared(self) -> list[str]:
        """Why no throughput may be quoted."""
        reasons = list(self._marker.shared)
        for row in self.rows:
            for track in row.tracks.values():
                reasons += [reason for reason in track.shared if reason not in reasons]
        return reasons

    def tokens(self, side: str) -> int:
        """Return the tokens of a side so far."""
        return sum(len(step.ids) for row in self.rows for step in row.tracks[side].steps)

    def throughput(self, side: str) -> float | None:
        """Return all tokens of a side over its wall time; ``None`` unless complete and alone."""
        complete = all(row.tracks[side].status == DONE for row in self.rows)
        return self.tokens(side) / self.seconds[side] if complete and side in self.seconds and not self.shared else None

    def _work(self) -> None:
        try:
            with self._occupancy.use(self, self._marker):
                self._prepare()
                for side in SIDES:
                    self._ask_all(side)
        except ServerProblem as problem:
            self.problem = str(problem)
        finally:
            for row in self.rows:
                for track in row.tracks.values():
                    if not track.ended:
                        track.status = STOPPED
            self.finished = True

    def _prepare(self) -> None:
        system = [(role, content) for role, content in self.settings.messages if role == "system"]
        for endpoint in {endpoint.client.url: endpoint for endpoint in self._endpoints.values()}.values():
            endpoint.vocabulary.prefetch()
            if len(self._marker.shared) == 0 and not endpoint.client.idle():
                self._marker.share(OTHER_CLIENT)
        for row in self.rows:
            if self._stopping.is_set():
                return
            chat = replace(self.settings, messages=(*system, ("user", row.prompt))).chat()
            row.ids = self._endpoints[FAST_SIDE].client.tokenize_chat(chat)
            for url in {endpoint.client.url for endpoint in self._endpoints.values()}:
                client = next(e.client for e in self._endpoints.values() if e.client.url == url)
                params = {"max_new_tokens": 1, "temperature": 0}
                client.post("/generate", {"input_ids": row.ids, "sampling_params": params}, timeout_s=120.0)

    def _ask_all(self, side: str) -> None:
        if self._stopping.is_set():
            return
        self.side = side
        started = time.monotonic()
        workers = [threading.Thread(target=self._ask, args=(side, row), daemon=True) for row in self.rows]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.seconds[side] = time.monotonic() - started

    def _ask(self, side: str, row: Row) -> None:
        track, endpoint = row.tracks[side], self._endpoints[side]
        body = {"input_ids": row.ids, "rid": uuid.uuid4().hex}
        params = self.settings.sampling(side, endpoint.facts.telemetry)
        stream = self._open(endpoint.client, {**body, "sampling_params": params})
        self._read(track, stream, Writer(track, endpoint.vocabulary, company=len(self.rows) - 1))


def batch_html(run: BatchRun) -> str:
    """Return the batch view of a run."""
    head = element("tr", "".join(element("th", text(name)) for name in _COLUMNS))
    rows = "".join(_row(run, row) for row in run.rows)
    return _totals(run) + element("div", element("table", head + rows, "batch"), "scroll")


_COLUMNS = ("prompt", "plain", "speculative", "mode now", "accept length", "same text")


def _row(run: BatchRun, row: Row) -> str:
    fast = row.tracks[FAST_SIDE]
    counts = stats.count(fast.steps)
    mode = fast.steps[-1].mode if fast.steps else ""
    verdict = compare(run.settings, row.tracks[PLAIN_SIDE], fast)
    same = "–" if not (fast.ended and row.tracks[PLAIN_SIDE].ended) else verdict.status
    badge = element("span", text(mode or "–"), f"badge mode-{mode or 'none'}")
    cells = [
        element("td", text(row.prompt), "prompt"),
        *(element("td", _bar(run, row.tracks[side])) for side in SIDES),
        element("td", badge),
        element("td", text(number(counts.accept_length, 2))),
        element("td", text(same), "same" if verdict.status == IDENTICAL else ""),
    ]
    return element("tr", "".join(cells))


def _bar(run: BatchRun, track: Track) -> str:
    tokens = sum(len(step.ids) for step in track.steps)
    if track.message:
        return element("span", text(track.message), "problem")
    label = f"{tokens} tokens"
    return element("progress", "", value=tokens, max=run.settings.max_new_tokens, aria_label=label) + text(label)


def _totals(run: BatchRun) -> str:
    plain, fast = run.throughput(PLAIN_SIDE), run.throughput(FAST_SIDE)
    ratio = fast / plain if fast is not None and plain is not None else None
    state = "finished" if run.finished else f"{run.side or 'preparing'} …"
    figures = (
        ("batch-ratio", "total throughput, times plain", number(ratio, 2, "×")),
        ("batch-plain", f"plain tokens/s ({run.tokens(PLAIN_SIDE)} tokens)", number(plain)),
        ("batch-fast", f"speculative tokens/s ({run.tokens(FAST_SIDE)} tokens)", number(fast)),
        ("batch-first", "all first tokens after, plain", number(_first(run, PLAIN_SIDE), 2, " s")),
        ("batch-first-fast", "all first tokens after, speculative", number(_first(run, FAST_SIDE), 2, " s")),
        ("batch-state", f"{len(run.rows)} prompts at once", state),
    )
    cells = "".join(
        element("div", element("dt", text(label)) + element("dd", text(value), data_name=name), "figure")
        for name, label, value in figures
    )
    words = "One side after the other, each with the server to itself; wall time from sending to the last token, "
    words += "prefill included; prompts in the prefix cache."
    if run.shared:
        words = f"No throughput is quoted: {'; '.join(run.shared)}."
    problem = element("p", text(run.problem), "problem", role="alert") if run.problem else ""
    return problem + element("dl", cells, "figures") + element("p", text(words), "timing")


def _first(run: BatchRun, side: str) -> float | None:
    """Return when the last of the first tokens of a side arrived: queue and prefill of the whole batch."""
    firsts = [row.tracks[side].steps[0].at_s for row in run.rows if row.tracks[side].steps]
    return max(firsts) if len(firsts) == len(run.rows) else None
