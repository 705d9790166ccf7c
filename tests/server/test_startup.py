"""Start-up: what cannot work is refused early, in one readable line that names the flag and the fix."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_ext.core.refusal import Refusal
from sglang_ext.models import weights as weight_files
from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.serving.plan import resolve_plan
from sglang_ext.testing.drafters import edit_config, untrained_drafter
from sglang_ext.testing.laws import assert_same
from sglang_ext.testing.prompts import requests
from sglang_ext.testing.server import Launch, Refused, Server, Starter, run_until_exit
from sglang_ext.testing.speculators import MODES, Answers

DRAFTER_FLAG = "--speculative-draft-model-path"
BLOCK_FLAG = "--speculative-num-draft-tokens"
OPTIONS_FLAG = "--speculative-adaptive-config"
PLANTED = "planted: this module cannot be imported"

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def sound(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound, untrained drafter that tests copy and damage."""
    return untrained_drafter(target, tmp_path_factory.mktemp("sound"), num_layers=2)


@pytest.fixture(scope="module")
def damaged(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Copy the sound drafter and change keys of its config.json: ``damaged(hidden_size=512)``."""

    def make(**changes: object) -> Path:
        folder = tmp_path_factory.mktemp("damaged") / "drafter"
        shutil.copytree(sound, folder)
        return edit_config(folder, lambda raw: raw.update(changes))

    return make


# ------------------------------------------------------------------ through the launcher


@pytest.fixture(scope="module")
def refused(
    starter: Starter, sound: Path, damaged: Make, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Refused]]:
    """Results of launchers that must refuse; they run two at a time while the tests wait for each."""
    truncated = damaged()
    weights = truncated / weight_files.WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:100_000])
    shim = tmp_path_factory.mktemp("shim")
    shim.joinpath("sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'sglang_ext.serving.algorithm':\n"
        f"            raise ImportError({PLANTED!r})\n"
        "sys.meta_path.insert(0, Broken())\n"
    )

    def flexdraft(folder: Path | str, *flags: str, environment: dict[str, str] | None = None) -> Launch:
        command = ("--speculative-algorithm", "flexdraft", DRAFTER_FLAG, str(folder), *flags)
        return starter.launch(*command, environment=environment)

    launches = {
        "vocabulary": flexdraft(damaged(vocab_size=32000)),
        "missing path": flexdraft("/nowhere/drafter"),
        "block too large": flexdraft(sound, BLOCK_FLAG, "64"),
        "unknown option": flexdraft(sound, OPTIONS_FLAG, '{"prune_treshold": 0.1}'),
        "truncated weights": flexdraft(truncated),
        "pipeline": flexdraft(sound, "--pp-size", "2"),
        "broken import": flexdraft(sound, environment={"PYTHONPATH": str(shim)}),
    }
    with ThreadPoolExecutor(2) as pool:
        running: dict[str, Future[Refused]] = {
            name: pool.submit(run_until_exit, launch, starter.logs / f"refused {name}.log")
            for name, launch in launches.items()
        }
        yield lambda name: running[name].result()
        for future in running.values():
            future.cancel()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("vocabulary", ("vocabulary is 32000", "49152", DRAFTER_FLAG), id="C1 wrong vocabulary"),
        pytest.param("missing path", ("/nowhere/drafter", DRAFTER_FLAG), id="C2 missing drafter"),
        pytest.param("block too large", (f"{BLOCK_FLAG} is 64", "2 to 8"), id="C3 larger block than trained"),
        pytest.param("unknown option", ("prune_treshold", "prune_threshold", OPTIONS_FLAG), id="C4 unknown option"),
        pytest.param("truncated weights", ("model.safetensors", "100,000 bytes"), id="C4 truncated weights"),
        pytest.param("pipeline", ("--pp-size", "not supported"), id="C7 pipeline parallelism"),
        pytest.param("broken import", (PLANTED,), id="C8 failure inside the plugin"),
    ],
)
def test_launcher_refuses(refused: Callable[[str], Refused], name: str, words: tuple[str, ...]) -> None:
    """Laws C1-C4, C7, C8: the launcher ends within 60 s with both values, the flag and the fix in one line."""
    result = refused(name)
    assert result.code != 0
    assert result.line(*words), f"no line with {words} in:\n{result.output[-3000:]}"
    assert result.seconds < 60, result.seconds
    assert "Unknown speculative algorithm" not in result.output


# ------------------------------------------------------------------ the same checks without a server


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 512}, ("512", "576", DRAFTER_FLAG)),
        ({"num_target_layers": 12, "flexdraft_config": {"target_layer_ids": [10, 11]}}, ("12", "30", DRAFTER_FLAG)),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, ("Qwen3", "Llama", DRAFTER_FLAG)),
        ({"architectures": ["MambaForCausalLM"]}, ("MambaForCausalLM",)),
        ({"block_size": None}, ("block_size",)),
        ({"block_size": "8"}, ("block_size",)),
    ],
    ids=("hidden size", "layer count", "architecture", "unknown architecture", "no block size", "block size as text"),
)
def test_drafter_of_another_target(
    target: Path, damaged: Make, sound: Path, changes: dict[str, object], words: tuple[str, ...]
) -> None:
    """Laws C1 and C3: sizes that differ from the target's are refused with both values."""
    method = dict(_method(sound))
    if "flexdraft_config" in changes:
        changes = {**changes, "flexdraft_config": {**method, **dict(changes["flexdraft_config"])}}  # type: ignore[call-overload]
    assert_refuses(words, target, damaged(**changes))


def test_unknown_config_key(target: Path, sound: Path, damaged: Make) -> None:
    """Law C4: an unknown key of the drafter's config is refused with the nearest known one."""
    folder = damaged(flexdraft_config={**_method(sound), "anchor_bias_rnk": 3})
    assert_refuses(("anchor_bias_rnk", "anchor_bias_rank", str(folder)), target, folder)


def test_absent_block_size(target: Path, sound: Path, damaged: Make) -> None:
    """Law C3: a drafter that does not say its block size is refused."""
    folder = edit_config(damaged(), lambda raw: raw.pop("block_size"))
    assert_refuses(("block_size",), target, folder)


@pytest.mark.parametrize("asked", (1, 9, -3))
def test_block_size_out_of_range(target: Path, sound: Path, asked: int) -> None:
    """Law C3: a block that is larger than trained, or no block at all, is refused."""
    assert_refuses((f"{BLOCK_FLAG} is {asked}", "2 to 8"), target, sound, block_size=asked)


def test_smaller_block_is_allowed(target: Path, sound: Path) -> None:
    """Law C3: the block size comes from the checkpoint and may be lowered."""
    assert plan(target, sound).block_size == 8
    assert plan(target, sound, block_size=4).block_size == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('{"mode": "paralel"}', ("paralel", "parallel")),
        ('{"pruning": 3}', ("pruning",)),
        ('{"prune_threshold": 1.5}', ("1.5", "between 0 and 1")),
        ('{"parallel_max_batch": "2"}', ("parallel_max_batch", "integer")),
        ('{"acceptance": "greedy"}', ("acceptance", "rejection")),
        ('{"mode": "auto"', ("not JSON",)),
        ("[1]", ("cannot be read",)),
        ("/nowhere/options.json", ("/nowhere/options.json", "cannot be read")),
    ],
)
def test_bad_options(target: Path, sound: Path, options: str, words: tuple[str, ...]) -> None:
    """Law C4 for our own options: unknown names, wrong types and unreadable files name the flag."""
    assert_refuses((OPTIONS_FLAG, *words), target, sound, options=options)


