"""Laws of tensor parallelism: what all ranks hold is what one process holds, and all of them decide the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import sglang  # noqa: F401  the host decides on its platform while it is imported; our class must not come first
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.core.accept import Accepted
from sglang_ext.core.pace import Pace
from sglang_ext.core.refusal import Refusal
from sglang_ext.core.sampling import SamplingParams
from sglang_ext.core.schedule import Mode, ModePolicy
from sglang_ext.models.card import CardFields
from sglang_ext.models.flexdraft.checkpoint import Checkpoint
from sglang_ext.models.tapped.checkpoint import expected_shapes
from sglang_ext.models.weights import DRAFT_TOKENS
from sglang_ext.serving.drafters.base import Context
from sglang_ext.serving.drafters.flexdraft_weights import FlexDraftWeights
from sglang_ext.serving.drafters.proposal import block_from_logits, propose_from_logits
from sglang_ext.serving.drafters.sharding import HeadShard, check_split, own_part
from sglang_ext.serving.drafters.vocabulary import VocabularyShard
from sglang_ext.serving.parallel import Ranks, SharedPace, agree, make_pace
from sglang_ext.serving.plan import resolve_plan
from sglang_ext.serving.platform import shims
from sglang_ext.serving.tp_plan import check_tp_size
from sglang_ext.testing.tapped_drafters import untrained_tapped_drafter
from tests.serving import test_dflare_drafter as dflare
from tests.serving.ranks import on_every_rank
from tests.unit.tiny import VOCABULARY, drafter_config, random_tensors, target_config, write_drafter, write_target

LAWS = settings(max_examples=40, deadline=None, print_blob=True)
ODD = (float("nan"), float("inf"), float("-inf"))


# ------------------------------------------------------------------------------------------------ vocabulary


@st.composite
def vocabularies(draw):
    """Ranks, vocabulary, rows per rank (padding at the end, ranks that hold nothing included), listed ids or None."""
    size, vocab = draw(st.integers(2, 4)), draw(st.integers(1, 40))
    rows = -(-vocab // size) + draw(st.integers(0, 20))
    ids = draw(st.none() | st.sets(st.integers(0, vocab - 1), min_size=1))
    return size, vocab, rows, None if ids is None else torch.tensor(sorted(ids))


def shard(ranks, spec):
    _, vocab, rows, listed = spec
    return VocabularyShard(ranks, vocab, rows, listed)


def own_rows(whole, ranks, rows):
    """A rank's rows of a head, padded with what nobody may read."""
    part = whole[ranks.rank * rows : (ranks.rank + 1) * rows]
    return torch.cat([part, torch.full((rows - part.shape[0], *whole.shape[1:]), 77.0)])


@LAWS
@given(spec=vocabularies(), seed=st.integers(0, 999), odd=st.none() | st.sampled_from(ODD))
def test_drafts_of_shards_are_the_drafts_of_the_whole(spec, seed, odd):
    """Tokens, ties included; confidences to rounding; three numbers per row travel, not logits."""
    size, vocab, rows, listed = spec
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-2, 3, (2, 3, 4), generator=random).float()
    head = torch.randint(-2, 3, (vocab, 4), generator=random).float()
    if odd is not None:
        head[seed % vocab] = odd
    proposable = head if listed is None else head[listed]
    expected = block_from_logits(hidden @ proposable.T, context(), None, listed)

    def draft(ranks):
        vocabulary = shard(ranks, spec)
        logits = hidden @ vocabulary.head(own_rows(head, ranks, rows)).T
        return propose_from_logits(logits, context(), None, vocabulary), vocabulary.gather(logits)

    for block, logits in on_every_rank(size, draft):
        assert torch.equal(block.tokens, expected.tokens)
        torch.testing.assert_close(block.confidence, expected.confidence)
        torch.testing.assert_close(logits, hidden @ proposable.T, equal_nan=True)


@LAWS
@given(spec=vocabularies())
def test_every_row_lies_on_one_rank(spec):
    size, vocab, _, listed = spec
    weight = torch.arange(vocab)[:, None].expand(-1, 2).float()
    parts = on_every_rank(size, lambda ranks: shard(ranks, spec).rows(weight))
    assert torch.equal(torch.cat(parts), weight if listed is None else weight[listed])


def test_one_process_holds_the_vocabulary_without_padding():
    head = torch.randn(64, 4)
    vocabulary = VocabularyShard(Ranks(), 61, 64)
    assert vocabulary.head(head).data_ptr() == head.data_ptr()
    assert vocabulary.head(head).shape == (61, 4)
    assert vocabulary.rows(head[:61]) is not None and vocabulary.proposable == 61


