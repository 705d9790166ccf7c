"""Servers of the black-box suite: four for the whole session, special ones where a law needs other flags.

``plain``, ``scripted``, ``flexdraft`` and ``dflare`` start together, and only those that the selected tests ask for.
``plain`` is the reference of everything; its greedy answers are asked for once and remembered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sglang_ext.testing.drafters import untrained_drafter
from sglang_ext.testing.server import Reply, Request, Server, Starter
from sglang_ext.testing.speculators import (
    ALWAYS_DRAFT,
    DFLARE,
    SPECULATORS,
    Answers,
    Speculator,
    block_size,
    server_of,
)
from sglang_ext.testing.tapped_drafters import untrained_tapped_drafter

SESSION_SERVERS = ("plain", "scripted", "flexdraft", DFLARE)
COMMON_TOKEN = 28
"""The comma of the default target, which an untrained drafter drafts."""
QUICK_SPECULATORS = ("oracle", "parallel")
"""Ways of drafting that every run covers; with the others a law is marked slow."""
LONG_LAWS = (
    "test_temperature_one_samples_as_plain_does",
    "test_rejection_sampling_samples_as_plain_does",
    "test_hundredth_request_and_concurrency",
)
"""Laws that take minutes each and are marked slow whatever drafts."""
MORE_SERVERS = ("test_unusual_flags", "test_seeds", "test_small_families", "test_dflare", "test_gpt_oss")
"""Modules that start further servers beside the shared ones, several GB each; marked slow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.server)
            if item.name.partition("[")[0] in LONG_LAWS or item.path.stem in MORE_SERVERS:
                item.add_marker(pytest.mark.slow)
            params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
            if params.get("speculator", "oracle") not in QUICK_SPECULATORS:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def target(pytestconfig: pytest.Config) -> Path:
    """The target's folder."""
    from sglang_ext.targets import prepare

    return prepare(pytestconfig.getoption("--target"))


@pytest.fixture(scope="session")
def drafter(pytestconfig: pytest.Config, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter for the target: the given one, the shipped one, or an untrained one.

    Losslessness holds for any weights, so the suite is complete without a trained drafter.
    """
    from sglang_ext.models.shipped import find_shipped

    given = pytestconfig.getoption("--drafter")
    if given is not None:
        return Path(given)
    return find_shipped(target) or untrained_drafter(target, tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="session")
def dflare_drafter(pytestconfig: pytest.Config, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DFlare or DFlash drafter for the target: the given one, the shipped one, or an untrained one."""
    from sglang_ext.models.shipped import find_shipped

    given = pytestconfig.getoption("--dflare-drafter")
    if given is not None:
        return Path(given)
    shipped = find_shipped(target, method="dflare")
    return shipped or untrained_tapped_drafter(target, tmp_path_factory.mktemp("dflare"), favourite=COMMON_TOKEN)


@pytest.fixture(scope="session")
def starter(pytestconfig: pytest.Config, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Starter:
    """What special servers are started with."""
    return Starter(target, tmp_path_factory.mktemp("servers"), pytestconfig.getoption("--server-threads"))


def _running(pytestconfig: pytest.Config) -> dict[str, Server]:
    """Servers named by ``--running``."""
    servers = {}
    for option in pytestconfig.getoption("--running"):
        name, _, where = option.partition("=")
        url, _, log = where.partition(",")
        if name not in SESSION_SERVERS:
            raise pytest.UsageError(f"--running {option}: NAME is one of {', '.join(SESSION_SERVERS)}")
        servers[name] = Server(url, Path(log) if log else None).wait_ready()
    return servers


@pytest.fixture(scope="session")
def session_servers(
    request: pytest.FixtureRequest, starter: Starter, drafter: Path, dflare_drafter: Path
) -> Iterator[dict[str, Server]]:
    """The shared servers that any selected test needs, started together."""
    wanted = {name for item in request.session.items for name in item.fixturenames} & set(SESSION_SERVERS)
    for item in request.session.items:
        if "speculator" in item.fixturenames:
            wanted |= {"plain", server_of(item.callspec.params["speculator"])}
    running = _running(request.config)
    launches = {
        "plain": starter.launch(),
        "scripted": starter.launch("--speculative-algorithm", "scripted", *ALWAYS_DRAFT),
        "flexdraft": starter.launch(
            "--speculative-algorithm", "flexdraft", "--speculative-draft-model-path", str(drafter)
        ),
        DFLARE: starter.launch(
            "--speculative-algorithm", "dflare", "--speculative-draft-model-path", str(dflare_drafter)
        ),
    }
    missing = {name: launch for name, launch in launches.items() if name in wanted - set(running)}
    with starter.running(**missing) as servers:
        yield running | servers


@pytest.fixture(scope="session")
def plain(session_servers: dict[str, Server]) -> Server:
    """A server without speculation: the reference."""
    return session_servers["plain"]


@pytest.fixture(scope="session")
def scripted(session_servers: dict[str, Server]) -> Server:
    """A server whose drafter follows the script each request names."""
    return session_servers["scripted"]


@pytest.fixture(scope="session")
def flexdraft(session_servers: dict[str, Server]) -> Server:
    """A server that decodes by FlexDraft."""
    return session_servers["flexdraft"]


@pytest.fixture(scope="session")
def reference(plain: Server) -> Answers:
    """Answers of the plain server, remembered: ``reference(requests) -> replies``. Only for greedy requests."""
    known: dict[str, Reply] = {}

    def ask(requests: Sequence[Request]) -> list[Reply]:
        keys = [json.dumps(request.body(), sort_keys=True) for request in requests]
        new = {key: request for key, request in zip(keys, requests, strict=True) if key not in known}
        known.update(zip(new, plain.generate_all(list(new.values())), strict=True))
        return [known[key] for key in keys]

    return ask


@pytest.fixture(params=SPECULATORS)
def speculator(
    request: pytest.FixtureRequest, session_servers: dict[str, Server], plain: Server, reference: Answers
) -> Speculator:
    """Every way of drafting in turn; ``indirect`` parametrisation selects some."""
    server = session_servers[server_of(request.param)]
    return Speculator(request.param, server, block_size(server), plain, reference)
