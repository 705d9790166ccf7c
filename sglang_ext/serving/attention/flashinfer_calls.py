"""FlashInfer's batch attention, narrowed to what this package asks of it.

Everything that needs FlashInfer's GPU kernels goes through :class:`Kernels`, which is handed the library as an object:
the real module, or :mod:`.flashinfer_twin`, whose classes read the same arguments in torch. The rules of use live here
and nowhere else:

* only the ``fa2`` kernels apply a custom mask on every GPU, so only they are used;
* one wrapper per mask mode: a wrapper that has once held a mask may go on using it;
* lengths are planned from the host, so that planning reads nothing back from the GPU; only pool slots and mask bits
  are on the device;
* a packed mask's index pointers count bytes; the library derives them in bits from the lengths, so ours replace them;
* planning fills a pinned buffer that is copied asynchronously: a wrapper is not planned again before that copy is done;
* a call inside a captured graph keeps its buffers (:class:`GraphRoom`) and gives every request the same rows: it is
  planned again before every replay, and tiles are chosen for those rows rather than for one request that has them all.

Shape legend: B requests, N query rows, S keys, P pool slots, Hq query heads, Hk key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sglang_ext.core.mask_bits import PackedMask
from sglang_ext.core.refusal import Refusal
from sglang_ext.serving.attention.graph_room import GraphRoom, with_uniform_rows

WORKSPACE_BYTES = 256 << 20
"""Scratch of the kernels; they run on one stream and share it."""

LARGEST_TILES = ((64, 128), (16, 64), (0, 16))
"""Most rows of a tile, query heads of one key/value head counted apart, for requests with more than so many."""

MERGE_THREADS, MERGE_WIDTH = 1024, 8
"""A merge gives a row one block of threads, each for this many numbers of one head: more heads are merged in turns."""

HEAD_SIZES = (64, 128, 256)
QUERY_DTYPES = (torch.float16, torch.bfloat16)
KEY_DTYPES = (*QUERY_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
BACKEND = "fa2"
LAYOUT = "NHD"


class MaskMode(Enum):
    """What a query row sees of its request's keys."""

    FULL = "full"
    CAUSAL = "causal"
    CUSTOM = "custom"


