"""Servers of two processes per target (``--tp-size 2``): the text of plain decoding, drafts of one process.

Tiny random targets, one whose key/value heads are split over the ranks and one whose single one is repeated. Servers
run one after another and are asked everything at once; the tests look at what they said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.weights import DRAFT_TOKENS
from sglang_ext.testing.laws import assert_identities, assert_idle, assert_records
from sglang_ext.testing.mismatch import TOLERANCE
from sglang_ext.testing.server import Launch, Reply, Request, Server, ServerError, Starter, run_until_exit
from sglang_ext.testing.speculators import MODES
from sglang_ext.testing.tapped_drafters import untrained_tapped_drafter
from tests.server.ways import the_gpu_way
from tests.unit.tiny import VOCABULARY, drafter_config, random_tensors, target_config, write_target

FAMILIES = {"llama": "llama, gqa, tied, head_dim derived", "qwen3": "qwen3, gqa, untied, head_dim given"}
PROMPTS = [[(7 * row + 3 * i) % 60 for i in range(length)] for row, length in enumerate((1, 5, 17, 40, 2, 9))]
GREEDY = [Request(prompt, {"max_new_tokens": 24, "ignore_eos": True}) for prompt in PROMPTS]
SAMPLED = [Request(r.prompt, {**r.sampling, "temperature": 1.0, "sampling_seed": 7 + i}) for i, r in enumerate(GREEDY)]
BLOCK, RANKS, TURNS = 4, 2, (0, 1)
SPREAD = 4.0
"""How far the token that drafters favour stands above the others: most drafts, not all, are it."""

Said = dict[str, list[Reply]]


@dataclass(frozen=True)
class Family:
    """What the servers of one target said: by server, then by question."""

    said: dict[str, Said]

    def ids(self, server: str, question: str) -> list[list[int]]:
        return [reply.ids for reply in self.said[server][question]]


@pytest.fixture(scope="module")
def families(starter: Starter, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Everything the servers of a target said, asked for once."""
    known: dict[str, Family | Exception] = {}

    def family(name: str) -> Family:
        if name not in known:
            try:
                known[name] = Family(_ask_servers(starter, tmp_path_factory.mktemp(name), name))
            except (AssertionError, ServerError) as error:
                known[name] = error  # a server that did not start once will not start for the next test either
        found = known[name]
        if isinstance(found, Exception):
            raise found
        return found

    return family


def _ask_servers(starter: Starter, folder: Path, name: str) -> dict[str, Said]:
    target = write_target(folder / "target", _target(name))
    said: dict[str, Said] = {}

    def run(server: str, ask: Callable[[Server], Said], ranks: int, *flags: str, ways: bool = False) -> None:
        common = ("--skip-tokenizer-init", "--context-length", "128", "--max-total-tokens", "2048")
        launch = Launch(target, (*common, "--tp-size", str(ranks), *flags), {}, starter.threads)
        launch = the_gpu_way(launch) if ways else launch
        with starter.running(**{f"{name}-{server}": launch}) as servers:
            (running,) = servers.values()
            said[server] = ask(running)
            assert running.healthy()
            assert_idle(running)

    run("plain", _ask_plain, RANKS)
    favourite = Counter(token for reply in said["plain"]["greedy"] for token in reply.ids).most_common(1)[0][0]
    flexdraft = _drafting("flexdraft", _flexdraft(name, target, folder / "flexdraft", favourite))
    tapped = _drafting("dflare", _tapped(name, target, folder / "dflare", favourite))
    if name == "llama":
        run("flexdraft", lambda server: _ask_drafting(server, MODES), RANKS, *flexdraft)
        run("dflare", lambda server: _ask_drafting(server, ("sequential",)), RANKS, *tapped)
        run("dflare, one process", _ask_steps, 1, *tapped)
        run("scripted", lambda server: _ask_oracle(server, said["plain"]), RANKS, "--speculative-algorithm", "scripted")
        run("flexdraft, the GPU's way", _ask_ways, RANKS, *flexdraft, ways=True)
        run("dflare, the GPU's way", _ask_ways, RANKS, *tapped, ways=True)
    else:
        # Here sampled requests have seeds, which the host heeds in this mode only.
        seeds = ("--enable-deterministic-inference", "--attention-backend", "torch_native")
        run("flexdraft", lambda server: _ask_drafting(server, MODES), RANKS, *flexdraft, *seeds)
        run("flexdraft, one process", _ask_steps, 1, *flexdraft)
        run("dflare", lambda server: _ask_drafting(server, ("sequential",)), RANKS, *tapped)
    return said


