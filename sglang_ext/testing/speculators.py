"""Ways of drafting, one interface: ask a server to draft this way and hold its answers to the plain server's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_ext.testing.laws import assert_identities, assert_same
from sglang_ext.testing.scripts import SCRIPTS
from sglang_ext.testing.server import Reply, Request, Server

MODES = ("parallel", "sequential")
DFLARE = "dflare"
SPECULATORS = (*SCRIPTS, *MODES, DFLARE)
"""Everything that may draft: scripts of the scripted server, modes of the FlexDraft server, the DFlare server."""

ALWAYS_DRAFT = ("--speculative-adaptive-config", '{"adaptive": false}')
"""Flags of servers under test: mode ``auto`` would stop drafting as soon as a script's drafts do not pay."""

FEW = ("oracle", "half", "parallel", "sequential", DFLARE)
"""The speculators of laws that are dear: all right, half right, and every way of the real ones."""

Answers = Callable[[Sequence[Request]], list[Reply]]
"""Greedy answers of the plain server, remembered."""


def server_of(name: str) -> str:
    """Return which of the shared servers drafts the way ``name`` says."""
    if name in SCRIPTS:
        return "scripted"
    return DFLARE if name == DFLARE else "flexdraft"


@dataclass(frozen=True)
class Speculator:
    """One way of drafting on one server.

    Attributes:
        name: a script, a mode, or ``dflare``.
        server: the server that drafts that way when asked to.
        block_size: K of that server.
    """

    name: str
    server: Server
    block_size: int
    plain: Server
    reference: Answers

    def request(self, request: Request, expected: Reply, *, records: bool = False) -> Request:
        """Return ``request`` with the overrides that select this way of drafting."""
        options: dict[str, object] = {"records": True} if records else {}
        if self.name in SCRIPTS:
            return request.speculative({"script": self.name, **options}, expected.ids)
        if self.name == DFLARE:
            # Verify every draft, so that wrong ones are put to the test too.
            return request.speculative({"mode": "sequential", "pruning": "none", **options})
        return request.speculative({"mode": self.name, **options})

    def ask(self, requests: Sequence[Request], *, concurrency: int = 16, records: bool = False) -> list[Reply]:
        """Answer ``requests``, drafting this way."""
        expected = self.reference(requests)
        drafted = [self.request(r, e, records=records) for r, e in zip(requests, expected, strict=True)]
        return self.server.generate_all(drafted, concurrency)

    def hold(self, requests: Sequence[Request], *, concurrency: int = 16) -> list[Reply]:
        """Answer ``requests`` and hold the replies to the plain server's and to their own counters."""
        got = self.ask(requests, concurrency=concurrency)
        assert_same(self.plain, requests, self.reference(requests), got, self.name)
        for reply in got:
            if reply.completion_tokens > 1:
                assert_identities(reply, self.block_size)
        return got


def block_size(server: Server) -> int:
    """Return K of a speculative server."""
    return int(server.get("/server_info")["speculative_num_draft_tokens"])