@dataclass(frozen=True)
class HeadShape:
    """Heads of the attention layers that one set of calls serves.

    Attributes:
        heads: Hq of this process.
        kv_heads: Hk of this process.
        head_dim: D, of keys and of values.
        scaling: multiplies the scores.
        dtype: of queries, inline keys and values, and outputs.
        kv_dtype: of the pool.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    dtype: torch.dtype
    kv_dtype: torch.dtype

    def check(self) -> None:
        """Refuse what the kernels cannot do.

        Raises:
            Refusal: naming the flag.
        """
        if self.head_dim not in HEAD_SIZES:
            raise Refusal(
                f"attention heads are {self.head_dim} wide",
                f"--attention-backend flashinfer allows {', '.join(map(str, HEAD_SIZES))}",
                "use --attention-backend triton",
            )
        if self.dtype not in QUERY_DTYPES:
            raise Refusal(
                f"the target runs in {self.dtype}",
                "--attention-backend flashinfer allows float16 and bfloat16",
                "use --dtype bfloat16",
            )
        if self.kv_dtype not in KEY_DTYPES or (self.kv_dtype in QUERY_DTYPES and self.kv_dtype != self.dtype):
            raise Refusal(
                f"keys and values are kept in {self.kv_dtype} beside queries in {self.dtype}",
                "--attention-backend flashinfer allows the target's own type, fp8_e4m3 and fp8_e5m2",
                "use --kv-cache-dtype auto",
            )
        if self.heads % self.kv_heads:
            raise Refusal(
                f"{self.heads} query heads share {self.kv_heads} key/value heads",
                "a multiple is allowed",
                "use --attention-backend triton",
            )


def load_library() -> Any:
    """Import FlashInfer.

    Raises:
        Refusal: it is not installed or cannot be imported.
    """
    try:
        import flashinfer
    except ImportError as error:
        raise Refusal(
            f"--attention-backend flashinfer: FlashInfer cannot be imported ({error})",
            "an installed FlashInfer is needed",
            "install flashinfer-python, or use --attention-backend triton",
        ) from error
    return flashinfer


def pointer(lengths: Sequence[int]) -> Tensor:
    """Return the ``[B+1]`` int32 index pointer of these lengths, on the host."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class _Call:
    """One wrapper of the library, planned in one mask mode for ever."""

    def __init__(
        self, wrapper: Any, mode: MaskMode, shape: HeadShape, device: torch.device, room: GraphRoom | None
    ) -> None:
        self._wrapper = wrapper
        self._mode = mode
        self._shape = shape
        self._room = room
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._rows = 0
        self._keys = 0

    def _before_plan(self, queries: Sequence[int], keys: Sequence[int], mask: PackedMask | None) -> None:
        if (mask is not None) != (self._mode is MaskMode.CUSTOM):
            raise ValueError(f"a call in mode {self._mode.value} was planned with mask {mask}; only custom takes one")
        if mask is not None and (mask.query_lens != tuple(queries) or mask.key_lens != tuple(keys)):
            raise ValueError(
                f"a mask of {list(mask.query_lens)} x {list(mask.key_lens)} was given for {list(queries)} x "
                f"{list(keys)}; lengths must agree: pack it from the same layout"
            )
        if len(queries) != len(keys) or not queries or min(queries) < 1 or min(keys) < 0:
            raise ValueError(f"{list(queries)} query and {list(keys)} key lengths were given; one of each per request")
        room = self._room
        if room is not None and list(queries) != [room.rows] * room.batch:
            raise ValueError(f"{list(queries)} query rows were planned in a graph of {room.batch} x {room.rows}")
        if self._copied is not None:
            self._copied.synchronize()
        self._rows, self._keys = sum(queries), sum(keys)

    def _after_plan(self, mask: PackedMask | None) -> None:
        if mask is not None:
            planned = self._wrapper._mask_indptr_buf
            if planned.shape != mask.byte_ptr.shape:
                raise RuntimeError(
                    f"FlashInfer planned {planned.shape[0] - 1} masks for {mask.byte_ptr.shape[0] - 1} requests; this "
                    "package expects FlashInfer 0.7: pip install flashinfer-python==0.7.2"
                )
            planned.copy_(mask.byte_ptr, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _common(self, mask: PackedMask | None, kv_dtype: torch.dtype) -> dict[str, Any]:
        return {
            "packed_custom_mask": None if mask is None else mask.bits,
            "causal": self._mode is MaskMode.CAUSAL,
            "sm_scale": self._shape.scaling,
            "q_data_type": self._shape.dtype,
            "kv_data_type": kv_dtype,
        }

    def _check_query(self, q: Tensor) -> None:
        expected = (self._rows, self._shape.heads, self._shape.head_dim)
        if q.shape != expected or q.dtype != self._shape.dtype:
            raise ValueError(
                f"queries of shape {tuple(q.shape)} and {q.dtype} were given to a call planned for {expected} and "
                f"{self._shape.dtype}: plan the pass they belong to"
            )


class PagedCall(_Call):
    """Attention of packed query rows over keys in the pool."""

    def plan(self, queries: Sequence[int], keys: Sequence[int], slots: Tensor, mask: PackedMask | None = None) -> None:
        """Plan the calls of one pass.

        Args:
            queries: query rows per request, at least 1 each.
            keys: keys per request; 0 gives zeros and an LSE of -inf.
            slots: ``[sum(keys)]`` int32 pool slot of every key, request by request, on the device.
            mask: who sees whom, in mode ``CUSTOM`` only.
        """
        self._before_plan(queries, keys, mask)
        if slots.shape != (self._keys,) or slots.dtype != torch.int32:
            raise ValueError(f"{slots.dtype} slots of shape {tuple(slots.shape)} were given for {self._keys} keys")
        shape = self._shape
        self._wrapper.plan(
            pointer(queries),
            pointer(keys),
            slots,
            # Pages of one token: a request without keys has no last page.
            torch.tensor([min(length, 1) for length in keys], dtype=torch.int32),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            1,
            **self._common(mask, shape.kv_dtype),
        )
        self._after_plan(mask)

    def run(
        self, q: Tensor, keys: Tensor, values: Tensor, k_scale: float | None = None, v_scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return outputs ``[N, Hq, D]`` and base-2 LSE ``[N, Hq]`` float32 of q ``[N, Hq, D]`` over a layer's pool.

        Args:
            q: query rows.
            keys, values: ``[P, Hk, D]``.
            k_scale, v_scale: what an fp8 pool was divided by.
        """
        self._check_query(q)
        paged = (keys.unsqueeze(1), values.unsqueeze(1))
        out, lse = self._wrapper.run(q, paged, k_scale=k_scale, v_scale=v_scale, return_lse=True)
        return out, lse


class RaggedCall(_Call):
    """Attention of packed query rows over packed keys."""

    def plan(self, queries: Sequence[int], keys: Sequence[int], mask: PackedMask | None = None) -> None:
        """Plan the calls of one pass, as :meth:`PagedCall.plan`."""
        self._before_plan(queries, keys, mask)
        shape = self._shape
        self._wrapper.plan(
            pointer(queries),
            pointer(keys),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            **self._common(mask, shape.dtype),
        )
        self._after_plan(mask)

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and base-2 LSE as :meth:`PagedCall.run`, over k and v ``[S, Hk, D]``."""
        self._check_query(q)
        if k.shape != (self._keys, self._shape.kv_heads, self._shape.head_dim) or v.shape != k.shape:
            raise ValueError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} were given for {self._keys} keys")
        out, lse = self._wrapper.run(q, k, v, return_lse=True)
        return out, lse


class Kernels:
    """Makes calls over one device and one scratch buffer.

    Args:
        library: FlashInfer, or an object with its three names.
        device: where queries and keys live.
        workspace_bytes: size of the scratch buffer.
    """

    def __init__(self, library: Any, device: torch.device | str, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        self.library = library
        self.device = torch.device(device)
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=self.device)

    def paged(self, mode: MaskMode, shape: HeadShape, room: GraphRoom | None = None) -> PagedCall:
        """Return a call over the pool in one mask mode; with ``room``, one that graphs replay."""
        made = self.library.BatchPrefillWithPagedKVCacheWrapper
        if room is None:
            return PagedCall(made(self.workspace, LAYOUT, backend=BACKEND), mode, shape, self.device, None)
        queries, keys = room.pointers(2)
        buffers = {
            "qo_indptr_buf": queries,
            "paged_kv_indptr_buf": keys,
            "paged_kv_indices_buf": room.slots,
            "paged_kv_last_page_len_buf": torch.zeros(room.batch, dtype=torch.int32, device=self.device),
        }
        wrapper = self._in_graph(made, room, buffers)
        return PagedCall(wrapper, mode, shape, self.device, room)

    def ragged(self, mode: MaskMode, shape: HeadShape, room: GraphRoom | None = None) -> RaggedCall:
        """Return a call over packed keys in one mask mode; with ``room``, one that graphs replay."""
        made = self.library.BatchPrefillWithRaggedKVCacheWrapper
        if room is None:
            return RaggedCall(made(self.workspace, LAYOUT, backend=BACKEND), mode, shape, self.device, None)
        queries, keys = room.pointers(2)
        wrapper = self._in_graph(made, room, {"qo_indptr_buf": queries, "kv_indptr_buf": keys})
        return RaggedCall(wrapper, mode, shape, self.device, room)

    def _in_graph(self, made: type, room: GraphRoom, buffers: dict[str, Tensor | None]) -> Any:
        """Return a wrapper of a class of the library that keeps ``buffers`` and those of ``room``."""
        uniform: Any = with_uniform_rows(made, room.rows)
        wrapper = uniform(
            self.workspace, LAYOUT, backend=BACKEND, use_cuda_graph=True, **buffers, **room.mask_buffers()
        )
        wrapper.reset_workspace_buffer(self.workspace, room.plans)
        return wrapper

    def holds(self, shape: HeadShape, batch: int, rows: int) -> bool:
        """Return whether a call in a graph finds room for its partial results, one for every row of its tiles.

        A call in a graph may split keys at every replay, so that planning sets this room aside however many rows there
        are, and fails where there is less.
        """
        group = shape.heads // shape.kv_heads
        tile = next(size for above, size in LARGEST_TILES if rows * group > above)
        padded = math.ceil(batch * math.ceil(rows * group / tile) * tile / group)
        number = torch.float32.itemsize
        return shape.heads * padded * (shape.head_dim + 1) * number <= self.workspace.numel()

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Merge outputs ``[N, Hq, D]`` and base-2 LSE ``[N, Hq]`` over two disjoint sets of keys."""
        heads, head_dim = first[0].shape[1:]
        at_once = MERGE_THREADS * MERGE_WIDTH // head_dim
        if heads <= at_once:
            out, lse = self.library.merge_state(*first, *second)
            return out, lse
        parts = []
        for start in range(0, heads, at_once):
            chosen = slice(start, start + at_once)
            parts.append(self.library.merge_state(*(part[:, chosen].contiguous() for part in (*first, *second))))
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)

    def warm_up(self, shape: HeadShape) -> None:
        """Run one row through every kind of call, so that kernels are compiled and loaded before requests wait."""
        empty = torch.zeros((1, shape.kv_heads, shape.head_dim), device=self.device)
        query = torch.zeros((1, shape.heads, shape.head_dim), dtype=shape.dtype, device=self.device)
        pool, row = empty.to(shape.kv_dtype), empty.to(shape.dtype)
        paged, ragged = self.paged(MaskMode.FULL, shape), self.ragged(MaskMode.FULL, shape)
        paged.plan([1], [1], torch.zeros(1, dtype=torch.int32, device=self.device))
        ragged.plan([1], [1])
        self.merge(paged.run(query, pool, pool), ragged.run(query, row, row))


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Give every row one more logit without a value, exactly, after the fact.

    Args:
        out: ``[N, Hq, D]`` attention without sinks, over all keys.
        lse: ``[N, Hq]`` its base-2 LSE.
        sinks: ``[Hq]`` natural logits.
    """
    return out * torch.sigmoid(lse * math.log(2.0) - sinks).unsqueeze(-1).to(out.dtype)