def _target(name: str) -> dict[str, object]:
    # Far apart logits: another order of sums must not change a greedy text.
    return target_config(FAMILIES[name], initializer_range=0.3, rope_theta=10000.0)


def _drafting(algorithm: str, drafter: Path) -> tuple[str, ...]:
    return ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(drafter))


def _flexdraft(name: str, target: Path, folder: Path, favourite: int) -> Path:
    """A drafter with random weights that leans towards one token; for qwen3 it proposes every second token only."""
    config = drafter_config(FAMILIES[name], block_size=BLOCK, calibrator="vocabulary" if name == "llama" else "hidden")
    if name == "qwen3":
        config = replace(config, draft_vocab_size=len(range(favourite % 2, VOCABULARY, 2)))
    tensors = random_tensors(config)
    for key, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[key] = tensor / tensor.shape[1] ** 0.5
        elif key.endswith("norm.weight"):
            tensors[key] = 1 + 0.1 * tensor
    if name == "llama":
        tensors["anchor_bias_mlp.2.bias"][favourite] += SPREAD
    else:
        row = load_file(target / "model.safetensors")["lm_head.weight"][favourite].float()
        tensors["anchor_bias_mlp.2.bias"] += SPREAD * row / row.square().sum()
        tensors[DRAFT_TOKENS] = torch.arange(favourite % 2, VOCABULARY, 2, dtype=torch.int32)
    return checkpoint.save(folder, config, tensors, _target(name))


def _tapped(name: str, target: Path, folder: Path, favourite: int) -> Path:
    method = "dflare" if name == "llama" else "dflash"
    return untrained_tapped_drafter(
        target, folder, method=method, block_size=BLOCK, favourite=favourite, dtype=torch.float32
    )


def _ask_plain(server: Server) -> Said:
    return {"greedy": server.generate_all(GREEDY)}


def _ask_drafting(server: Server, modes: Sequence[str]) -> Said:
    """Greedy and sampled requests together and one by one; at last the first ones again."""
    said = {}
    for mode in modes:
        options = {"mode": mode, "pruning": "none", "records": True}
        said[mode] = server.generate_all([request.speculative(options) for request in GREEDY])
        sampled = [request.speculative({"mode": mode}) for request in SAMPLED]
        said[f"{mode}, sampled"] = server.generate_all(sampled)
        said[f"{mode}, sampled alone"] = server.generate_all(sampled, concurrency=1)
        said[f"{mode}, beside sampled"] = server.generate_all([*sampled, *(r.speculative(options) for r in GREEDY)])
        scored = [Request(r.prompt, r.sampling, {"return_logprob": True}).speculative({"mode": mode}) for r in SAMPLED]
        said[f"{mode}, scored"] = server.generate_all(scored)
        server.flush()
        said[f"{mode}, read back"] = server.generate_all(_read_back(said[f"{mode}, scored"]))
        said[f"{mode}, pruned"] = server.generate_all([request.speculative({"mode": mode}) for request in GREEDY])
    said["plain, sampled"] = server.generate_all([request.speculative({"mode": "plain"}) for request in SAMPLED])
    for turn in TURNS:
        said[f"auto {turn}"] = server.generate_all(GREEDY, concurrency=1 + 2 * turn)
    return said | _ask_steps(server)