@LAWS
@given(spec=vocabularies(), seed=st.integers(0, 999))
def test_sampled_drafts_are_the_same_on_every_rank(spec, seed):
    """Even where the ranks' own draws differ: here each has its own stream of random numbers."""
    size, vocab, rows, listed = spec
    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(seed))
    sampling = SamplingParams.from_lists([1.0, 0.7], [0, 0], [1.0, 0.9], [0.0, 0.0])

    def draft(ranks):
        vocabulary = shard(ranks, spec)
        own = own_rows(logits.permute(2, 0, 1), ranks, rows)
        return propose_from_logits(vocabulary.head(own).permute(1, 2, 0), context(sampling), 8, vocabulary)

    first, *others = on_every_rank(size, draft)
    assert first.q_ids is not None
    for other in others:
        assert torch.equal(first.tokens, other.tokens)
        assert torch.equal(first.confidence, other.confidence)
    assert bool((first.q_ids == first.tokens[..., None]).any(-1).all())
    if listed is not None:
        assert set(first.tokens.flatten().tolist()) <= set(listed.tolist())


def context(sampling=None):
    two = torch.zeros(2, dtype=torch.int64)
    return Context(two, two, two, [None, None], 1, sampling)


# ------------------------------------------------------------------------------------------------ layers


@LAWS
@given(spec=dflare.drafters(), size=st.sampled_from([2, 4]), listed=st.sampled_from([None, 7]))
def test_dflare_over_ranks_is_dflare(spec, size, listed):
    """Logits of drafters whose key/value heads are split (2 ranks) or repeated (4), fp32."""
    with torch.no_grad():
        expected = dflare_logits(spec, Ranks(), listed)
        found = on_every_rank(size, lambda ranks: dflare_logits(spec, ranks, listed))
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def dflare_logits(spec, ranks, listed):
    depth, taps, fusion, separate, lengths, block, seed = spec
    random = torch.Generator().manual_seed(seed)
    drafter = replace(dflare.config(depth, taps, fusion, separate, block), draft_vocab_size=listed)
    shapes = {name: shape for name, shape in expected_shapes(drafter).items() if name != DRAFT_TOKENS}
    weights = dflare.tensors(shapes, random)
    if listed is not None:
        weights[DRAFT_TOKENS] = torch.randperm(VOCABULARY, generator=random)[:listed].sort().values.to(torch.int32)
    bench = dflare.Bench(drafter, weights, lengths, seed, ranks=ranks)
    for request, length in enumerate(lengths):
        states = torch.randn(taps, length, dflare.HIDDEN, generator=random) * 10
        bench.read(request, list(states), 0, length)
    assert bench.pool.bytes_per_token == 2 * depth * max(1, dflare.KV_HEADS // ranks.size) * dflare.HEAD_DIM * 4
    return bench.drafter._vocabulary.gather(bench.drafter.block_logits(bench.context()))


class Attention:
    """A target layer's attention on one rank, as far as mask rows look at it."""

    def __init__(self, heads: HeadShard, layer: int) -> None:
        self.attn = SimpleNamespace(
            layer_id=layer,
            qk_head_dim=heads.head_dim,
            tp_q_head_num=heads.own_heads,
            tp_k_head_num=heads.own_kv_heads,
            tp_v_head_num=heads.own_kv_heads,
        )
        self.q_size, self.kv_size = heads.own_heads * heads.head_dim, heads.own_kv_heads * heads.head_dim

    @staticmethod
    def rotary_emb(positions, q, k):
        return q * (1 + positions[:, None]), k * (1 + positions[:, None])


@pytest.mark.parametrize("name", ["llama, gqa, tied, head_dim derived", "qwen3, gqa, untied, head_dim given"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("calibrator", "listed"), [("vocabulary", None), ("vocabulary", 9), ("hidden", 9), ("none", None)]
)
def test_flexdraft_over_ranks_is_flexdraft(name, size, calibrator, listed):
    """Heads of every rank are heads of the whole layer, partial outputs add up, calibrated logits are the same."""
    config = replace(
        drafter_config(name, calibrator=calibrator, calibrator_rank=0 if calibrator == "none" else 6),
        draft_vocab_size=listed,
    )
    checkpoint = Checkpoint(config, random_tensors(config), target_config(name), CardFields())
    random = torch.Generator().manual_seed(1)
    rows, bonus = (torch.randn(count, config.hidden_size, generator=random) for count in (6, 2))
    head = torch.randn(64, config.hidden_size, generator=random)
    positions = torch.arange(6)

    def run(ranks):
        weights = FlexDraftWeights(checkpoint, torch.float32, "cpu", 1e-6, ranks)
        attention = Attention(weights.heads, config.split + 1)
        q, k, v = weights.project(attention, rows, positions)
        part = weights.output(config.split + 1, q.flatten(1))
        vocabulary = VocabularyShard(ranks, VOCABULARY, 64 // ranks.size, weights.draft_tokens)
        weights.share_head(own_rows(head, ranks, 64 // ranks.size), vocabulary)
        logits = weights.calibrated_logits(rows.view(2, 3, -1), bonus)
        return q, k, v, ranks.total(part), vocabulary.gather(logits), weights.bytes

    with torch.no_grad():
        q, k, v, out, logits, whole = run(Ranks())
    repeats = max(1, size // config.num_key_value_heads)
    for rank, found in enumerate(on_every_rank(size, run)):
        torch.testing.assert_close(found[0], q.chunk(size, 1)[rank])
        for own, all_heads in ((found[1], k), (found[2], v)):
            torch.testing.assert_close(own, all_heads.chunk(size // repeats, 1)[rank // repeats])
        torch.testing.assert_close(found[3], out, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[4], logits, atol=1e-4, rtol=1e-4)
        assert found[5] < whole


def test_a_projection_without_a_rule_is_not_passed_over():
    with pytest.raises(ValueError, match="new_proj"):
        own_part({"layers.0.new_proj.weight": torch.zeros(4, 4)}, HeadShard(0, 2, 4, 2, 8))


# ------------------------------------------------------------------------------------------------ decisions


def test_all_ranks_commit_what_rank_0_accepted():
    def accept(ranks):
        draw = torch.Generator().manual_seed(ranks.rank)
        lengths = torch.randint(0, 3, (4,), generator=draw)
        tokens = torch.randint(0, 60, (4, 4), generator=draw)
        mine = Accepted(lengths, tokens.gather(1, lengths[:, None])[:, 0], tokens)
        return mine, agree(ranks, mine)

    found = on_every_rank(3, accept)
    first = found[0][0]
    assert any(not torch.equal(mine.tokens, first.tokens) for mine, _ in found)
    for _, agreed in found:
        for name in ("lengths", "bonus", "tokens"):
            assert torch.equal(vars(agreed)[name], vars(first)[name])
    alone = found[1][0]
    assert agree(Ranks(), alone) is alone


def test_modes_measured_are_those_of_rank_0():
    """Each rank's clock tells another story; the modes of rank 0, and what follows from them, hold on all."""

    def serve(ranks):
        pace = make_pace(ranks, ModePolicy(), can_join=True, adaptive=True)
        assert isinstance(pace, SharedPace)
        now, seen = 0.0, []
        for step in range(300):
            mode = pace.choose([0], 1)
            pace.started(now, [mode])
            # Drafting is cheap for rank 0 and dear for the others.
            now += 1.0 if mode is Mode.PLAIN or ranks.rank == 0 else 9.0 + step % 7
            pace.committed(0, 2 if ranks.rank == 0 else 1)
            seen.append((mode, pace.drafts_after_prefill()))
        return seen

    first, *others = on_every_rank(3, serve)
    assert {mode for mode, _ in first} > {Mode.PLAIN}
    assert all(other == first for other in others)


def test_modes_fixed_by_flags_need_no_message():
    pace = SharedPace(Ranks(1, 2), ModePolicy(mode="sequential"), can_join=True, adaptive=True)
    pace._ranks = None
    assert pace.choose([0], 1) is Mode.SEQUENTIAL
    assert type(make_pace(Ranks(), ModePolicy(), can_join=True, adaptive=True)) is Pace


# ------------------------------------------------------------------------------------------------ start-up


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "width", "word"),
    [(2, 9, 3, None, "9 attention heads"), (4, 8, 6, None, "6 key/value heads"), (4, 8, 8, 50, "width 50")],
)
def test_what_cannot_be_split_is_refused(size, heads, kv_heads, width, word):
    with pytest.raises(Refusal) as error:
        check_split(size, "the drafter D", heads, kv_heads, width)
    assert word in str(error.value) and "--tp-size" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(2, 8, 2), (4, 8, 2), (8, 8, 1), (3, 9, 3), (2, 4, 4)])
def test_what_can_be_split_is_served(size, heads, kv_heads):
    check_split(size, "the drafter D", heads, kv_heads, 48)


def test_target_and_drafter_are_checked_at_start(tmp_path):
    target = write_target(tmp_path / "target", target_config(rope_theta=10000.0))
    write_drafter(tmp_path / "drafter")
    untrained_tapped_drafter(target, tmp_path / "tapped")
    for algorithm, folder in (("FLEXDRAFT", "drafter"), ("DFLARE", "tapped"), ("SCRIPTED", None)):
        drafter = None if folder is None else str(tmp_path / folder)
        plan = resolve_plan(algorithm, model_path=str(target), drafter_path=drafter, block_size=None, options=None)
        for size in (1, 2, 4):
            check_tp_size(plan, str(target), size)
        with pytest.raises(Refusal, match="--tp-size 3 does not divide the 4 attention heads of the target"):
            check_tp_size(plan, str(target), 3)
        if drafter is not None:
            with pytest.raises(Refusal, match="--tp-size 3 does not divide the 4 attention heads of the drafter"):
                check_tp_size(plan, "owner/name", 3)


def test_cpus_are_dealt_out_where_nodes_are_few(monkeypatch):
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 1, 2})

    def stock(*, numa_index, world_size):
        return "stock"

    assert shims.share_cpus(stock, numa_index=0, world_size=1) == "stock"
    many = 999  # more processes than any machine has memory nodes
    assert [shims.share_cpus(stock, numa_index=i, world_size=many) for i in (0, 1, 2, 3, 4)] == [
        "1",
        "2",
        "3",
        "1",
        "2",
    ]
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    assert shims.share_cpus(stock, numa_index=0, world_size=many) == "stock"


def test_heads_are_not_padded_for_several_ranks():
    config, padded = object(), object()
    assert shims.keep_heads(lambda *args: padded, config, None, 2) is config
    assert shims.keep_heads(lambda *args: padded, config, None, 1) is padded
