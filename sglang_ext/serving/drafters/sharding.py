"""One rank's part of a drafter's layers, cut the way the host cuts a target's.

Query heads are split evenly. Key/value heads are split too, or repeated where there are fewer of them than ranks.
Projections out of heads and out of the feed-forward part are cut by columns: each rank computes a partial sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sglang_ext.core.refusal import Refusal

TP_FLAG = "--tp-size"

_QUERY, _KEY_VALUE = ("q_proj",), ("k_proj", "v_proj", "k_proj_target", "v_proj_target")
_WIDTH_ROWS, _WIDTH_COLUMNS = ("gate_proj", "up_proj"), ("down_proj",)


@dataclass(frozen=True)
class HeadShard:
    """The attention heads of one rank.

    Attributes:
        rank, size: which one, of how many.
        heads, kv_heads: of the whole layer.
        head_dim: width of one.
    """

    rank: int
    size: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def own_heads(self) -> int:
        """Query heads of this rank."""
        return self.heads // self.size

    @property
    def own_kv_heads(self) -> int:
        """Key/value heads of this rank, at least one."""
        return max(1, self.kv_heads // self.size)

    @property
    def query_columns(self) -> slice:
        """Where this rank's query heads lie in all of them, flat."""
        return self._columns(self.rank * self.own_heads, self.own_heads)

    @property
    def key_columns(self) -> slice:
        """Where this rank's key/value heads lie in all of them, flat; neighbours share one that is repeated."""
        return self._columns(self.rank * self.kv_heads // self.size, self.own_kv_heads)

    def _columns(self, first: int, count: int) -> slice:
        return slice(first * self.head_dim, (first + count) * self.head_dim)


def check_split(size: int, whose: str, heads: int, kv_heads: int, width: int | None = None) -> None:
    """Refuse a number of ranks that does not cut a model evenly.

    Args:
        size: ranks.
        whose: the model in messages.
        heads, kv_heads: attention heads of its layers.
        width: of its feed-forward parts; None if they are not its own.

    Raises:
        Refusal: naming ``--tp-size``.
    """
    if heads % size:
        raise Refusal(
            f"{TP_FLAG} {size} does not divide the {heads} attention heads of {whose}",
            "each rank takes the same number of heads",
            f"use a {TP_FLAG} that divides {heads}",
        )
    if kv_heads % size and size % kv_heads:
        raise Refusal(
            f"{TP_FLAG} {size} neither divides the {kv_heads} key/value heads of {whose} nor is a multiple of them",
            "each rank takes the same number of them, or one that others hold too",
            f"use another {TP_FLAG}",
        )
    if width is not None and width % size:
        raise Refusal(
            f"{TP_FLAG} {size} does not divide the feed-forward width {width} of {whose}",
            "each rank takes the same share of it",
            f"use a {TP_FLAG} that divides {width}",
        )


def own_part(tensors: Mapping[str, Tensor], heads: HeadShard) -> dict[str, Tensor]:
    """Return a drafter's tensors with the projections of its layers cut to one rank; all others are left whole."""
    return {name: _cut(name, tensor, heads) for name, tensor in tensors.items()}


def _cut(name: str, tensor: Tensor, heads: HeadShard) -> Tensor:
    if heads.size == 1 or not name.endswith(("_proj.weight", "_proj_target.weight")):
        return tensor
    projection = name.split(".")[-2]
    if projection in _QUERY:
        return tensor[heads.query_columns]
    if projection in _KEY_VALUE:
        return tensor[heads.key_columns]
    if projection == "o_proj":
        return tensor[:, heads.query_columns]
    if projection in _WIDTH_ROWS:
        return tensor.chunk(heads.size)[heads.rank]
    if projection in _WIDTH_COLUMNS:
        return tensor.chunk(heads.size, dim=1)[heads.rank]
    raise ValueError(f"no rule says how {name} is split over ranks")
