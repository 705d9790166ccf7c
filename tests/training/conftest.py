"""Both families with GQA and MHA, tied and untied embeddings."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.models.target import Target
from tests.training.tiny_targets import FAMILIES, make_model


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str) -> Any:
    return make_model(family)


@pytest.fixture
def target(model: Any) -> Target:
    return Target(model)
