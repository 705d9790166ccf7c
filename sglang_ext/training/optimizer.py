"""Optimizers with fp32 state: AdamW for everything, or Muon per attention head with AdamW for the rest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

#: Quintic Newton-Schulz coefficients of the published Muon optimizer.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Approximate ``(X X^T)^(-1/2) X`` of a batch ``[M, R, C]`` with R <= C by Newton-Schulz steps on the Gram matrix.

    Every step multiplies X by a polynomial of its R x R Gram matrix, so the wide product is done only twice.
    """
    a, b, c = _NEWTON_SCHULZ
    scaled = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-12)
    gram = scaled @ scaled.transpose(1, 2)
    identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    product = identity.expand_as(gram)
    for _ in range(_ROUNDS):
        factor = a * identity + b * gram + c * (gram @ gram)
        product = factor @ product
        gram = factor @ gram @ factor
    return product @ scaled


class HeadMuon:
    """Muon on the drafter's attention matrices, one head at a time: each head is a ``[head_dim, H]`` matrix.

    The step is scaled by 0.2 * sqrt(H), which gives it the size of an AdamW step of the same learning rate.
    """

    def __init__(self, model: Any, momentum: float = 0.95) -> None:
        self.momentum, self.head_dim = momentum, model.config.head_dim
        self.inputs: list[nn.Parameter] = []
        self.outputs: list[nn.Parameter] = []
        for layer in model.layers:
            attention = layer.self_attn
            self.inputs += [
                parameter
                for name, parameter in attention.named_parameters()
                if name.startswith(("q_proj", "k_proj", "v_proj"))
            ]
            self.outputs.append(attention.o_proj.weight)
        self.buffers = [torch.zeros_like(parameter) for parameter in self.parameters]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.inputs + self.outputs

    def _heads(self, tensors: list[Tensor]) -> Tensor:
        count = len(self.inputs)
        pieces = [tensor.unflatten(0, (-1, self.head_dim)) for tensor in tensors[:count]]
        pieces += [tensor.t().unflatten(0, (-1, self.head_dim)) for tensor in tensors[count:]]
        return torch.cat(pieces)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        updates = []
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            assert parameter.grad is not None
            buffer.lerp_(parameter.grad, 1 - self.momentum)
            updates.append(parameter.grad.lerp(buffer, self.momentum))
        heads = orthogonalise(self._heads(updates))
        scale, place = -lr * 0.2 * math.sqrt(heads.shape[2]), 0
        for index, parameter in enumerate(self.parameters):
            wide = parameter if index < len(self.inputs) else parameter.t()
            count = wide.shape[0] // self.head_dim
            wide.add_(heads[place : place + count].flatten(0, 1), alpha=scale)
            place += count


class Optimizer:
    """The optimizer of a run; ``step(scale)`` multiplies every learning rate by ``scale``."""

    def __init__(self, model: Any, kind: str, lr: float, lr_other: float) -> None:
        self.lr = lr
        self.muon = HeadMuon(model) if kind == "muon" else None
        attention = {id(parameter) for layer in model.layers for parameter in layer.parameters()}
        orthogonal = {id(parameter) for parameter in self.muon.parameters} if self.muon else set()
        rest = [parameter for parameter in model.parameters() if id(parameter) not in orthogonal]
        groups = [
            {"params": [p for p in rest if id(p) in attention], "base": lr},
            {"params": [p for p in rest if id(p) not in attention], "base": lr_other},
        ]
        groups = [group for group in groups if group["params"]]
        self.adamw = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def step(self, scale: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = group["base"] * scale
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(self.lr * scale)

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state_dict(), "muon": self.muon.buffers if self.muon else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        if self.muon is not None:
            for buffer, saved in zip(self.muon.buffers, state["muon"], strict=True):
                buffer.copy_(saved)


def learning_scale(progress: float, warmup: float) -> float:
    """Linear warm-up over the first ``warmup`` of the run, then a cosine from 1 to 0; ``progress`` in [0, 1]."""
    if progress < warmup:
        return max(progress, 1e-3 * warmup) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))
