"""Laws of core.accept: for any drafts, the emitted tokens are distributed as the target's own samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ext.core.accept import Accepted, AcceptRule, accept, accept_tree_greedy
from sglang_ext.core.refusal import Refusal
from sglang_ext.core.sampling import SamplingParams, sample, target_probs

SEED = 20260521
V = 8
DRAWS = 200_000
RULES = [AcceptRule.TARGET_ONLY, AcceptRule.REJECTION, AcceptRule.EXACT_MATCH]
Judge = Callable[..., Accepted]


class Target:
    """A second-order Markov target over 8 tokens, truncated by top-k so that some tokens have no mass."""

    def __init__(self) -> None:
        logits = torch.randn(1 + V + V * V, V, generator=torch.Generator().manual_seed(SEED)) * 1.2
        count = logits.shape[0]
        params = SamplingParams.from_lists([0.9] * count, [6] * count, [0.97] * count, [0.0] * count)
        probs = target_probs(logits, params)
        self.first = probs[0]
        self.second = probs[1 : 1 + V]
        self.third = probs[1 + V :].view(V, V, V)

    def rows(self, drafts: Tensor) -> Tensor:
        """``[B, 3, V]``: what the target says after 0, 1 and 2 of the drafts (clamped into the vocabulary)."""
        d = drafts.clamp(0, V - 1)
        first = self.first.expand(drafts.shape[0], V)
        return torch.stack([first, self.second[d[:, 0]], self.third[d[:, 0], d[:, 1]]], dim=1)

    def joint(self) -> Tensor:
        """``[V, V]``: exact law of the first two tokens."""
        return (self.first.unsqueeze(-1) * self.second).double()


def drafter(kind: str, target: Target) -> Tensor:
    """``[2, V]``: the draft distribution of both slots."""
    marginal = target.first @ target.second
    truth = torch.stack([target.first, marginal])
    if kind == "good":
        return 0.8 * truth + 0.2 / V
    if kind == "adversarial":  # most mass where the target has least
        inverse = 1 / (truth + 0.02)
        return inverse / inverse.sum(-1, keepdim=True)
    zero = torch.zeros(2, V)
    zero[:, target.first.argmin()] = 1.0
    return zero


def point_drafts(kind: str, target: Target, draws: int) -> Tensor:
    """``[draws, 2]`` drafts that do not depend on chance: the best, the least likely possible, an impossible token."""
    if kind == "good":
        token = target.first.argmax()
    elif kind == "adversarial":
        token = target.first.masked_fill(target.first == 0, 2.0).argmin()
    else:
        token = target.first.argmin()
    return token.expand(draws, 2)


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """p-value of the counts, cells below five expected hits merged; impossible cells must be empty."""
    counts, expected = counts.flatten().double(), expected.flatten().double()
    if counts[expected == 0].sum() > 0:
        return 0.0
    large = expected >= 5
    counts = torch.cat([counts[large], counts[~large].sum(0, keepdim=True)])
    expected = torch.cat([expected[large], expected[~large].sum(0, keepdim=True)])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def first_two_tokens(
    rule: AcceptRule, kind: str, judge: Judge, *, hard: bool, support: bool = False
) -> tuple[Tensor, Target]:
    """Run one step of two drafts, and where it commits a single token a second step of one draft; count pairs."""
    target, generator = Target(), torch.Generator().manual_seed(SEED)
    assert (target.first == 0).any(), "the truncation must leave impossible tokens"
    q = drafter(kind, target).expand(DRAWS, 2, V)
    drafts = sample(q, generator)
    if rule is AcceptRule.TARGET_ONLY:
        drafts = point_drafts(kind, target, DRAWS)
    index = torch.arange(DRAWS)
    valid, invalid = torch.full((DRAWS,), 2), torch.zeros(DRAWS, 2, dtype=torch.bool)
    if hard:  # verify lengths 0..2, flagged requests, drafts outside the vocabulary: all unrelated to the draws
        valid, invalid = index % 3, (index % 7 == 0).unsqueeze(-1).expand(DRAWS, 2)
        drafts = torch.where((index % 11 == 0).unsqueeze(-1), torch.tensor([V, -1]), drafts)
    q_args: dict[str, Tensor] = {"draft_probs": q} if rule is AcceptRule.REJECTION else {}
    if support:
        order = torch.randperm(V, generator=generator)
        q_args = {"draft_probs": q[..., order], "draft_support": order.expand(DRAWS, 2, V)}
    step = judge(
        rule, drafts, valid, target_probs=target.rows(drafts), invalid=invalid, generator=generator, pad=-1, **q_args
    )
    if rule is AcceptRule.REJECTION:  # a judged draft is spent: the next step draws its own
        drafts = torch.where(invalid | (drafts % V != drafts), drafts, sample(q, generator))
    one = judge(
        rule,
        drafts[:, :1],
        valid.clamp_max(1),
        target_probs=torch.stack(
            [target.second[step.tokens[:, 0]], target.third[step.tokens[:, 0], drafts[:, 0] % V]], dim=1
        ),
        invalid=invalid[:, :1],
        generator=generator,
        **q_args,
    )
    second = torch.where(step.lengths > 0, step.tokens[:, 1], one.tokens[:, 0])
    return torch.bincount(step.tokens[:, 0] * V + second, minlength=V * V), target


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("kind", ["good", "adversarial", "impossible"])
@pytest.mark.parametrize("rule", RULES)
def test_emitted_tokens_follow_the_target(rule: AcceptRule, kind: str, hard: bool) -> None:
    counts, target = first_two_tokens(rule, kind, accept, hard=hard)
    p_value = chi_square_p(counts, target.joint() * DRAWS)
    print(f"seed {SEED}, {rule.value}, {kind}: p = {p_value:.4f}")
    assert p_value > 0.001


@pytest.mark.parametrize("kind", ["good", "adversarial", "impossible"])
def test_a_truncated_draft_distribution_keeps_the_law(kind: str) -> None:
    counts, target = first_two_tokens(AcceptRule.REJECTION, kind, accept, hard=False, support=True)
    assert chi_square_p(counts, target.joint() * DRAWS) > 0.001, f"seed {SEED}"


def bonus_from_p(rule: AcceptRule, drafts: Tensor, valid: Tensor, **kwargs: Tensor) -> Accepted:
    """A tempting mistake: after a rejection, draw from the whole of p."""
    right = accept(rule, drafts, valid, **kwargs)  # type: ignore[arg-type]
    probs = kwargs["target_probs"][torch.arange(len(drafts)), right.lengths]
    bonus = sample(probs, kwargs["generator"])  # type: ignore[arg-type]
    return Accepted(right.lengths, bonus, right.tokens.scatter(1, right.lengths.unsqueeze(-1), bonus.unsqueeze(-1)))


def always_accept_first(rule: AcceptRule, drafts: Tensor, valid: Tensor, **kwargs: Tensor) -> Accepted:
    """Another one: p(d) > 0 is taken for agreement."""
    kwargs["target_probs"] = kwargs["target_probs"].clone()
    column = drafts[:, :1].unsqueeze(-1)
    possible = kwargs["target_probs"][:, :1].gather(2, column)
    kwargs["target_probs"][:, :1].scatter_(2, column, (possible > 0).float())
    return accept(rule, drafts, valid, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("judge", [bonus_from_p, always_accept_first])
@pytest.mark.parametrize("rule", RULES)
def test_the_law_catches_a_wrong_acceptance(rule: AcceptRule, judge: Judge) -> None:
    counts, target = first_two_tokens(rule, "good", judge, hard=False)
    assert chi_square_p(counts, target.joint() * DRAWS) < 1e-6


def test_acceptance_rates_are_the_formulas() -> None:
    """p(d), sum min(p, q) and sum p q, per slot."""
    target, generator = Target(), torch.Generator().manual_seed(SEED)
    p, q = target.first, drafter("good", target)[0]
    formulas = {
        AcceptRule.TARGET_ONLY: p.max(),
        AcceptRule.REJECTION: torch.minimum(p, q).sum(),
        AcceptRule.EXACT_MATCH: (p * q).sum(),
    }
    for rule, rate in formulas.items():
        drafts = sample(q.expand(DRAWS, 1, V), generator)
        if rule is AcceptRule.TARGET_ONLY:
            drafts = p.argmax().expand(DRAWS, 1)
        done = accept(
            rule,
            drafts,
            torch.ones(DRAWS),
            target_probs=p.expand(DRAWS, 2, V),
            draft_probs=q.expand(DRAWS, 1, V),
            generator=generator,
        )
        error = 5 * (rate * (1 - rate) / DRAWS) ** 0.5
        assert abs(done.lengths.double().mean() - rate) < error, f"{rule.value}, seed {SEED}"


# ---- greedy -------------------------------------------------------------------------------------------------------


def greedy_next(prefix: list[int]) -> int:
    """A fixed greedy target: any function of the whole prefix will do."""
    state = 17
    for token in prefix:
        state = (state * 31 + token + 7) % 1_000_003
    return state % 5


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_greedy_output_does_not_depend_on_the_drafts(data: st.DataObject) -> None:
    batch, width, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), 4
    prefixes = [[i] for i in range(batch)]
    plain = [[i] for i in range(batch)]
    for sequence in plain:
        for _ in range(steps * width):
            sequence.append(greedy_next(sequence))
    for _ in range(steps):
        drafts, choices, valid = [], [], []
        for prefix in prefixes:
            truth = list(prefix)
            row, choice = [], [greedy_next(truth)]
            for _ in range(width - 1):
                honest = data.draw(st.booleans())
                row.append(choice[-1] if honest else data.draw(st.sampled_from([0, 1, 2, 3, 4, 5, -1, 10**9])))
                truth.append(row[-1])
                choice.append(greedy_next(truth))
            drafts.append(row)
            choices.append(choice)
            valid.append(data.draw(st.integers(0, width - 1)))
        done = accept(
            AcceptRule.GREEDY,
            torch.tensor(drafts, dtype=torch.int64).view(batch, width - 1),
            torch.tensor(valid),
            target_choice=torch.tensor(choices),
            pad=-7,
        )
        for i, prefix in enumerate(prefixes):
            length = int(done.lengths[i])
            emitted = done.tokens[i].tolist()
            assert length <= valid[i]
            assert emitted[: length + 1] == plain[i][len(prefix) : len(prefix) + length + 1]
            assert emitted[length] == int(done.bonus[i])
            assert emitted[length + 1 :] == [-7] * (width - length - 1)
            prefix.extend(emitted[: length + 1])


def test_a_greedy_request_in_a_mixed_batch_equals_its_solo_run() -> None:
    generator = torch.Generator().manual_seed(SEED)
    batch, width, vocabulary = 64, 5, 12
    logits = torch.randn(batch * width, vocabulary, generator=generator)
    greedy = torch.arange(batch) % 2 == 0
    params = SamplingParams.from_lists(
        [0.0 if g else 1.0 for g in greedy.tolist()], [-1] * batch, [1.0] * batch, [0.0] * batch
    )
    probs = target_probs(logits, params.rows(torch.arange(batch).repeat_interleave(width))).view(batch, width, -1)
    choice = logits.argmax(-1).view(batch, width)
    noise = torch.randint(-1, vocabulary + 1, (batch, width - 1), generator=generator)
    drafts = torch.where(torch.rand(batch, width - 1, generator=generator) < 0.7, choice[:, :-1], noise)
    valid = torch.randint(0, width, (batch,), generator=generator)
    q = torch.softmax(torch.randn(batch, width - 1, vocabulary, generator=generator), -1)
    solo = accept(AcceptRule.GREEDY, drafts, valid, target_choice=choice)
    for rule in RULES:
        for extra in ({}, {"is_greedy": greedy}, {"is_greedy": greedy, "target_choice": choice}):
            if rule is AcceptRule.EXACT_MATCH and "target_choice" in extra:
                continue  # there it means the target's draws
            done = accept(
                rule,
                drafts,
                valid,
                target_probs=probs,
                draft_probs=q,
                generator=torch.Generator().manual_seed(1),
                **extra,  # type: ignore[arg-type]
            )
            for name in ("lengths", "bonus", "tokens"):
                got, expected = getattr(done, name)[greedy], getattr(solo, name)[greedy]
                assert torch.equal(got, expected), f"{rule.value} {sorted(extra)} {name}, seed {SEED}"
    assert solo.lengths[greedy].unique().numel() > 2, "the case must not be trivial"


# ---- details the law alone does not pin -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", list(AcceptRule))
def test_what_is_not_a_draft_is_never_accepted(rule: AcceptRule) -> None:
    """Past the verify length, outside the vocabulary, flagged, or with NaN in q: the run ends; the bonus is p's."""
    p = torch.zeros(6, 3, 4)
    p[..., 2] = 1.0
    drafts = torch.full((6, 2), 2)
    drafts[1, 1], drafts[2, 0] = 4, -1
    valid = torch.tensor([2, 2, 2, 1, 2, 2])
    invalid = torch.tensor([False, False, False, False, True, False])
    q = torch.full((6, 2, 4), 0.25)
    q[5] = float("nan")
    done = accept(
        rule,
        drafts,
        valid,
        target_choice=p.argmax(-1),
        target_probs=p,
        draft_probs=q,
        invalid=invalid,
        generator=torch.Generator().manual_seed(SEED),
        pad=9,
    )
    last = 0 if rule is AcceptRule.REJECTION else 2
    assert done.lengths.tolist() == [2, 1, 0, 1, 0, last]
    assert done.bonus.tolist() == [2] * 6
    assert done.tokens[:4].tolist() == [[2, 2, 2], [2, 2, 9], [2, 9, 9], [2, 2, 9]]


