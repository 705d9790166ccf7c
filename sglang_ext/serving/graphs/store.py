"""All captured passes of a server: which sizes there are, capturing them at start, finding the one for a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
from sglang.srt.runtime_context import get_exec, get_parallel
from tqdm import tqdm

from sglang_ext.core.pass_sizes import row_sizes, smallest_at_least
from sglang_ext.serving.attention.flashinfer import MergedMaskRows
from sglang_ext.serving.attention.flashinfer_graph import GraphRooms
from sglang_ext.serving.attention.flashinfer_verify import ChainVerify
from sglang_ext.serving.device import DeviceWays
from sglang_ext.serving.drafters.base import LogitsDrafter
from sglang_ext.serving.graphs.draft_graph import AloneGraph, CommitGraph, JoinedGraph
from sglang_ext.serving.graphs.target_graph import GraphTools, TargetGraph
from sglang_ext.serving.pass_size import PassSize
from sglang_ext.serving.steps import StepParts

logger = logging.getLogger(__name__)


def pass_sizes(batches: Iterable[int], block_size: int, joins_up_to: int) -> list[PassSize]:
    """Return the target passes to capture, the largest first, so that smaller ones reuse their memory.

    Args:
        batches: numbers of requests.
        block_size: K.
        joins_up_to: most requests for which mask groups join the pass; 0 if they never do.
    """
    found = []
    for batch in sorted(batches, reverse=True):
        for width in reversed(row_sizes(block_size)):
            if batch <= joins_up_to:
                found.append(PassSize(batch, width, width))
            found.append(PassSize(batch, width, 0))
    return found


class GraphStore:
    """Captured passes by size.

    Args:
        tools: what they are made with.
        batches: numbers of requests to capture, ascending.
        joins_up_to: see :func:`pass_sizes`.
        show_progress: whether this process reports.
    """

    def __init__(self, tools: GraphTools, batches: Sequence[int], joins_up_to: int, show_progress: bool) -> None:
        self._batches = list(batches)
        self._targets: dict[PassSize, TargetGraph] = {}
        self._commits: dict[PassSize, CommitGraph] = {}
        self._alone: dict[PassSize, AloneGraph] = {}
        self._joined: dict[PassSize, JoinedGraph] = {}
        wanted = pass_sizes(batches, tools.block_size, joins_up_to)
        sizes = [size for size in wanted if tools.fits(size)]
        if len(sizes) < len(wanted):
            logger.warning(
                "%d of %d decode passes are not captured and run eagerly: they need more scratch than the %d MB of the "
                "attention kernels",
                len(wanted) - len(sizes),
                len(wanted),
                tools.rooms.kernels.workspace.numel() >> 20,
            )
        for size in tqdm(sizes, desc="Capturing decode passes", disable=not show_progress):
            self._capture(tools, size)

    def _capture(self, tools: GraphTools, size: PassSize) -> None:
        target = self._targets[size] = TargetGraph(tools, size)
        if tools.drafter is None:
            return
        if target.output.taps is not None:
            self._commits[size] = CommitGraph(tools, target)
        if size.groups:
            self._joined[size] = JoinedGraph(tools, target)
        else:
            self._alone[size] = AloneGraph(tools, target)

    @property
    def passes(self) -> int:
        """How many passes were captured."""
        return sum(len(kind) for kind in (self._targets, self._commits, self._alone, self._joined))

    def find(self, batch: int, width: int, groups: int) -> PassSize | None:
        """Return the size to replay for a step; None if its batch is larger than any captured."""
        if batch > self._batches[-1]:
            return None
        size = PassSize(smallest_at_least(self._batches, batch), width, groups)
        return size if size in self._targets else None

    def target(self, size: PassSize) -> TargetGraph:
        """Return the target pass of a size that :meth:`find` returned."""
        return self._targets[size]

    def commit(self, size: PassSize) -> CommitGraph | None:
        """Return the pass that keeps context; None for a drafter that keeps none."""
        return self._commits.get(size)

    def alone(self, size: PassSize) -> AloneGraph | None:
        """Return the drafting pass behind a target pass without groups."""
        return self._alone.get(size)

    def joined(self, size: PassSize) -> JoinedGraph | None:
        """Return the drafting pass behind a target pass with groups."""
        return self._joined.get(size)


def capture_passes(parts: StepParts, ways: DeviceWays, batches: Sequence[int]) -> GraphStore | None:
    """Capture the decode passes of a worker; None where none are wanted or the device has no graphs.

    Args:
        parts: the worker's parts; pools and attention backend exist by now.
        ways: of its device.
        batches: numbers of requests to capture for.
    """
    if ways.recorder is None or ways.kernels is None or not batches:
        return None
    runner, drafter = parts.runner, parts.drafter
    captured = drafter if isinstance(drafter, LogitsDrafter) else None
    planned = captured is None or isinstance(captured.attention, MergedMaskRows)
    if not isinstance(runner.attn_backend, ChainVerify) or not planned:
        logger.warning("Decode passes are not captured: this target or gpu_attention form is attended eagerly")
        return None
    rooms = GraphRooms(ways.kernels(runner), batches[-1], runner.req_to_token_pool.req_to_token.shape[1])
    tools = GraphTools(runner, captured, drafter, rooms, ways.recorder(), parts.block_size)
    policy = parts.plan.options.mode_policy()
    joins_up_to = batches[-1] if policy.mode == "parallel" else policy.parallel_max_batch
    joins_up_to = joins_up_to if drafter.can_join else 0
    started = time.perf_counter()
    # What the collector frees in the middle of a recording could end it.
    with freeze_gc(get_exec().graph.enable_cudagraph_gc):
        store = GraphStore(tools, batches, joins_up_to, show_progress=get_parallel().tp_rank == 0)
    logger.info("Captured %d decode passes in %.1f s", store.passes, time.perf_counter() - started)
    return store
