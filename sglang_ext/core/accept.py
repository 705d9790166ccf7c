"""Acceptance: which drafts the target agrees with, and the token that follows them (FlexDraft section 5).

The law of this file: **for any drafts, the emitted tokens are distributed as the target's own samples.** A bad drafter
costs speed, never correctness.

Every request holds W rows of target output. Row 0 is the committed bonus token's row, row j the row of draft ``d_j``;
the target's distribution at row j, ``p_j``, judges draft ``d_{j+1}`` (stored at column j). The accepted drafts are a
leading run; the token after them, the *bonus*, comes from the row where the run ended.

Shape legend: B requests, W clean rows (so W - 1 drafts), V vocabulary. Everything is batched and nothing is read back
to the host, so the same code runs under CUDA without a synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from sglang_ext.core.refusal import Refusal, nearest
from sglang_ext.core.sampling import sample


class AcceptRule(str, Enum):
    """How a draft is judged.

    * GREEDY: accept d iff it is the target's choice; the bonus is the choice at the row where the run ends.
    * TARGET_ONLY: the draft is a point mass. Accept d with probability ``p(d)``; on rejection draw from ``p`` without
      d, renormalised. Acceptance per slot: ``p(d)``.
    * REJECTION: the draft was drawn from q. Accept d with probability ``min(1, p(d) / q(d))``; on rejection draw from
      ``max(p - q, 0)``, renormalised. Acceptance per slot: ``sum_x min(p(x), q(x))``.
    * EXACT_MATCH: draw ``x_j ~ p_j`` at every row; accept while the draft equals the draw; the bonus is the first draw
      that differs. Acceptance per slot, for a draft drawn from q: ``sum_x p(x) q(x)``.
    """

    GREEDY = "greedy"
    TARGET_ONLY = "target_only"
    REJECTION = "rejection"
    EXACT_MATCH = "exact_match"

    @classmethod
    def parse(cls, name: str, where: str = "accept_rule") -> AcceptRule:
        """Return the rule called ``name``.

        Raises:
            Refusal: if there is none; it names the nearest one.
        """
        names = [rule.value for rule in cls]
        if name not in names:
            raise Refusal(
                f"{where}={name!r} is not an acceptance rule{nearest(name, names)}",
                f"allowed are {', '.join(names)}",
                f"set {where} to one of them",
            )
        return cls(name)


@dataclass(frozen=True, eq=False)
class Accepted:
    """What a step commits.

    Attributes:
        lengths: ``[B]`` int64, accepted drafts, bonus excluded; the step commits ``lengths + 1`` tokens.
        bonus: ``[B]`` int64, the token after the accepted drafts.
        tokens: ``[B, W]`` int64: accepted drafts, then the bonus, then padding.
    """

    lengths: Tensor
    bonus: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class TreeAccepted(Accepted):
    """What a step commits when the candidates form a tree.

    Attributes:
        path: ``[B, W]`` int64 row indices of the accepted nodes, root (row 0) first, padded with -1; entry ``lengths``
            is the last accepted row, whose choice is the bonus.
    """

    path: Tensor


def accept(
    rule: AcceptRule,
    drafts: Tensor,
    valid: Tensor,
    *,
    target_choice: Tensor | None = None,
    target_probs: Tensor | None = None,
    rows: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_support: Tensor | None = None,
    is_greedy: Tensor | None = None,
    invalid: Tensor | None = None,
    uniforms: Tensor | None = None,
    generator: torch.Generator | None = None,
    pad: int = 0,
) -> Accepted:
    """Judge a batch of draft chains; requests may differ in verify length and in greediness.

    For any drafts the returned tokens are distributed as the target's own samples, provided that ``valid`` does not
    depend on the *drawn* draft tokens (confidences computed from q are fine) and, for REJECTION, that each usable
    draft was drawn from its q. A position past ``valid``, a draft outside ``[0, V)`` and a request or slot flagged
    ``invalid`` hold no draft at all: the run ends there and the bonus comes from the whole of p, not from a residual.

    Args:
        rule: how sampled rows are judged. Greedy rows of a mixed batch follow GREEDY whatever the rule.
        drafts: ``[B, W-1]`` int draft tokens.
        valid: ``[B]`` int, drafts to verify per request, at most W - 1.
        target_choice: ``[B, W]`` int. GREEDY: the target's first argmax per row. EXACT_MATCH: the target's draw per
            row (the host's own seeded sampler, for instance). Other rules: the argmax, read for greedy rows only.
        target_probs: ``[B, W, V]``, or ``[N, V]`` together with ``rows``; normalised, after every filter. Needed by
            TARGET_ONLY and REJECTION, and by EXACT_MATCH without ``target_choice``.
        rows: ``[B, W]`` int, the row of ``target_probs`` that holds each position (any row where there is none).
        draft_probs: ``[B, >= W-1, V]``, q of each slot over the target's V tokens; or ``[B, >= W-1, M]``, q over the M
            tokens of ``draft_support`` (a truncated q is exact as long as the draft was drawn from it). Needed by
            REJECTION.
        draft_support: ``[B, >= W-1, M]`` int, distinct tokens per slot, within ``[0, V)``.
        is_greedy: ``[B]`` bool. Optional where greedy requests have one-hot rows in ``target_probs``.
        invalid: ``[B]`` or ``[B, W-1]`` bool, drafts to disregard (NaN logits upstream).
        uniforms: ``[B, W, 2]`` draws in ``[0, 1)``: ``[:, j, 0]`` judges column j's draft, ``[:, j, 1]`` draws the
            token of row j. Given by callers that key randomness by seed and position; else drawn from ``generator``.
        generator: source of randomness, on the device of ``drafts``.
        pad: token written after the bonus.

    Returns:
        :class:`Accepted`.

    Raises:
        ValueError: if an input that the rule needs is missing.
    """
    usable = _usable(drafts, valid, invalid)
    if rule is AcceptRule.GREEDY:
        return _accept_choice(drafts, usable, _needed(target_choice, "target_choice", rule), pad)
    if rule is AcceptRule.EXACT_MATCH and target_choice is not None:
        return _accept_choice(drafts, usable, target_choice, pad)

    flat, rows = _flat_probs(_needed(target_probs, "target_probs", rule), rows)
    if uniforms is None:
        uniforms = torch.rand((*rows.shape, 2), dtype=torch.float64, device=drafts.device, generator=generator)
    if rule is AcceptRule.EXACT_MATCH:
        return _accept_choice(drafts, usable, sample(flat[rows], uniform=uniforms[..., 1]), pad)

    usable &= drafts < flat.shape[-1]
    q = _needed(draft_probs, "draft_probs", rule) if rule is AcceptRule.REJECTION else None
    sampled = _accept_ratio(drafts, usable, flat, rows, q, draft_support, uniforms, pad)
    if is_greedy is None:
        return sampled
    choice = target_choice if target_choice is not None else flat.argmax(-1)[rows]
    greedy = _accept_choice(drafts, usable, choice, pad)
    return Accepted(
        torch.where(is_greedy, greedy.lengths, sampled.lengths),
        torch.where(is_greedy, greedy.bonus, sampled.bonus),
        torch.where(is_greedy.unsqueeze(-1), greedy.tokens, sampled.tokens),
    )


def _needed(value: Tensor | None, name: str, rule: AcceptRule) -> Tensor:
    if value is None:
        raise ValueError(f"acceptance rule {rule.value} needs {name}; none was given: pass {name}")
    return value


def _usable(drafts: Tensor, valid: Tensor, invalid: Tensor | None) -> Tensor:
    """``[B, W-1]`` bool: columns that hold a draft to judge (the upper bound V is checked where V is known)."""
    usable = torch.arange(drafts.shape[1], device=drafts.device) < valid.unsqueeze(-1)
    usable &= drafts >= 0
    if invalid is not None:
        usable &= ~(invalid if invalid.dim() == 2 else invalid.unsqueeze(-1))
    return usable


def _flat_probs(target_probs: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ``[N, V]`` probabilities and the ``[B, W]`` map into them."""
    if rows is not None:
        return target_probs, rows
    batch, width, vocabulary = target_probs.shape
    rows = torch.arange(batch * width, device=target_probs.device).view(batch, width)
    return target_probs.reshape(batch * width, vocabulary), rows


def _run_length(accepted: Tensor) -> Tensor:
    """``[B]`` int64: length of the leading run of True in ``[B, W-1]``."""
    return accepted.to(torch.int64).cumprod(-1).sum(-1)


def _assemble(drafts: Tensor, lengths: Tensor, bonus: Tensor, pad: int) -> Accepted:
    """Write the accepted drafts, the bonus and the padding into ``[B, W]``."""
    column = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.nn.functional.pad(drafts.to(torch.int64), (0, 1), value=pad)
    tokens = torch.where(column < lengths.unsqueeze(-1), padded, pad)
    tokens = torch.where(column == lengths.unsqueeze(-1), bonus.unsqueeze(-1), tokens)
    return Accepted(lengths, bonus, tokens)


def _accept_choice(drafts: Tensor, usable: Tensor, choice: Tensor, pad: int) -> Accepted:
    """Accept while the draft equals the target's choice; the bonus is the choice where the run ends."""
    choice = choice.to(torch.int64)
    lengths = _run_length((drafts == choice[:, :-1]) & usable)
    return _assemble(drafts, lengths, choice.gather(1, lengths.unsqueeze(-1)).squeeze(-1), pad)


def _accept_ratio(
    drafts: Tensor,
    usable: Tensor,
    flat: Tensor,
    rows: Tensor,
    q: Tensor | None,
    support: Tensor | None,
    uniforms: Tensor,
    pad: int,
) -> Accepted:
    """Ratio test with q, or with a point mass on the draft when q is None.

    ``u < p(d) / q(d)`` is tested as ``u * q(d) < p(d)``, which needs no division and rejects on NaN.
    """
    columns = drafts.shape[1]
    token = torch.where(usable, drafts, 0).to(torch.int64)
    p_draft = flat[rows[:, :-1], token].to(torch.float64)
    bound = uniforms[:, :columns, 0].to(torch.float64)
    if q is not None:
        bound = bound * _draft_mass(q[:, :columns], support, token).to(torch.float64)
    lengths = _run_length((bound < p_draft) & usable)

    row = lengths.unsqueeze(-1)
    p_row = flat[rows.gather(1, row).squeeze(-1)]
    residual = p_row
    if columns:
        # Column of the failed test; a run that used every column has none, and `tested` is False for it.
        column = row.clamp(max=columns - 1)
        tested = (usable.gather(1, column) & (row < columns)).expand_as(p_row)
        if q is None:
            without = p_row.scatter(-1, token.gather(1, column), 0.0)
        else:
            without = _subtract(p_row, q, support, column).clamp_min(0.0)
        residual = torch.where(tested, without, p_row)
        # Rounding can reject although p == q (or p is all on the draft): nothing is left over, so p itself is right.
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_row)
    bonus = sample(residual, uniform=uniforms[..., 1].gather(1, row).squeeze(-1))
    return _assemble(drafts, lengths, bonus, pad)


