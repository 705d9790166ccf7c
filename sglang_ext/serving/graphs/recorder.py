"""Capturing a pass: run it once, keep what it launched, launch that again.

What is captured must read its inputs from tensors that stay where they are, must not read anything back, and leaves its
results in the tensors it returned when it was captured. :class:`CudaRecorder` makes CUDA graphs; tests have one that
keeps torch operations instead (:mod:`sglang_ext.serving.graphs.tape`) and obeys the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

Output = TypeVar("Output")

WARM_UPS = 2
"""Runs before a capture: kernels are compiled, libraries pick algorithms and allocate their scratch."""


@dataclass(frozen=True, eq=False)
class Captured(Generic[Output]):
    """A captured pass.

    Attributes:
        output: what the pass returned; its tensors hold the results of the last replay.
        replay: launch the pass again.
    """

    output: Output
    replay: Callable[[], None]


class Recorder(Protocol):
    """Captures passes of one process."""

    def capture(self, run: Callable[[], Output]) -> Captured[Output]:
        """Run a pass, and return it captured."""


class CudaRecorder:
    """Captures CUDA graphs; all of them share one memory pool, since one replay ends before the next begins.

    They are captured on one stream, too: the pool keeps freed memory by the stream it was used on, and libraries keep
    scratch of their own for every stream they have seen.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, run: Callable[[], Output]) -> Captured[Output]:
        """See :class:`Recorder`."""
        from sglang.srt.distributed.parallel_state import graph_capture
        from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_capture_stream

        # The host's context lets collectives of all its groups be captured.
        with graph_capture(stream=get_or_create_global_graph_capture_stream()) as context:
            for _ in range(WARM_UPS):
                run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=context.stream):
                output = run()
        self._pool = graph.pool()
        return Captured(output, graph.replay)
