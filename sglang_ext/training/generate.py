"""Batched generation by the target with continuous refilling: how training responses are made (FlexDraft section 6)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_ext.models.target import KVCache, Target


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt in token ids; ``temperature`` 0 is greedy."""

    key: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0


@dataclass(frozen=True)
class GenerationResult:
    """The response in token ids, with the stop token when ``finished`` (else the length limit was reached).

    ``states [D, 2, Hkv, S, head_dim]`` are the rotated keys and the values of the last D layers at positions 0..S-1,
    where S = prompt + response - 1 (the last token was never an input); None when the generator keeps no states.
    """

    request: GenerationRequest
    response_ids: tuple[int, ...]
    finished: bool
    states: Tensor | None = None


class BatchedGenerator:
    """Decodes up to ``slots`` requests at once and refills freed slots in groups.

    Active requests always occupy rows 0..n-1 of the cache, so a partly filled batch costs only its own rows.
    """

    def __init__(
        self,
        target: Target,
        stop_ids: Iterable[int],
        slots: int = 96,
        capacity: int = 640,
        seed: int = 0,
        state_layers: int = 0,
    ) -> None:
        self.state_layers = state_layers
        self.target, self.slots, self.capacity = target, slots, capacity
        self.stop_ids = frozenset(stop_ids)
        self.cache = KVCache(target.shape, slots, capacity, target.dtype, target.device)
        self.generator = torch.Generator(device=target.device).manual_seed(seed)
        self.refill = max(1, slots // 12)
        self._requests: list[GenerationRequest] = []
        self._outputs: list[list[int]] = []

    def run(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        """Yield every result in the order of finishing. Requests that do not fit the capacity are cut to it."""
        queue = iter(requests)
        exhausted = False
        while True:
            free = self.slots - len(self._requests)
            if not exhausted and free >= min(self.refill, self.slots):
                fresh = [request for _, request in zip(range(free), queue, strict=False)]
                exhausted = len(fresh) < free
                for start in range(0, len(fresh), self.refill):
                    yield from self._admit(fresh[start : start + self.refill])
            if not self._requests:
                if exhausted:
                    return
                continue
            yield from self._step()

    def _choose(self, hidden: Tensor, requests: list[GenerationRequest]) -> list[int]:
        logits = self.target.logits(hidden)
        chosen = logits.argmax(-1)
        hot = [index for index, request in enumerate(requests) if request.temperature > 0]
        if hot:
            temperatures = torch.tensor([requests[index].temperature for index in hot], device=logits.device)
            # Inverse transform: one uniform number a row, where multinomial would draw one per vocabulary entry.
            cumulative = F.softmax(logits[hot].float() / temperatures[:, None], dim=-1).cumsum(-1)
            uniform = torch.rand(len(hot), 1, generator=self.generator, device=logits.device)
            drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:])[:, 0]
            chosen[hot] = drawn.clamp_max(logits.shape[-1] - 1)
        return chosen.tolist()

    def _admit(self, requests: list[GenerationRequest]) -> Iterator[GenerationResult]:
        if not requests:
            return
        lengths = [len(request.prompt_ids) for request in requests]
        ids = torch.zeros(len(requests), max(lengths), dtype=torch.long, device=self.target.device)
        for row, request in enumerate(requests):
            ids[row, : lengths[row]] = torch.tensor(request.prompt_ids, device=self.target.device)
        base = len(self._requests)

        def store(index: int, _hidden: Tensor, keys: Tensor, values: Tensor) -> None:
            end, span = base + len(requests), ids.shape[1]
            self.cache.keys[index][base:end, :, :span] = keys.transpose(1, 2)
            self.cache.values[index][base:end, :, :span] = values.transpose(1, 2)

        hidden = self.target.prefill(ids, store)
        last = hidden[torch.arange(len(requests)), torch.tensor(lengths) - 1]
        first = self._choose(last, requests)
        self._requests += requests
        self._outputs += [[token] for token in first]
        yield from self._retire(list(range(base, base + len(requests))))

    @torch.no_grad()
    def _step(self) -> Iterator[GenerationResult]:
        device = self.target.device
        # The newest token of each output is not in the cache yet; it sits at position prompt + produced - 1.
        lengths = [len(r.prompt_ids) + len(o) - 1 for r, o in zip(self._requests, self._outputs, strict=True)]
        newest = torch.tensor([output[-1] for output in self._outputs], device=device)
        hidden = self.target.decode(newest, torch.tensor(lengths, device=device), self.cache, max(lengths) + 1)
        for output, token in zip(self._outputs, self._choose(hidden, self._requests), strict=True):
            output.append(token)
        yield from self._retire(list(range(len(self._requests))))

    def _retire(self, candidates: list[int]) -> Iterator[GenerationResult]:
        """Yield finished rows; the last active row moves into each freed slot."""
        for row in reversed(candidates):
            request, output = self._requests[row], self._outputs[row]
            finished = output[-1] in self.stop_ids
            full = len(output) >= request.max_new_tokens or len(request.prompt_ids) + len(output) >= self.capacity
            if not finished and not full:
                continue
            yield GenerationResult(request, tuple(output), finished, self._states(row))
            last = len(self._requests) - 1
            if row != last:
                span = len(self._requests[last].prompt_ids) + len(self._outputs[last])
                for kept in (*self.cache.keys, *self.cache.values):
                    kept[row, :, :span] = kept[last, :, :span]
                self._requests[row], self._outputs[row] = self._requests[last], self._outputs[last]
            self._requests.pop()
            self._outputs.pop()

    def _states(self, row: int) -> Tensor | None:
        if not self.state_layers:
            return None
        span = len(self._requests[row].prompt_ids) + len(self._outputs[row]) - 1
        pairs = zip(self.cache.keys[-self.state_layers :], self.cache.values[-self.state_layers :], strict=True)
        return torch.stack([torch.stack((keys[row, :, :span], values[row, :, :span])) for keys, values in pairs])
