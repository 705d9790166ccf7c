"""A stand-in for CUDA graphs that runs anywhere: operations of a pass are kept and run again on the same tensors.

It obeys the rules that matter to whoever captures: a replay reads inputs where they were, writes results where they
were, does no Python, and cannot read anything back. What a GPU alone can tell is that its kernels can be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_ext.serving.graphs.recorder import WARM_UPS, Captured

Output = TypeVar("Output")

READS_BACK = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
"""Operations whose result, or the size of it, depends on numbers the host does not have."""

FROM_THE_HOST = ("lift_fresh", "lift_fresh_copy")
"""Operations that bring numbers of the host into a tensor; a graph would keep those of the capture for ever."""


READS_MEMORY = (Tensor.tolist, Tensor.numpy)
"""Methods that read a tensor's memory without any operation; only a tensor of the host has them."""


class CaptureError(RuntimeError):
    """The pass did something that no graph can hold."""


@dataclass(frozen=True, eq=False)
class _Entry:
    """One operation: run it again, and copy what is not in place into the tensors of the capture."""

    operation: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]

    def replay(self) -> None:
        leaves = tree_leaves(self.operation(*self.args, **self.kwargs))
        for leaf in leaves:
            if isinstance(leaf, torch.ScriptObject):
                leaf.wait()  # a collective of the host goes on behind its caller's back; one in a graph keeps the order
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for held, new in zip(self.results, found, strict=True):
            if new.data_ptr() != held.data_ptr():
                held.copy_(new)


@dataclass
class _Tape(TorchDispatchMode):
    """Keeps every operation that is run under it."""

    entries: list[_Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        if name in READS_BACK or name in FROM_THE_HOST or _selects(name, args):
            raise CaptureError(f"{operation} inside a captured pass: no number may come from or go to the host")
        result = operation(*args, **kwargs)
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # A view needs no replay: it shows whatever its storage holds. Collectives write in place and do not say so.
        says_what_it_writes = operation.namespace == "aten"
        is_view = (
            says_what_it_writes
            and not operation._schema.is_mutable
            and all(leaf.untyped_storage().data_ptr() in given for leaf in made)
        )
        if not is_view:
            self.entries.append(_Entry(operation, args, kwargs, made))
        return result


def _selects(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation indexes by a mask, whose true entries the host must count."""
    return name.startswith("index") and any(
        isinstance(leaf, Tensor) and leaf.dtype is torch.bool for leaf in tree_leaves(args[1:2])
    )


class _NoMemoryReads(TorchFunctionMode):
    """Refuses what reads memory behind the tape's back."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS_MEMORY:
            raise CaptureError(f"{function.__name__} inside a captured pass: no number may go to the host")
        return function(*args, **(kwargs or {}))


class TapeRecorder:
    """The :class:`~sglang_ext.serving.graphs.recorder.Recorder` of tests.

    Attributes:
        captures, replays: how many there were.
    """

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def capture(self, run: Callable[[], Output]) -> Captured[Output]:
        """See :class:`Recorder`."""
        for _ in range(WARM_UPS):
            run()
        tape = _Tape()
        with torch.no_grad(), _NoMemoryReads(), tape:
            output = run()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for entry in tape.entries:
                    entry.replay()

        return Captured(output, replay)
