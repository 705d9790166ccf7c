"""A run: the same prompt asked twice, plainly and speculatively, in a thread that a page can stop at any moment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from demo.background import Background
from demo.client import Client, ServerProblem
from demo.facts import Facts
from demo.identity import DIFFERENT, OPEN, Verdict, compare
from demo.recording import Recording
from demo.settings import FAST_SIDE, LIVE, PLAIN_SIDE, SIDES, TURNS, Settings
from demo.texts import Vocabulary
from demo.tracks import FAILED, RUNNING, STOPPED, WAITING, Track, Writer
from demo.work import Work
from sglang_ext.core.config import REQUEST_KEY

OTHER_PAGE = "another run of this page was using the server"
OTHER_CLIENT = "the server had other requests in hand"
BOTH_AT_ONCE = "both panels ran at once"
BESIDE_BACKGROUND = "background requests ran beside it"
BUSY_LOAD = 1.5
"""Load average per core above which a local server cannot have had the machine to itself."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A server a run can use."""

    client: Client
    facts: Facts
    vocabulary: Vocabulary


class Occupancy:
    """Which tracks use which server now; a track that meets a stranger there is no measurement, nor is the stranger."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: list[tuple[object, Track]] = []

    @contextlib.contextmanager
    def use(self, owner: object, track: Track) -> Iterator[None]:
        """Occupy the machine with ``track``; servers of one page count as one machine."""
        entry = (owner, track)
        with self._lock:
            for other, theirs in self._active:
                reason = BOTH_AT_ONCE if other is owner else OTHER_PAGE
                theirs.share(reason)
                track.share(reason)
            self._active.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._active.remove(entry)

    def disturb(self, owner: object) -> bool:
        """Note a request that is no track's own beside whatever runs; return whether a stranger runs."""
        with self._lock:
            strangers = [track for other, track in self._active if other is not owner]
        for track in strangers:
            track.share(OTHER_PAGE)
        return bool(strangers)


