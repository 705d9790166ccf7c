"""Laws of the served DFlare drafter: its logits are the method's, however the context came into the pool."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ext.core.block import BlockLayout
from sglang_ext.models.dflare.config import DFlareConfig
from sglang_ext.models.dflash.config import DFlashConfig
from sglang_ext.models.tapped.build import new_model
from sglang_ext.models.tapped.checkpoint import expected_shapes
from sglang_ext.models.tapped.model import TapContext
from sglang_ext.models.tapped.rope import rope_tables
from sglang_ext.models.target import Target
from sglang_ext.models.weights import DRAFT_TOKENS
from sglang_ext.serving.attention.mask_rows import MaskRowAttention
from sglang_ext.serving.attention.sdpa import SdpaBackend
from sglang_ext.serving.drafter_pool import DrafterPool
from sglang_ext.serving.drafters.base import Context
from sglang_ext.serving.drafters.dflare import DFlareDrafter
from sglang_ext.serving.drafters.dflare_attention import _PoolView, block_attention
from sglang_ext.serving.drafters.dflare_weights import DFlareWeights
from sglang_ext.serving.parallel import Ranks
from sglang_ext.serving.profile import StepProfile
from sglang_ext.serving.taps import Taps
from tests.unit.tiny import LAYERS, VOCABULARY, hf_model, target_config

LAWS = settings(
    max_examples=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the fixture only switches gradients off
)
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 32, 4, 2, 8, 256
TARGET_CONFIG = target_config(rope_theta=10000.0)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return Target(hf_model(TARGET_CONFIG).float().eval())


class Source:
    """A tap recorder whose passes are written by the test."""

    def __init__(self) -> None:
        self.next: Taps | None = None

    def take(self) -> Taps:
        assert self.next is not None
        held, self.next = self.next, None
        return held


def config(depth: int, taps: int, fusion: bool, separate: bool, block: int):
    """A DFlare or DFlash drafter of the tiny target, its context projections its own or the block's."""
    kind = DFlareConfig if fusion else DFlashConfig
    made = kind.for_target(
        TARGET_CONFIG, num_layers=depth, num_taps=1, block_size=block, separate_context_projections=separate
    )
    return replace(made, target_layer_ids=tuple(range(taps)), draft_vocab_size=None)


def tensors(shapes, random: torch.Generator) -> dict[str, torch.Tensor]:
    """Random weights under the published names."""
    found = {name: torch.randn(shape, generator=random) / math.sqrt(shape[-1]) for name, shape in shapes.items()}
    for name in found:
        if name.endswith("norm.weight"):
            found[name] = 1 + found[name]
    return found


class Bench:
    """A drafter over a pool of its own, with requests at random slots."""

    def __init__(
        self, drafter, weights, lengths: list[int], seed: int, target: Target | None = None, ranks: Ranks | None = None
    ) -> None:
        ranks = Ranks() if ranks is None else ranks
        depth, block = drafter.num_layers, drafter.block_size
        self.random = torch.Generator().manual_seed(seed)
        self.lengths, self.block = lengths, block
        slots = 1 + sum(lengths) + block * len(lengths)
        order = torch.randperm(slots, generator=self.random) + 1
        self.table = torch.zeros(len(lengths) + 1, CONTEXT, dtype=torch.int32)
        self.requests = torch.arange(len(lengths)).flip(0) + 1
        start = 0
        for request, length in zip(self.requests, lengths, strict=True):
            self.table[request, :length] = order[start : start + length].to(torch.int32)
            start += length
        embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for module in (embedding, head):
            module.weight.copy_(torch.randn(module.weight.shape, generator=self.random))
        if target is not None:
            embedding.weight.copy_(target.embedding)
            head.weight.copy_(target.head)
        per_rank = -(-VOCABULARY // ranks.size)
        head.weight = torch.nn.Parameter(head.weight[ranks.rank * per_rank :][:per_rank])
        if ranks.rank == ranks.size - 1:  # the host pads the last rank's rows to the length of the others
            head.weight = torch.nn.Parameter(torch.cat([head.weight, head.weight[:1]] * per_rank)[:per_rank])
        model = SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding), lm_head=head)
        self.runner = SimpleNamespace(
            device="cpu",
            model=model,
            model_config=SimpleNamespace(vocab_size=VOCABULARY, context_len=CONTEXT),
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=SimpleNamespace(),
        )
        self.runner.attn_backend = SdpaBackend(self.runner)
        self.weights = DFlareWeights(drafter, weights, torch.float32, "cpu", rope_tables(drafter, CONTEXT), ranks)
        kv_heads = self.weights.heads.own_kv_heads
        self.pool = DrafterPool(depth, kv_heads, HEAD_DIM, torch.float32, "cpu")
        self.taps = Source()
        self.mask = weights["mask_embedding"]
        attention = block_attention(self.runner, self.pool)
        self.drafter = DFlareDrafter(
            self.runner,
            self.weights,
            self.taps,
            self.pool,
            attention,
            self.mask,
            block,
            None,
            StepProfile(False, "cpu"),
        )
        self.drafter.allocate(slots + 1)
        self.pool.write(torch.arange(slots + 1), *torch.full((2, depth, slots + 1, kv_heads, HEAD_DIM), 300.0))
        self.bonus = torch.randint(VOCABULARY, (len(lengths),), generator=self.random)

    def read(self, request: int, states: list[torch.Tensor], start: int, stop: int) -> None:
        """A prefill pass over positions ``start .. stop-1`` of one request."""
        positions = torch.arange(start, stop)
        slots = self.table[self.requests[request], start:stop].long()
        self.taps.next = Taps([state[start:stop] for state in states], positions, slots)
        self.drafter.observe_prefill()

    def context(self) -> Context:
        lengths = torch.tensor(self.lengths)
        return Context(self.requests, lengths, self.bonus, [None] * len(lengths), max(self.lengths) + self.block)