def test_invalid_may_name_single_slots() -> None:
    choice = torch.tensor([[1, 2, 3]])
    invalid = torch.tensor([[False, True]])
    done = accept(AcceptRule.GREEDY, choice[:, :2], torch.tensor([2]), target_choice=choice, invalid=invalid)
    assert done.tokens.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("rule", RULES)
def test_ragged_probabilities_equal_padded_ones(rule: AcceptRule) -> None:
    generator = torch.Generator().manual_seed(SEED)
    batch, width = 40, 4
    probs = torch.softmax(torch.randn(batch, width, V, generator=generator), -1)
    drafts = torch.randint(0, V, (batch, width - 1), generator=generator)
    q = torch.softmax(torch.randn(batch, width + 2, V, generator=generator), -1)
    valid = torch.randint(0, width, (batch,), generator=generator)
    uniforms = torch.rand(batch, width, 2, generator=generator)
    padded = accept(rule, drafts, valid, target_probs=probs, draft_probs=q, uniforms=uniforms)
    real = torch.arange(width) <= valid.unsqueeze(-1)
    rows = torch.where(real, real.flatten().cumsum(0).view(batch, width) - 1, 0)
    flat = accept(rule, drafts, valid, target_probs=probs[real], rows=rows, draft_probs=q, uniforms=uniforms)
    assert torch.equal(padded.tokens, flat.tokens), f"seed {SEED}"
    assert padded.lengths.unique().numel() > 1


