"""How long a call takes inside a CUDA graph, where nothing is launched one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch

REPLAYS = 30


def replay_time(call: Callable[[], object]) -> float:
    """Capture one call and return the mean time of a replay in microseconds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(stop) / REPLAYS * 1000, 2)
