"""The servers of one demo: which are reachable, what they are, and which one answers which side."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from demo.client import Client, ServerProblem
from demo.facts import Facts, ask_facts
from demo.runs import Endpoint, Occupancy
from demo.settings import FAST_SIDE, PLAIN_SIDE
from demo.texts import Vocabulary


class Pool:
    """Servers by address.

    Args:
        urls: servers with speculative decoding, one per drafter; may be empty (replays only).
        baseline_url: a server for the plain side; without it the first of ``urls`` answers plainly by request.

    Raises:
        Refusal: an address is malformed.
    """

    def __init__(self, urls: Sequence[str], baseline_url: str | None) -> None:
        self.occupancy = Occupancy()
        self._fast = [Client(url) for url in urls]
        self._baseline = None if baseline_url is None else Client(baseline_url)
        self._endpoints: dict[str, Endpoint] = {}
        self._lock = threading.Lock()

    @property
    def empty(self) -> bool:
        """Whether the page has no server at all."""
        return not self._fast

    def refresh(self) -> list[str]:
        """Ask every server again what it is; return what is wrong, in words."""
        problems = []
        with self._lock:
            for client in [*self._fast, *([self._baseline] if self._baseline else [])]:
                known = self._endpoints.get(client.url)
                try:
                    facts = ask_facts(client, None if known is None else known.facts)
                    self._endpoints[client.url] = self._endpoint(client, facts)
                except ServerProblem as problem:
                    self._endpoints.pop(client.url, None)
                    problems.append(str(problem))
            for client in self._fast:
                known = self._endpoints.get(client.url)
                if known is not None and not known.facts.telemetry:
                    problems.append(
                        f"{client.url} runs no speculative decoding of this package and sends no step records, so "
                        "both panels decode plainly: start it with `--speculative-algorithm flexdraft`"
                    )
        return problems

    def drafters(self) -> dict[str, Facts]:
        """Return the reachable servers of the speculative side by the name to show."""
        reachable = [self._endpoints[client.url].facts for client in self._fast if client.url in self._endpoints]
        names = [facts.name for facts in reachable]
        shown = [facts.name if names.count(facts.name) == 1 else f"{facts.name} at {facts.url}" for facts in reachable]
        return dict(zip(shown, reachable, strict=True))

    def endpoints(self, drafter: str | None) -> dict[str, Endpoint]:
        """Return the server of each side for a drafter's name.

        Raises:
            ServerProblem: one of them is not reachable.
        """
        known = self.drafters()
        if not known:
            raise ServerProblem("no server is reachable: press “Connect again” once it runs")
        facts = known.get(drafter or "") or next(iter(known.values()))
        fast = self._endpoints[facts.url]
        if self._baseline is None:
            return {PLAIN_SIDE: fast, FAST_SIDE: fast}
        if self._baseline.url not in self._endpoints:
            raise ServerProblem(f"the plain server at {self._baseline.url} is not reachable: press “Connect again”")
        return {PLAIN_SIDE: self._endpoints[self._baseline.url], FAST_SIDE: fast}

    def _endpoint(self, client: Client, facts: Facts) -> Endpoint:
        known = self._endpoints.get(client.url)
        if known is not None and known.facts.model == facts.model:
            return Endpoint(client, facts, known.vocabulary)
        return Endpoint(client, facts, Vocabulary(client.detokenize))