def test_external_samples_decide_under_exact_match() -> None:
    done = accept(
        AcceptRule.EXACT_MATCH,
        torch.tensor([[4, 5], [4, 5]]),
        torch.tensor([2, 2]),
        target_choice=torch.tensor([[4, 6, 1], [4, 5, 1]]),
    )
    assert done.tokens.tolist() == [[4, 6, 0], [4, 5, 1]]


@pytest.mark.parametrize("rule", RULES)
def test_without_drafts_a_step_is_a_plain_sample(rule: AcceptRule) -> None:
    p = torch.softmax(torch.randn(1, 1, V, generator=torch.Generator().manual_seed(SEED)), -1)
    done = accept(
        rule,
        torch.zeros(DRAWS, 0, dtype=torch.int64),
        torch.zeros(DRAWS),
        target_probs=p.expand(DRAWS, 1, V),
        draft_probs=torch.zeros(DRAWS, 0, V),
        generator=torch.Generator().manual_seed(SEED),
    )
    assert done.tokens.shape == (DRAWS, 1)
    assert chi_square_p(torch.bincount(done.bonus, minlength=V), p[0, 0].double() * DRAWS) > 0.001, f"seed {SEED}"


def test_equal_distributions_accept_everything() -> None:
    """p == q leaves no residual; a rejection by rounding must still emit a possible token."""
    p = torch.softmax(torch.randn(500, 3, V, generator=torch.Generator().manual_seed(SEED)), -1)
    drafts = sample(p[:, :2], torch.Generator().manual_seed(SEED))
    uniforms = torch.full((500, 3, 2), 1 - 2**-53, dtype=torch.float64)
    done = accept(
        AcceptRule.REJECTION, drafts, torch.full((500,), 2), target_probs=p, draft_probs=p[:, :2], uniforms=uniforms
    )
    assert (done.lengths == 2).all()
    one_hot = torch.nn.functional.one_hot(torch.tensor([[3, 3]]), V).float()
    wrong = accept(
        AcceptRule.TARGET_ONLY,
        torch.tensor([[3]]),
        torch.tensor([1]),
        target_probs=one_hot * 0.9,
        uniforms=uniforms[:1, :2],
    )
    assert wrong.bonus.tolist() == [3], "nothing is left without the draft, so p itself answers"