def reference(weights, bench, depth, taps, request):
    """Final hidden states ``[K, H]`` of one request's block, straight from the method's formulas, in float64."""
    length, block = bench.lengths[request], bench.block
    w = {name: tensor.double() for name, tensor in weights.items()}
    inverse = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = (torch.arange(CONTEXT + block)[:, None] * inverse).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    def rotate(x, position):
        half = HEAD_DIM // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos[position][:, None] + turned * sin[position][:, None]

    def heads(x, count):
        return x.view(x.shape[0], count, HEAD_DIM)

    states = [tap.double() for tap in taps]
    context_at, block_at = torch.arange(length), torch.arange(length, length + block)
    masks = bench.mask.double().expand(block - 1, -1)
    embedding = bench.runner.model.model.embed_tokens.weight.double()
    hidden = torch.cat([embedding[bench.bonus[request]][None], masks])
    for d in range(depth):
        at = f"layers.{d}.self_attn."
        if "layer_fusion_weights" in w:
            alpha = torch.softmax(w["layer_fusion_weights"][d], 0)
            fused = sum(a * state for a, state in zip(alpha, states, strict=True))
        else:
            fused = torch.cat(states, -1) @ w["fc.weight"].T
        fused = norm(fused, w["hidden_norm.weight"])
        suffix = "_target" if f"{at}k_proj_target.weight" in w else ""
        x = norm(hidden, w[f"layers.{d}.input_layernorm.weight"])
        keys = [fused @ w[f"{at}k_proj{suffix}.weight"].T, x @ w[f"{at}k_proj.weight"].T]
        values = [fused @ w[f"{at}v_proj{suffix}.weight"].T, x @ w[f"{at}v_proj.weight"].T]
        q = rotate(norm(heads(x @ w[f"{at}q_proj.weight"].T, HEADS), w[f"{at}q_norm.weight"]), block_at)
        k = rotate(norm(heads(torch.cat(keys), KV_HEADS), w[f"{at}k_norm.weight"]), torch.cat([context_at, block_at]))
        v = heads(torch.cat(values), KV_HEADS)
        mixed = torch.zeros(block, HEADS, HEAD_DIM, dtype=torch.float64)
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            scores = q[:, head] @ k[:, shared].T / math.sqrt(HEAD_DIM)
            mixed[:, head] = torch.softmax(scores, -1) @ v[:, shared]
        hidden = hidden + mixed.flatten(1) @ w[f"{at}o_proj.weight"].T
        x = norm(hidden, w[f"layers.{d}.post_attention_layernorm.weight"])
        mlp = f"layers.{d}.mlp."
        gate, up = x @ w[f"{mlp}gate_proj.weight"].T, x @ w[f"{mlp}up_proj.weight"].T
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ w[f"{mlp}down_proj.weight"].T
    return norm(hidden, w["norm.weight"])


@st.composite
def drafters(draw):
    """Depth, taps, fusion by layer or shared, own context projections or the block's, lengths, block size, seed."""
    return (
        draw(st.integers(1, 3)),
        draw(st.integers(1, LAYERS)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.lists(st.integers(1, 200), min_size=1, max_size=3)),
        draw(st.integers(2, 7)),
        draw(st.integers(0, 999)),
    )


def prepared(spec):
    depth, taps, fusion, separate, lengths, block, seed = spec
    random = torch.Generator().manual_seed(seed)
    drafter = config(depth, taps, fusion, separate, block)
    weights = tensors(expected_shapes(drafter), random)
    bench = Bench(drafter, weights, lengths, seed)
    states = [[torch.randn(length + 8, HIDDEN, generator=random) * 10 for _ in range(taps)] for length in lengths]
    return weights, bench, states


