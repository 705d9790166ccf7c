"""Options of the whole suite; the server fixtures live in ``tests/server/conftest.py``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sglang-flexdraft")
    group.addoption(
        "--target", default=None, metavar="DIR", help="target folder (default: the prepared default target)"
    )
    group.addoption(
        "--drafter", default=None, metavar="DIR", help="FlexDraft drafter folder (default: the shipped one, if any)"
    )
    group.addoption(
        "--dflare-drafter",
        default=None,
        metavar="DIR",
        help="DFlare or DFlash drafter folder (default: the shipped one, if any)",
    )
    group.addoption("--server-threads", type=int, default=1, metavar="N", help="OMP_NUM_THREADS of each test server")
    group.addoption(
        "--running",
        action="append",
        default=[],
        metavar="NAME=URL[,LOG]",
        help="use this running server as plain, scripted, flexdraft or dflare instead of starting one",
    )