def test_a_missing_input_is_named() -> None:
    drafts, valid = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1)
    with pytest.raises(ValueError, match="needs target_choice"):
        accept(AcceptRule.GREEDY, drafts, valid)
    with pytest.raises(ValueError, match="needs target_probs"):
        accept(AcceptRule.TARGET_ONLY, drafts, valid)
    with pytest.raises(ValueError, match="needs draft_probs"):
        accept(AcceptRule.REJECTION, drafts, valid, target_probs=torch.ones(1, 2, 4) / 4)


def test_rules_are_read_by_name() -> None:
    assert [AcceptRule.parse(rule.value) for rule in AcceptRule] == list(AcceptRule)
    with pytest.raises(Refusal, match="did you mean 'rejection'"):
        AcceptRule.parse("rejektion")


@pytest.mark.parametrize("rule", list(AcceptRule))
def test_acceptance_reads_nothing_back(rule: AcceptRule) -> None:
    """On the meta device every read of a value, and every shape that depends on one, is an error."""
    ids, flag = torch.empty(3, 4, dtype=torch.int64, device="meta"), torch.empty(3, dtype=torch.bool, device="meta")
    done = accept(
        rule,
        ids[:, :3],
        ids[:, 0],
        target_choice=None if rule is AcceptRule.EXACT_MATCH else ids,
        target_probs=torch.empty(9, V, device="meta"),
        rows=ids,
        draft_probs=torch.empty(3, 5, 2, device="meta"),
        draft_support=torch.empty(3, 5, 2, dtype=torch.int64, device="meta"),
        is_greedy=flag,
        invalid=flag,
    )
    assert (done.lengths.shape, done.bonus.shape, done.tokens.shape) == ((3,), (3,), (3, 4))
    assert accept_tree_greedy(ids, ids, ids, ids[:, 0]).path.shape == (3, 4)