class Run(Work):
    """One prompt on both sides.

    Args:
        settings: what is asked.
        endpoints: the server of each side.
        occupancy: shared by all runs of this process.

    Attributes:
        tracks: each side's answer.
        verdict: whether the answers are equal.
        phase: what it does now, in words.
    """

    def __init__(self, settings: Settings, endpoints: dict[str, Endpoint], occupancy: Occupancy) -> None:
        super().__init__("demo-run")
        self.settings = settings
        self.endpoints = endpoints
        self.tracks = {side: Track(side) for side in SIDES}
        self.verdict = Verdict(OPEN)
        self.phase = "reading the prompt"
        self._occupancy = occupancy
        self._background: Background | None = None
        self._wanted_background = settings.background
        self._created = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def stop(self) -> None:
        """End every stream of this run and its background requests, here and on the server; later calls do nothing."""
        super().stop()
        background = self._background
        if background is not None:
            background.resize(0)

    def resize_background(self, count: int) -> None:
        """Change how many background requests run beside the panels, at once if one is running."""
        self._wanted_background = count
        background = self._background
        if background is not None and not self._stopping.is_set():
            background.resize(count)
            self._mark_background(count)

    def recording(self) -> Recording:
        """Return what can be saved and replayed."""
        facts = {side: endpoint.facts for side, endpoint in self.endpoints.items()}
        return Recording(self.settings, facts, self.tracks, self.verdict, self._created)

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            ids = self._prompt_ids()
            self._warm(ids)
            if self.settings.timing == TURNS:
                for side in SIDES:
                    self._answer(side, ids)
            else:
                workers = [threading.Thread(target=self._answer, args=(side, ids), daemon=True) for side in SIDES]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
            self._judge(ids)
        except ServerProblem as problem:
            self.problem = str(problem)
        finally:
            for track in self.tracks.values():
                if not track.ended:
                    track.status = STOPPED if self._stopping.is_set() else FAILED
            self.finished = True

    def _prompt_ids(self) -> list[int]:
        ids = {side: self.endpoints[side].client.tokenize_chat(self.settings.chat()) for side in SIDES}
        if ids[PLAIN_SIDE] != ids[FAST_SIDE]:
            raise ServerProblem("the two servers read the prompt differently: they serve different targets")
        for endpoint in self._distinct():
            endpoint.vocabulary.prefetch()
        return ids[FAST_SIDE]

    def _distinct(self) -> list[Endpoint]:
        return list({endpoint.client.url: endpoint for endpoint in self.endpoints.values()}.values())

    def _warm(self, ids: list[int]) -> None:
        """Bring the prompt into every server's prefix cache, so that both sides start from the same state."""
        self.phase = "warming the prefix cache"
        for endpoint in self._distinct():
            if self._stopping.is_set():
                return
            idle = self._occupancy.disturb(self) or endpoint.client.idle()
            body = {"input_ids": ids, "rid": uuid.uuid4().hex}
            body["sampling_params"] = {"max_new_tokens": 1, "temperature": 0}
            endpoint.client.post("/generate", body, timeout_s=120.0)
            if not idle:
                for side in SIDES:
                    if self.endpoints[side] is endpoint:
                        self.tracks[side].share(OTHER_CLIENT)

    def _answer(self, side: str, ids: list[int]) -> None:
        track, endpoint = self.tracks[side], self.endpoints[side]
        if self._stopping.is_set():
            return
        body: dict[str, Any] = {"input_ids": ids, "rid": uuid.uuid4().hex}
        body["sampling_params"] = self.settings.sampling(side, endpoint.facts.telemetry)
        stream = self._open(endpoint.client, body)
        if endpoint.client.local:
            track.machine = machine_words()
        with self._occupancy.use(self, track), self._company(side, endpoint):
            if self._stopping.is_set():
                return
            self.phase = f"{side} decoding"
            self._read(track, stream, Writer(track, endpoint.vocabulary))

    @contextlib.contextmanager
    def _company(self, side: str, endpoint: Endpoint) -> Iterator[None]:
        """Keep the background requests of this side going while its panel runs."""
        if self.settings.timing == LIVE and side == PLAIN_SIDE:
            yield  # both panels share the other side's company
            return
        background = Background(endpoint.client, self.settings, side, endpoint.facts.telemetry)
        self._background = background
        try:
            background.resize(self._wanted_background)
            self._mark_background(self._wanted_background)
            background.wait_busy()
            yield
        finally:
            self._background = None
            background.resize(0)

    def _mark_background(self, count: int) -> None:
        if count:
            for track in self.tracks.values():
                if track.status in (WAITING, RUNNING):
                    track.share(BESIDE_BACKGROUND)

    def _judge(self, ids: list[int]) -> None:
        plain, fast = self.tracks[PLAIN_SIDE], self.tracks[FAST_SIDE]
        verdict = compare(self.settings, plain, fast)
        one, other = plain.ids, fast.ids
        if verdict.status == DIFFERENT and verdict.common < min(len(one), len(other)) and not self._stopping.is_set():
            self.phase = "looking at where the texts part"
            with contextlib.suppress(ServerProblem):
                pair = [one[verdict.common], other[verdict.common]]
                gap = logprob_gap(self.endpoints[PLAIN_SIDE], ids + one[: verdict.common], pair)
                verdict = dataclasses.replace(verdict, gap=gap)
        self.verdict = verdict


def machine_words() -> str:
    """Say how busy this machine is where that is more than one server's work."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= BUSY_LOAD * cores:
        return ""
    return f"this machine was busy with other programs (load {load:.1f} on {cores} cores)"


def logprob_gap(endpoint: Endpoint, prefix: list[int], pair: list[int]) -> float:
    """Return how far apart two next tokens' log-probabilities are after ``prefix``, in plain decoding.

    Raises:
        ServerProblem: the server does not say.
    """
    params: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0}
    if endpoint.facts.telemetry:
        params["custom_params"] = {REQUEST_KEY: {"mode": "plain"}}
    body = {"input_ids": prefix, "sampling_params": params, "return_logprob": True, "logprob_start_len": -1}
    answer = endpoint.client.post("/generate", {**body, "token_ids_logprob": pair}, timeout_s=120.0)
    try:
        by_id = {int(entry[1]): float(entry[0]) for entry in answer["meta_info"]["output_token_ids_logprobs"][0]}
        return abs(by_id[pair[0]] - by_id[pair[1]])
    except (KeyError, TypeError, IndexError) as error:
        raise ServerProblem(f"{endpoint.client.url} gave no log-probabilities ({error})") from error
