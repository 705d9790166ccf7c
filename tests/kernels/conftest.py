"""Kernels run on the CPU only where Triton was imported with TRITON_INTERPRET=1, in a process of their own.

``tests/unit/test_kernels.py`` starts that process; by hand it is ``TRITON_INTERPRET=1 pytest tests/kernels``.
"""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if "tests/kernels" in item.path.as_posix():
                item.add_marker(
                    pytest.mark.skip(reason="runs with TRITON_INTERPRET=1, as tests/unit/test_kernels.py does")
                )
