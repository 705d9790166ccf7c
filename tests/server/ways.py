"""Servers that work the way a GPU server does, on a CPU (see ``gpu_ways/gpu_ways.py``)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from sglang_ext.testing.server import Launch

PLUGIN = Path(__file__).parent / "gpu_ways"
OVERLAP_OFF = "--disable-overlap-schedule"
BATCHES = ("--cuda-graph-bs-decode", "1", "3")
"""Captured numbers of requests: batches of 2 are padded, batches above 3 run eagerly."""


def the_gpu_way(launch: Launch, *, overlap: bool = True) -> Launch:
    """Return the same server with the plugin loaded; ``overlap`` leaves overlapped scheduling on."""
    path = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = launch.flags if "--cuda-graph-bs-decode" in launch.flags else (*launch.flags, *BATCHES)
    return replace(
        launch,
        flags=flags,
        environment={**launch.environment, "PYTHONPATH": path},
        left_out=(OVERLAP_OFF,) if overlap else (),
    )