def _read_back(replies: Sequence[Reply]) -> list[Request]:
    """Requests that read what was said as a prompt."""
    return [
        Request(
            [*prompt, *reply.ids],
            {"max_new_tokens": 1},
            {"return_logprob": True, "logprob_start_len": len(prompt) - 1},
        )
        for prompt, reply in zip(PROMPTS, replies, strict=True)
    ]


def _ask_steps(server: Server) -> Said:
    options = {"mode": "sequential", "pruning": "none", "records": True}
    return {"steps": server.generate_all([request.speculative(options) for request in GREEDY], concurrency=1)}


def _ask_ways(server: Server) -> Said:
    """One at a time, where passes are replayed, and all at once."""
    return _ask_steps(server) | {"auto": server.generate_all(GREEDY)}


def _ask_oracle(server: Server, plain: Said) -> Said:
    drafted = [
        request.speculative({"mode": "sequential", "script": "oracle"}, reply.ids)
        for request, reply in zip(GREEDY, plain["greedy"], strict=True)
    ]
    return {"oracle": server.generate_all(drafted)}


# ------------------------------------------------------------------------------------------------ what they said

DRAFTING = [
    ("llama", "flexdraft", "parallel"),
    ("llama", "flexdraft", "sequential"),
    ("llama", "dflare", "sequential"),
    ("qwen3", "flexdraft", "parallel"),
    ("qwen3", "flexdraft", "sequential"),
    ("qwen3", "dflare", "sequential"),
]


@pytest.mark.parametrize(("name", "server", "mode"), DRAFTING)
def test_greedy_text_is_plain_decodings(families: Callable[[str], Family], name: str, server: str, mode: str) -> None:
    """Token for token, six requests at once, drafts accepted and rejected."""
    family = families(name)
    expected = family.ids("plain", "greedy")
    assert len({token for ids in expected for token in ids}) > 5, "the target says too little to tell anything"
    assert family.ids(server, mode) == expected
    assert family.ids(server, f"{mode}, pruned") == expected
    # Sampled requests in the same batch change nothing, nor do those that ran before.
    assert family.ids(server, f"{mode}, beside sampled")[len(SAMPLED) :] == expected
    assert family.ids(server, "steps") == expected
    replies = family.said[server][mode]
    for reply in replies:
        assert_identities(reply, BLOCK)
        assert_records(reply, BLOCK)
    accepted = sum(reply.meta["spec_num_correct_drafts"] for reply in replies)
    proposed = sum(reply.meta["spec_num_proposed_drafts"] for reply in replies)
    assert 0 < accepted < proposed, (accepted, proposed)


@pytest.mark.parametrize(("name", "server"), sorted({(name, server) for name, server, _ in DRAFTING}))
def test_modes_chosen_by_the_clock_are_the_same_on_every_rank(
    families: Callable[[str], Family], name: str, server: str
) -> None:
    """Mode ``auto`` measures; ranks that drew other conclusions would wait for each other for ever."""
    family = families(name)
    for turn in TURNS:
        assert family.ids(server, f"auto {turn}") == family.ids("plain", "greedy")


@pytest.mark.parametrize(("name", "server", "mode"), DRAFTING)
def test_sampled_requests_are_served(families: Callable[[str], Family], name: str, server: str, mode: str) -> None:
    """At temperature 1, alone, together and beside greedy ones; the counters of each add up."""
    said = families(name).said[server]
    for question in (f"{mode}, sampled", f"{mode}, sampled alone", f"{mode}, beside sampled"):
        for reply in said[question]:
            assert reply.completion_tokens == 24 and all(0 <= token < VOCABULARY for token in reply.ids)
            assert_identities(reply, BLOCK)
    assert len({tuple(reply.ids) for reply in said[f"{mode}, sampled"]}) > 1