def test_options_file(target: Path, sound: Path, tmp_path: Path) -> None:
    """Options may live in a file."""
    file = tmp_path / "options.json"
    file.write_text('{"mode": "sequential"}')
    assert plan(target, sound, options=str(file)).options.mode == "sequential"


def test_unknown_tensor(sound: Path, damaged: Make) -> None:
    """Law C4: an unknown tensor is refused with the nearest expected one."""
    from safetensors.torch import load_file, save_file

    file = damaged() / weight_files.WEIGHTS_FILE
    tensors = load_file(file)
    tensors["mask_embeding"] = tensors.pop("mask_embedding")
    save_file(tensors, file)
    with pytest.raises(Refusal) as error:
        checkpoint.load(file.parent)
    for word in ("mask_embeding", "mask_embedding", str(file)):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("pp_size", 2),
        ("dp_size", 2),
        ("enable_dp_attention", True),
        ("disaggregation_mode", "prefill"),
        ("enable_two_batch_overlap", True),
        ("enable_lora", True),
        ("enable_hierarchical_cache", True),
        ("enable_pdmux", True),
        ("enable_mixed_chunk", True),
        ("enable_return_hidden_states", True),
        ("quantization", "fp8"),
        ("speculative_adaptive", True),
        ("speculative_num_steps", 3),
        ("speculative_eagle_topk", 4),
        ("speculative_use_rejection_sampling", True),
        ("speculative_accept_threshold_single", 0.9),
        ("speculative_accept_threshold_acc", 0.9),
        ("speculative_token_map", "map.pt"),
        ("speculative_draft_window_size", 128),
    ],
)
def test_unsupported_combinations(flag: str, value: object) -> None:
    """Law C7: each combination that cannot be served is refused in one line that names the flag as typed."""
    from sglang.srt.server_args import ServerArgs

    from sglang_ext.serving.algorithm import validate_server_args

    fields = {name: field.default for name, field in _server_arg_fields(ServerArgs).items()}
    fields |= {"speculative_algorithm": "FLEXDRAFT"}
    validate_server_args(SimpleNamespace(**fields))  # the defaults themselves are fine
    with pytest.raises(Refusal) as error:
        validate_server_args(SimpleNamespace(**{**fields, flag: value}))
    message = str(error.value)
    assert "--" + flag.replace("_", "-") in message and "\n" not in message, message