@LAWS
@given(spec=drafters())
def test_the_block_is_the_methods(spec):
    weights, bench, states = prepared(spec)
    for request, length in enumerate(bench.lengths):
        bench.read(request, states[request], 0, length)
    found = bench.drafter.block_hidden(bench.context())
    for request, length in enumerate(bench.lengths):
        expected = reference(weights, bench, spec[0], [state[:length] for state in states[request]], request)
        torch.testing.assert_close(found[request].double(), expected, atol=2e-5, rtol=2e-5)
    head = bench.runner.model.lm_head.weight
    best = (found[:, 1:].double() @ head.double().T).argmax(-1)
    assert torch.equal(bench.drafter.propose(bench.context()).tokens, best)


@LAWS
@given(spec=drafters(), listed=st.sampled_from([None, 7, VOCABULARY]))
def test_served_logits_are_the_modules(target, spec, listed):
    """In fp32, for one request at a time, also for drafters that propose from a short list."""
    depth, taps, fusion, separate, lengths, block, seed = spec
    random = torch.Generator().manual_seed(seed)
    drafter = replace(config(depth, taps, fusion, separate, block), draft_vocab_size=listed)
    shapes = expected_shapes(drafter)
    weights = tensors({name: shape for name, shape in shapes.items() if name != DRAFT_TOKENS}, random)
    if listed is not None:
        weights[DRAFT_TOKENS] = torch.randperm(VOCABULARY, generator=random)[:listed].sort().values.to(torch.int32)
    module = new_model(target, drafter)
    module.load_state_dict(weights)
    bench = Bench(drafter, weights, lengths, seed, target)
    for request, length in enumerate(lengths):
        states = torch.randn(length, taps, HIDDEN, generator=random) * 10
        bench.read(request, list(states.unbind(1)), 0, length)
        anchors, bonus = torch.tensor([[length - 1]]), bench.bonus[request].view(1, 1)
        expected = module.logits(TapContext(states[None], anchors, bonus))[0, 0]
        if listed is not None:
            expected = expected[:, weights[DRAFT_TOKENS].long()]
        found = bench.drafter.block_logits(bench.context())[request]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@LAWS
@given(spec=drafters(), chunk=st.integers(1, 40), plain=st.integers(0, 5))
def test_it_does_not_matter_how_tokens_came_in(spec, chunk, plain):
    """Whole prompts, prompts in chunks, and tokens committed one or several per step leave the same context."""
    _, bench, states = prepared(spec)
    for request, length in enumerate(bench.lengths):
        bench.read(request, states[request], 0, length)
    whole = bench.drafter.block_hidden(bench.context())
    poison = torch.full_like(bench.pool._keys, 300.0)
    bench.pool._keys.copy_(poison)
    bench.pool._values.copy_(poison)
    read = [max(1, length - 1 - plain) for length in bench.lengths]
    for request, prompt in enumerate(read):
        for start in range(0, prompt, chunk):
            bench.read(request, states[request], start, min(prompt, start + chunk))
    while read != bench.lengths:
        # Every step verifies up to two drafts; what is missing decides how many are accepted, the rest is junk.
        widths = [3 if done < length else 1 for done, length in zip(read, bench.lengths, strict=True)]
        left = [min(3, length - done) for done, length in zip(read, bench.lengths, strict=True)]
        layout = BlockLayout.ragged(read, widths, [0] * len(read), bench.block)
        bench.taps.next = junk_past(bench, states, layout, left)
        bench.drafter.observe_commit(layout, torch.tensor([max(count, 1) - 1 for count in left]))
        read = [done + count for done, count in zip(read, left, strict=True)]
    torch.testing.assert_close(bench.drafter.block_hidden(bench.context()), whole, atol=5e-5, rtol=5e-5)


def junk_past(bench, states, layout, left):
    """Taps of a verification: rows past what will be accepted hold nonsense and share a slot nobody reads."""
    rows, slots = [], []
    for request, column, position in zip(
        layout.clean.request.tolist(), layout.clean.column.tolist(), layout.clean_position.tolist(), strict=True
    ):
        good = column < left[request] or (left[request] == 0 and column == 0)
        inside = position < bench.lengths[request]
        rows.append([tap[position] if good else torch.full((HIDDEN,), 9e9) for tap in states[request]])
        slots.append(int(bench.table[bench.requests[request], position]) if good and inside else 0)
    stacked = [torch.stack([row[tap] for row in rows]) for tap in range(len(rows[0]))]
    return Taps(stacked, layout.clean_position, torch.tensor(slots))


@LAWS
@given(spec=drafters())
def test_the_cpu_form_equals_the_device_independent_form(spec):
    _, bench, states = prepared(spec)
    for request, length in enumerate(bench.lengths):
        bench.read(request, states[request], 0, length)
    cpu = bench.drafter.block_hidden(bench.context())
    bench.drafter._attention = MaskRowAttention(_PoolView(bench.runner, bench.pool), HEADS // KV_HEADS)
    torch.testing.assert_close(bench.drafter.block_hidden(bench.context()), cpu, atol=1e-5, rtol=1e-5)
