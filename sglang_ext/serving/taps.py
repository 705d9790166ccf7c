"""Taps: the outputs of chosen target layers for every row of a pass, together with where those rows live.

The host's models can hand out the residual stream in front of chosen layers. They are asked to; a forward hook on the
inner model takes the tensors away again before anything else sees them, so logits, logprobs and returned hidden states
are computed exactly as on a server without taps.

Shape legend: N rows of a pass, T taps, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal


class Taps(NamedTuple):
    """One pass as a drafter sees it.

    Attributes:
        states: T tensors ``[N, H]`` in the order of the layer ids asked for.
        positions: ``[N]`` absolute position of each row.
        slots: ``[N]`` pool slot of each row.
    """

    states: list[Tensor]
    positions: Tensor
    slots: Tensor

    def rows(self, index: Tensor) -> Taps:
        """Return the taps of the rows ``index [M]``."""
        return Taps([state[index] for state in self.states], self.positions[index], self.slots[index])


class TapRecorder:
    """Keeps the taps of the last pass of one target.

    Args:
        model: the host's causal LM.
        layer_ids: 0-based target layers whose outputs are wanted, in the drafter's order.
        flag: the option to name in messages.

    Raises:
        Refusal: the model has no such hook, or an id is not one of its layers that can be tapped.
    """

    def __init__(self, model: torch.nn.Module, layer_ids: Sequence[int], flag: str) -> None:
        inner = _inner_model(model, flag)
        last = len(inner.layers) - 2
        outside = [layer for layer in layer_ids if not 0 <= layer <= last]
        if outside:
            # The host hands out what goes into a layer, and nothing follows the last one.
            raise Refusal(
                f"the drafter taps target layers {outside}",
                f"layers 0 to {last} of {type(model).__name__} can be tapped",
                f"{flag} must name a drafter trained for this target",
            )
        self._order = [sorted(set(layer_ids)).index(layer) for layer in layer_ids]
        self._held: Taps | None = None
        inner.layers_to_capture = [layer + 1 for layer in sorted(set(layer_ids))]
        inner.register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
        """Take the taps out of the inner model's result (forward hook)."""
        _, positions, forward_batch = args[:3]
        hidden, states = output
        self._held = Taps([states[at] for at in self._order], positions, forward_batch.out_cache_loc)
        return hidden

    def take(self) -> Taps:
        """Return the taps of the pass that has just run, once.

        Raises:
            RuntimeError: no pass has run since the last call.
        """
        if self._held is None:
            raise RuntimeError(
                "the target ran without handing out its hidden states; the drafter's context would have a hole: "
                "start the server without --speculative-algorithm, or with CUDA graphs disabled"
            )
        held, self._held = self._held, None
        return held


def _inner_model(model: torch.nn.Module, flag: str) -> Any:
    """Return the model's stack of layers, which must know ``layers_to_capture``."""
    inner: Any = model._modules.get("model")
    if inner is None or "layers_to_capture" not in vars(inner):
        raise Refusal(
            f"the target {type(model).__name__} does not hand out hidden states of its layers",
            "--speculative-algorithm dflare needs a target that does",
            f"serve another target, or a FlexDraft drafter ({flag})",
        )
    return inner