def _draft_mass(q: Tensor, support: Tensor | None, token: Tensor) -> Tensor:
    """``[B, W-1]``: q of each drafted token."""
    if support is None:
        return q.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    return torch.where(support[:, : token.shape[1]] == token.unsqueeze(-1), q, 0.0).sum(-1)


def _subtract(p: Tensor, q: Tensor, support: Tensor | None, column: Tensor) -> Tensor:
    """``[B, V]``: p minus the q of slot ``column [B, 1]``."""
    index = column.unsqueeze(-1).expand(-1, -1, q.shape[-1])
    q_row = q.gather(1, index).squeeze(1).to(p.dtype)
    if support is None:
        return p - q_row
    return p.scatter_add(-1, support.to(torch.int64).gather(1, index).squeeze(1), -q_row)


def accept_tree_greedy(
    target_choice: Tensor,
    tokens: Tensor,
    parent: Tensor,
    valid: Tensor | None = None,
    pad: int = 0,
) -> TreeAccepted:
    """Greedy acceptance on a token tree: the deepest path whose every node is its parent's choice.

    Row 0 is the root (the committed bonus token). Node i is accepted iff its parent is and
    ``tokens[i] == target_choice[parent[i]]``. With the chain ``parent = [-1, 0, 1, ..]`` this is :func:`accept` with
    GREEDY. Between equally deep paths (duplicate siblings) the lowest row wins; they spell the same tokens.

    Args:
        target_choice: ``[B, W]`` int, the target's first argmax at each row.
        tokens: ``[B, W]`` int, the token of each row; column 0 is not judged.
        parent: ``[B, W]`` int, row index of the parent, before its children; -1 for the root and for absent rows.
        valid: ``[B]`` int, drafts (rows past the root) to judge per request; None judges all.
        pad: token written after the bonus.

    Returns:
        :class:`TreeAccepted`.
    """
    batch, width = tokens.shape
    choice = target_choice.to(torch.int64)
    up = parent.clamp_min(0).to(torch.int64)
    usable = (parent >= 0) & (tokens == choice.gather(1, up))
    if valid is not None:
        usable &= torch.arange(width, device=tokens.device) <= valid.unsqueeze(-1)
    # depth[i]: nodes on the accepted path down to row i (root 0), or -1 for a row that is not accepted.
    depth = torch.full((batch, width), -1, dtype=torch.int64, device=tokens.device)
    depth[:, 0] = 0
    for row in range(1, width):
        above = depth.gather(1, up[:, row : row + 1]).squeeze(-1)
        depth[:, row] = torch.where(usable[:, row] & (above >= 0), above + 1, -1)
    lengths, row_index = depth.max(-1).values, depth.argmax(-1)

    path = torch.full((batch, width), -1, dtype=torch.int64, device=tokens.device)
    current = row_index.unsqueeze(-1)
    for _ in range(width):
        path.scatter_(1, depth.gather(1, current).clamp_min(0), current)
        current = up.gather(1, current)
    bonus = choice.gather(1, row_index.unsqueeze(-1)).squeeze(-1)
    drafts = tokens.to(torch.int64).gather(1, path[:, 1:].clamp_min(0))
    found = _assemble(drafts, lengths, bonus, pad)
    return TreeAccepted(found.lengths, found.bonus, found.tokens, path)