@pytest.mark.parametrize(("name", "server", "mode"), DRAFTING)
def test_ranks_agree_on_sampled_tokens(families: Callable[[str], Family], name: str, server: str, mode: str) -> None:
    """Log-probabilities of a sampled text are those of reading it: a rank that took another token would spoil them."""
    said = families(name).said[server]
    for reply, read in zip(said[f"{mode}, scored"], said[f"{mode}, read back"], strict=True):
        rows = reply.meta["output_token_logprobs"]
        assert [row[1] for row in rows] == reply.ids
        expected = [row[0] for row in read.meta["input_token_logprobs"][-len(rows) :]]
        assert [row[0] for row in rows] == pytest.approx(expected, abs=TOLERANCE["float32"])


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_reproduces(families: Callable[[str], Family], mode: str) -> None:
    """In the host's deterministic mode a seeded request says what plain decoding says, alone and in a batch."""
    family = families("qwen3")
    expected = family.ids("flexdraft", "plain, sampled")
    assert expected != family.ids("plain", "greedy")
    assert family.ids("flexdraft", f"{mode}, sampled") == expected
    assert family.ids("flexdraft", f"{mode}, sampled alone") == expected


@pytest.mark.parametrize(("name", "server"), [("llama", "dflare"), ("qwen3", "flexdraft")])
def test_drafts_are_those_of_one_process(families: Callable[[str], Family], name: str, server: str) -> None:
    """Step by step the same drafts, with the same confidences up to rounding."""
    family = families(name)
    assert family.ids(f"{server}, one process", "steps") == family.ids(server, "steps")
    for alone, shared in zip(family.said[f"{server}, one process"]["steps"], family.said[server]["steps"], strict=True):
        left, right = assert_records(alone, BLOCK), assert_records(shared, BLOCK)
        assert [record.draft_ids for record in left] == [record.draft_ids for record in right]
        for one, two in zip(left, right, strict=True):
            # Records carry three digits.
            assert one.confidence == pytest.approx(two.confidence, abs=2e-3)
    records = [record for reply in family.said[server]["steps"] for record in assert_records(reply, BLOCK)]
    seen = {(record.draft_ids, record.confidence) for record in records}
    assert len(seen) > 10, "drafts that do not depend on the text show nothing"


@pytest.mark.parametrize("server", ["flexdraft", "dflare"])
def test_servers_that_work_the_gpus_way_draft_the_same(families: Callable[[str], Family], server: str) -> None:
    """Replayed passes with collectives in them, under overlapped scheduling."""
    family = families("llama")
    ways = f"{server}, the GPU's way"
    assert family.ids(ways, "auto") == family.ids(ways, "steps") == family.ids("plain", "greedy")
    accepted = 0
    for due, found in zip(family.said[server]["steps"], family.said[ways]["steps"], strict=True):
        pairs = list(zip(assert_records(due, BLOCK), assert_records(found, BLOCK), strict=True))
        for one, two in pairs:
            common = min(one.verify_length, two.verify_length)  # the end of a request is noticed a step later
            assert one.draft_ids[:common] == two.draft_ids[:common]
        accepted += sum(two.accepted for _, two in pairs)
    assert accepted > 0


def test_everything_right_is_accepted(families: Callable[[str], Family]) -> None:
    """Replayed text is taken whole blocks at a time on every rank."""
    family = families("llama")
    assert family.ids("scripted", "oracle") == family.ids("plain", "greedy")
    for reply in family.said["scripted"]["oracle"]:
        assert reply.meta["spec_accept_length"] > 3, reply.meta


def test_heads_that_do_not_divide_are_refused(starter: Starter, tmp_path: Path) -> None:
    """In one line, before anything is loaded."""
    target = write_target(tmp_path / "target", _target("llama"))
    drafter = _flexdraft("llama", target, tmp_path / "drafter", 7)
    flags = (*_drafting("flexdraft", drafter), "--skip-tokenizer-init", "--context-length", "128", "--tp-size", "3")
    result = run_until_exit(Launch(target, flags, {}, starter.threads), starter.logs / "refused-tp.log")
    assert result.code != 0
    assert result.line("--tp-size 3", "4 attention heads"), result.output[-3000:]
