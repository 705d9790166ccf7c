"""Servers of the black-box suite: four shared ones, special ones where a law needs other flags.

``plain`` and ``scripted`` start together, ``flexdraft`` and ``dflare`` when the first test needs one of them, and only
those that the selected tests ask for. ``plain`` is the reference of everything; its greedy answers are asked for once
and remembered. Modules with servers of their own come first, so that no more than four or five are up at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sglang_ext.testing.drafters import untrained_drafter
from sglang_ext.testing.server import Launch, Reply, Request, Server, Starter
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

REFERENCE_SERVERS = ("plain", "scripted")
DRAFTING_SERVERS = ("flexdraft", DFLARE)
SHARED_SERVERS = (*REFERENCE_SERVERS, *DRAFTING_SERVERS)
COMMON_TOKEN = 28
"""The comma of the default target, which an untrained drafter drafts."""
QUICK_SPECULATORS = ("oracle", "parallel")
"""Ways of drafting that every run covers; with the others a law is marked slow."""
LONG_LAWS = (
    "test_temperature_one_samples_as_plain_does",
    "test_target_only_sampling_samples_as_plain_does",
    "test_hundredth_request_and_concurrency",
)
"""Laws that take minutes each and are marked slow whatever drafts."""
MORE_SERVERS = (
    "test_seeds",
    "test_small_families",
    "test_long_blocks",
    "test_tensor_parallel",
    "test_dflare",
    "test_gpt_oss",
    "test_unusual_flags",
)
"""Modules that start servers of their own, several GB each, the last one beside shared ones; marked slow, run first."""


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
    items.sort(key=lambda item: _rank(item, here))


def _rank(item: pytest.Item, here: Path) -> int:
    """Other suites, then modules with servers of their own, then the rest of this suite."""
    if not item.path.is_relative_to(here):
        return 0
    name = item.path.stem
    return 1 + MORE_SERVERS.index(name) if name in MORE_SERVERS else 1 + len(MORE_SERVERS)


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
        if name not in SHARED_SERVERS:
            raise pytest.UsageError(f"--running {option}: NAME is one of {', '.join(SHARED_SERVERS)}")
        servers[name] = Server(url, Path(log) if log else None).wait_ready()
    return servers


@pytest.fixture(scope="session")
def wanted(request: pytest.FixtureRequest) -> set[str]:
    """The shared servers that any selected test needs."""
    names = {name for item in request.session.items for name in item.fixturenames}
    found = names & set(SHARED_SERVERS)
    if "drafting_servers" in names:
        found |= {*DRAFTING_SERVERS}
    for item in request.session.items:
        if "speculator" in item.fixturenames:
            found |= {"plain", server_of(item.callspec.params["speculator"])}
    return found


def _start(
    request: pytest.FixtureRequest, starter: Starter, launches: dict[str, Launch], wanted: set[str]
) -> Iterator[dict[str, Server]]:
    """Start together what is wanted and does not run already."""
    running = {name: server for name, server in _running(request.config).items() if name in launches}
    missing = {name: launch for name, launch in launches.items() if name in wanted - set(running)}
    with starter.running(**missing) as servers:
        yield running | servers


@pytest.fixture(scope="session")
def reference_servers(
    request: pytest.FixtureRequest, starter: Starter, wanted: set[str]
) -> Iterator[dict[str, Server]]:
    """``plain`` and ``scripted``."""
    launches = {
        "plain": starter.launch(),
        "scripted": starter.launch("--speculative-algorithm", "scripted", *ALWAYS_DRAFT),
    }
    yield from _start(request, starter, launches, wanted)


@pytest.fixture(scope="session")
def drafting_servers(
    request: pytest.FixtureRequest, starter: Starter, wanted: set[str], drafter: Path, dflare_drafter: Path
) -> Iterator[dict[str, Server]]:
    """``flexdraft`` and ``dflare``."""
    launches = {
        "flexdraft": starter.launch(
            "--speculative-algorithm", "flexdraft", "--speculative-draft-model-path", str(drafter)
        ),
        DFLARE: starter.launch(
            "--speculative-algorithm", "dflare", "--speculative-draft-model-path", str(dflare_drafter)
        ),
    }
    yield from _start(request, starter, launches, wanted)


@pytest.fixture(scope="session")
def plain(reference_servers: dict[str, Server]) -> Server:
    """A server without speculation: the reference."""
    return reference_servers["plain"]


@pytest.fixture(scope="session")
def scripted(reference_servers: dict[str, Server]) -> Server:
    """A server whose drafter follows the script each request names."""
    return reference_servers["scripted"]


@pytest.fixture(scope="session")
def flexdraft(drafting_servers: dict[str, Server]) -> Server:
    """A server that decodes by FlexDraft."""
    return drafting_servers["flexdraft"]


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
    request: pytest.FixtureRequest, reference_servers: dict[str, Server], plain: Server, reference: Answers
) -> Speculator:
    """Every way of drafting in turn; ``indirect`` parametrisation selects some."""
    name = server_of(request.param)
    drafting = name in DRAFTING_SERVERS
    server = (request.getfixturevalue("drafting_servers") if drafting else reference_servers)[name]
    return Speculator(request.param, server, block_size(server), plain, reference)