# ---- trees ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_chain_is_a_tree(data: st.DataObject) -> None:
    batch, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    small = st.integers(0, 1)
    tokens = torch.tensor([[data.draw(small) for _ in range(width)] for _ in range(batch)])
    choice = torch.tensor([[data.draw(small) for _ in range(width)] for _ in range(batch)])
    valid = torch.tensor([data.draw(st.integers(0, width - 1)) for _ in range(batch)])
    parent = (torch.arange(width) - 1).expand(batch, width)
    chain = accept(AcceptRule.GREEDY, tokens[:, 1:], valid, target_choice=choice)
    tree = accept_tree_greedy(choice, tokens, parent, valid)
    for name in ("lengths", "bonus", "tokens"):
        assert torch.equal(getattr(chain, name), getattr(tree, name))
    row = torch.arange(width)
    assert torch.equal(tree.path, torch.where(row <= chain.lengths.unsqueeze(-1), row, -1))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_tree_is_walked_as_greedy_decoding_would(data: st.DataObject) -> None:
    """Follow the target's choice from the root by hand, over every child that carries it."""
    width = data.draw(st.integers(1, 8))
    tokens = [data.draw(st.integers(0, 2)) for _ in range(width)]
    parent = [-1] + [data.draw(st.integers(-1, row - 1)) for row in range(1, width)]

    def spelled(row: int) -> tuple[int, ...]:
        return () if row <= 0 else (*spelled(parent[row]), tokens[row])

    # The target's choice depends on the text before it alone, so duplicate siblings have the same one.
    choices = {text: data.draw(st.integers(0, 2)) for text in sorted({spelled(row) for row in range(width)})}
    choice = [choices[spelled(row)] for row in range(width)]

    def longest(row: int) -> list[int]:
        children = [c for c in range(1, width) if parent[c] == row and tokens[c] == choice[row]]
        return max(([child, *longest(child)] for child in children), key=len, default=[])

    best = longest(0)
    done = accept_tree_greedy(torch.tensor([choice]), torch.tensor([tokens]), torch.tensor([parent]), pad=-1)
    length = int(done.lengths[0])
    path = done.path[0].tolist()
    assert length == len(best)
    assert done.tokens[0].tolist()[:length] == [tokens[row] for row in best]
    assert path[0] == 0 and path[length + 1 :] == [-1] * (width - length - 1)
    for above, row in itertools.pairwise(path[: length + 1]):
        assert parent[row] == above and tokens[row] == choice[above]
    assert int(done.bonus[0]) == choice[path[length]]