# ------------------------------------------------------------------ starts that must work


def test_nan_drafter_costs_speed_only(
    target: Path, starter: Starter, plain: Server, reference: Answers, tmp_path: Path
) -> None:
    """Law C6: a drafter whose numbers are all NaN never changes the output."""

    def poison(tensors: dict[str, object]) -> None:
        tensors["mask_embedding"].fill_(float("nan"))  # type: ignore[attr-defined]

    folder = untrained_drafter(target, tmp_path / "nan", change=poison)
    launch = starter.launch("--speculative-algorithm", "flexdraft", DRAFTER_FLAG, str(folder))
    asked = requests(6)
    with starter.running(nan=launch) as servers:
        for mode in MODES:
            replies = servers["nan"].generate_all([request.speculative({"mode": mode}) for request in asked])
            assert_same(plain, asked, reference(asked), replies, f"NaN {mode}")
            assert sum(reply.meta["spec_num_correct_drafts"] for reply in replies) == 0


def test_start_log_states_the_plan(flexdraft: Server, drafter: Path) -> None:
    """The log names the resolved plan and the drafter's bytes once."""
    (line,) = [line for line in flexdraft.log_text().splitlines() if "Speculative plan" in line]
    assert str(drafter) in line and "drafter weights" in line and "MB" in line, line


def plan(target: Path, drafter: Path, *, block_size: int | None = None, options: str | None = None):
    """Resolve the plan of a FlexDraft server."""
    return resolve_plan(
        "FLEXDRAFT", model_path=str(target), drafter_path=str(drafter), block_size=block_size, options=options
    )


def assert_refuses(
    words: tuple[str, ...], target: Path, drafter: Path, *, block_size: int | None = None, options: str | None = None
) -> None:
    """Hold start-up to one line with every one of ``words``."""
    with pytest.raises(Refusal) as error:
        plan(target, drafter, block_size=block_size, options=options)
    message = str(error.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, (word, message)


def _method(folder: Path) -> dict[str, object]:
    _, raw = checkpoint.load_config(folder)
    return dict(raw["flexdraft_config"])


def _server_arg_fields(record: type) -> dict[str, SimpleNamespace]:
    """Return the host's argument fields with their defaults."""
    import msgspec

    return {field.name: SimpleNamespace(default=_default(field)) for field in msgspec.structs.fields(record)}


def _default(field: object) -> object:
    import msgspec

    value = field.default  # type: ignore[attr-defined]
    if value is not msgspec.NODEFAULT:
        return value
    factory = field.default_factory  # type: ignore[attr-defined]
    return None if factory is msgspec.NODEFAULT else factory()
