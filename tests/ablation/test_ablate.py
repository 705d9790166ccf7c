"""Ablations: equal budgets, arms found again, time respected, intervals as they should be."""

from __future__ import annotations

import json
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_ext import cli
from sglang_ext.ablation import report
from sglang_ext.ablation.arms import STUDIES, Arm, chosen_studies, parse_settings, refuse_settings
from sglang_ext.ablation.runner import Measured, Runner
from sglang_ext.core.refusal import Refusal
from sglang_ext.models.tapped.checkpoint import expected_shapes
from sglang_ext.models.target import Target
from sglang_ext.training.evaluate import Acceptance
from sglang_ext.training.methods import METHODS
from sglang_ext.training.taps import kept_layers
from sglang_ext.training.train import LOG
from tests.training.tiny_targets import random_rows, write_rows, write_target

SETTINGS = {
    "block_size": 4,
    "num_layers": 2,
    "num_taps": 1,
    "calibrator_rank": 8,
    "blocks_per_step": 8,
    "anchors_per_sequence": 4,
    "frequent": 0,
    "threads": 1,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ablation")
    return {
        "target": str(write_target(folder / "target")),
        "data": str(write_rows(folder / "rows.jsonl", random_rows(12))),
        "held": str(write_rows(folder / "held.jsonl", random_rows(5, seed=7), domain="held")),
    }


def make_runner(files: dict[str, str], out: Path, steps: int = 3, **more: Any) -> Runner:
    out.mkdir(exist_ok=True)
    return Runner(files["target"], [files["data"]], [files["held"]], out, steps, {**SETTINGS, **more})


@pytest.mark.parametrize("study", ["method", "calibration", "projections", "fusion"])
def test_arms_of_a_study_differ_only_in_what_it_is_about(files: dict[str, str], tmp_path: Path, study: str) -> None:
    """Same rows, steps, blocks and seed; DFlash has DFlare's number of parameters to within one column."""
    runner = make_runner(files, tmp_path)
    configs = [runner.config(arm) for arm in STUDIES[study]]
    for name in ("data", "steps", "blocks_per_step", "anchors_per_sequence", "seed", "frequent", "lr"):
        assert len({vars(config)[name] for config in configs}) == 1, name
    assert len({config.out for config in configs}) == len(configs)
    if study == "method":
        target = Target.load(files["target"])
        drafters = [METHODS[config.METHOD].new_model(target, config).config for config in configs]
        sizes = [sum(math.prod(shape) for shape in expected_shapes(drafter).values()) for drafter in drafters]
        assert abs(sizes[0] - sizes[1]) <= 3 * 2 * 32


def test_a_finished_arm_is_found_and_measured_once(files: dict[str, str], tmp_path: Path) -> None:
    runner = make_runner(files, tmp_path)
    arm = STUDIES["method"][1]
    first = runner.run(arm, math.inf)
    assert first is not None and first.steps == 3 and len(first.found) == 5
    log = Path(runner.config(arm).out) / LOG
    before = log.read_bytes()
    # No time left: what is done is still there.
    assert make_runner(files, tmp_path).run(arm, 0.0) == first
    assert log.read_bytes() == before
    # Other options or other rows are another arm, not this one.
    assert make_runner(files, tmp_path, lr=0.5).run(arm, 0.0) is None
    other = {**files, "data": str(write_rows(tmp_path / "other.jsonl", random_rows(12, seed=3)))}
    assert make_runner(other, tmp_path).run(arm, 0.0) is None


#: A common setting against every option that a study varies.
AGAINST = {
    "context_projections": "shared",
    "gamma": 3.0,
    "calibrator": "none",
    "num_taps": 2,
    "num_layers": 6,
    "block_size": 5,
}
#: What the labels of each study's arms promise.
PROMISED: dict[str, list[dict[str, Any]]] = {
    "method": [{"context_projections": "shared", "gamma": 4.0}, {"context_projections": "separate", "gamma": 0.0}],
    "calibration": [{"calibrator": "none"}, {"calibrator": "hidden"}],
    "gamma": [{"gamma": 4.0}, {"gamma": 0.0}],
    "fusion": [{"context_projections": "separate", "gamma": 0.0}] * 2,
    "projections": [{"context_projections": "shared"}, {"context_projections": "separate"}],
    "taps": [{"num_taps": 5}, {"num_taps": 3}, {"num_taps": 9}],
    "depth": [{"num_layers": 3}, {"num_layers": 5}, {"num_layers": 7}],
    "flexdraft-depth": [{"num_layers": 8}, {"num_layers": 4}, {"num_layers": 12}],
    "block": [{"block_size": 8}, {"block_size": 4}, {"block_size": 16}],
}


@pytest.mark.parametrize("study", STUDIES)
def test_arms_are_what_their_labels_say_whatever_is_set(study: str) -> None:
    """And they share every other option, with a setting and without."""
    for common in ({}, AGAINST):
        options = [arm.training_options(common) for arm in STUDIES[study]]
        for found, promised in zip(options, PROMISED.get(study, [{}] * len(options)), strict=True):
            assert {name: found[name] for name in promised} == promised
        varied = {name for promised in PROMISED.get(study, []) for name in promised}
        for name in set.intersection(*map(set, options)) - varied:
            assert len({found[name] for found in options}) == 1, name
            if name in common:
                assert options[0][name] == common[name], name


def test_equal_arms_share_a_training_and_others_do_not(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    five, three, progressive = STUDIES["taps"][0], STUDIES["depth"][0], STUDIES["gamma"][1]
    assert len({arm.training_key({}) for arm in (five, three, progressive)}) == 1
    assert len({arm.training_key({"num_layers": 2}) for arm in (five, three, progressive)}) == 2
    assert five.training_key({"lr": 1}) == five.training_key({"lr": 1.0}) != five.training_key({})
    assert five.training_key({"threads": 3, "tap_cache": "x"}) == five.training_key({})
    given = ["ablate", "--target", "t", "--data", "d", "--held-out", "h", "--out", "o", "--dry-run"]
    given += ["--study", "taps", "depth", "gamma"]
    for more, count in (([], 6), (["--set", "num_layers=2"], 7)):
        assert cli.main([*given, *more]) == 0
        assert f"{count} trainings of 300 steps" in capsys.readouterr().out


def test_a_setting_that_no_arm_would_take_is_refused() -> None:
    for study, promised in PROMISED.items():
        for name in promised[0]:
            with pytest.raises(Refusal, match=f"--set {name}=1 --study {study}; every arm there sets {name} itself"):
                refuse_settings({name: 1}, {study: STUDIES[study]})
    refuse_settings({"num_layers": 2, "gamma": 1.0, "block_size": 4}, STUDIES)
    refuse_settings({"calibrator_rank": 8}, {"gamma": STUDIES["gamma"]})
    with pytest.raises(Refusal, match="--set steps=4"):
        refuse_settings({"steps": 4}, STUDIES)


def test_another_number_of_steps_is_refused(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the arm is finished, measured or interrupted, and before another arm is trained."""
    fixed, progressive = STUDIES["gamma"]
    runner = make_runner(files, tmp_path)
    assert runner.run(progressive, math.inf) is not None
    folder = Path(runner.config(progressive).out)
    for steps in (2, 5):
        message = f"--steps {steps}; .* is a run of 3 steps.*: give --steps 3, or a new --out"
        with pytest.raises(Refusal, match=message):
            make_runner(files, tmp_path, steps).run(progressive, math.inf)
        with pytest.raises(Refusal, match=message):
            make_runner(files, tmp_path, steps).check([fixed, progressive])
    # What the checkpoint says counts, too.
    (folder / "config.json").unlink()
    (folder / "measured-None.json").unlink()
    with pytest.raises(Refusal, match="is a run of 3 steps"):
        make_runner(files, tmp_path, 5).run(progressive, math.inf)
    again = runner.run(progressive, math.inf)
    assert again is not None and again.steps == 3

    given = ["ablate", "--target", files["target"], "--data", files["data"], "--held-out", files["held"]]
    given += ["--out", str(tmp_path), "--steps", "4", "--threads", "1", "--study", "gamma"]
    for name, value in SETTINGS.items():
        given += ["--set", f"{name}={value}"]
    capsys.readouterr()
    assert cli.main(given) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and "--steps 4" in error[0] and "3 steps" in error[0] and "new --out" in error[0]
    assert not (tmp_path / "ablation.md").exists() and len(list((tmp_path / "arms").iterdir())) == 1


@pytest.fixture(scope="module")
def deep(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target with layers enough for nine taps."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = write_target(tmp_path_factory.mktemp("deep") / "target")
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = 12
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return {**files, "target": str(folder)}


def test_each_number_of_taps_has_a_file_of_its_own(deep: dict[str, str], tmp_path: Path) -> None:
    runner = make_runner(deep, tmp_path, steps=1)
    for arm in STUDIES["taps"]:
        measured = runner.run(arm, math.inf)
        assert measured is not None and len(measured.found) == 5
    for count in (5, 3, 9):
        layers = kept_layers(tmp_path / f"taps-{count}")
        assert layers is not None and len(layers) == count


def test_a_file_of_taps_serves_the_arms_whose_layers_it_has(deep: dict[str, str], tmp_path: Path) -> None:
    named = str(tmp_path / "mine")
    runner = make_runner(deep, tmp_path, steps=1, tap_cache=named)
    five, three, nine = STUDIES["taps"]
    for arm in (five, three, nine):
        assert runner.run(arm, math.inf) is not None
    assert [runner.config(arm).tap_cache for arm in (five, three, nine)] == [named, named, str(tmp_path / "taps-9")]
    assert kept_layers(named) == (1, 3, 5, 7, 9) and not (tmp_path / "taps-3").exists()


def test_bad_files_and_folders_are_refused_in_one_line(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    (tmp_path / "foreign").write_text('{"text": "hello"}\n')
    good = {"target": files["target"], "data": files["data"], "held-out": files["held"], "out": str(tmp_path / "out")}
    for flag, name in (
        ("data", "nope.jsonl"),
        ("data", "."),
        ("data", "bytes"),
        ("held-out", "nope.jsonl"),
        ("held-out", "."),
        ("held-out", "bytes"),
        ("held-out", "foreign"),
        ("out", "file"),
        ("out", "file/below"),
    ):
        given = {**good, flag: str(tmp_path / name)}
        arguments = [part for key, value in given.items() for part in (f"--{key}", value)]
        assert cli.main(["ablate", *arguments, "--study", "gamma", "--steps", "1"]) == 1
        error = capsys.readouterr().err.splitlines()
        assert len(error) == 1 and error[0].startswith(f"error: --{flag} {tmp_path / name}"), error
    arguments = [part for key, value in good.items() for part in (f"--{key}", value)]
    for more in (["--limit", "-1"], ["--threads", "-1"], ["--steps", "0"]):
        assert cli.main(["ablate", *arguments, *more]) == 1
        assert capsys.readouterr().err.startswith(f"error: {' '.join(more)}; at least")


def test_arms_that_the_time_does_not_reach_are_left(files: dict[str, str], tmp_path: Path) -> None:
    runner = make_runner(files, tmp_path)
    assert runner.run(STUDIES["method"][0], time.time() - 1) is None
    assert not (tmp_path / "arms").exists()


def test_selective_arms_share_one_training(files: dict[str, str], tmp_path: Path) -> None:
    """Verifying fewer drafts never raises accept length, and is counted."""
    runner = make_runner(files, tmp_path)
    arms = (*STUDIES["selective"], Arm("at most one", "flexdraft", prune=1.0))
    assert len({runner.config(arm).out for arm in arms}) == 1
    measured = [runner.run(arm, math.inf) for arm in arms]
    totals = []
    for one in measured:
        assert one is not None
        total = Acceptance(4)
        for found in one.found.values():
            total.merge(found)
        totals.append(total)
    assert totals[0].verified == 3 * totals[0].steps
    assert totals[-1].verified == totals[-1].steps
    for less in totals[1:]:
        assert less.accept_length <= totals[0].accept_length and less.verified / less.steps <= 3
        assert less.tokens == totals[0].tokens


def test_a_part_of_the_data_is_a_fixed_part(files: dict[str, str], tmp_path: Path) -> None:
    runner = make_runner(files, tmp_path)
    config = runner.config(STUDIES["data"][0])
    rows = [json.loads(line) for line in Path(config.data[0]).read_text().splitlines()]
    everything = [json.loads(line) for line in Path(files["data"]).read_text().splitlines()]
    assert 0 < len(rows) < len(everything) and all(row in everything for row in rows)
    # Other data in the same folder: a part of that data.
    other = {**files, "data": str(write_rows(tmp_path / "other.jsonl", random_rows(12, seed=3), domain="other"))}
    part = Path(make_runner(other, tmp_path).config(STUDIES["data"][0]).data[0])
    assert '"other/' in part.read_text() and '"test/' not in part.read_text()
    assert Path(config.data[0]).read_text() != part.read_text()


def test_the_command_writes_a_report_and_says_what_is_missing(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["ablate", "--target", files["target"], "--data", files["data"], "--held-out", files["held"]]
    given += ["--out", str(tmp_path), "--steps", "2", "--threads", "1", "--study", "method", "gamma"]
    for name, value in SETTINGS.items():
        given += ["--set", f"{name}={value}"]
    assert cli.main(given) == 0
    text = (tmp_path / "ablation.md").read_text()
    assert text.count("| DFlare |") == 1 and text.count("| progressive gamma |") == 1
    assert "2 steps each; 5 responses." in text
    assert cli.main([*given, "--study", "method", "calibration", "--minutes", "0.000001"]) == 3
    out = capsys.readouterr().out
    assert "Not finished in the time given: attention only, + calibration." in out and "| DFlare |" in out
    assert cli.main([*given, "--set", "blocks_per_stp=4"]) == 1
    assert cli.main([*given, "--study", "gama"]) == 1


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Ratio of sums over simulated responses: 95 % intervals hold the true ratio in about 95 % of the draws."""
    seed = random.randrange(10_000)
    print(f"seed {seed}")
    chooser = random.Random(seed)
    held = 0
    for _ in range(400):
        found = []
        for _ in range(40):
            steps = chooser.randint(10, 60)
            tokens = sum(1 + (chooser.random() < 0.6) + (chooser.random() < 0.4) for _ in range(steps))
            found.append(Acceptance(4, prompts=1, steps=steps, tokens=tokens))
        interval = report.mean_interval(found)
        assert interval.low is not None and interval.high is not None
        held += interval.low <= 2.0 <= interval.high
    assert 360 <= held <= 396


def test_the_first_arm_is_the_reference() -> None:
    def measured(label: str, tokens: int) -> Measured:
        found = {str(i): Acceptance(4, 1, 10, tokens + i) for i in range(5)}
        return Measured(Arm(label, "dflare"), 10, 3, 1.0, found)

    lines = report.lines_of([measured("a", 20), measured("b", 20), measured("c", 40)])
    assert lines[0].against is None
    assert lines[1].against is not None and lines[1].against.estimate == pytest.approx(1.0)
    assert lines[2].against is not None and lines[2].against.low is not None and lines[2].against.low > 1.5


def test_the_guide_lists_every_flag() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    training, _, comparing = guide.partition("## Comparing variants")
    parser = cli.build_parser()
    commands = next(action.choices for action in parser._actions if isinstance(action.choices, dict))
    methods = next(action.choices for action in commands["train"]._actions if isinstance(action.choices, dict))
    for parser, text in (*((method, training) for method in methods.values()), (commands["ablate"], comparing)):
        for flag in (flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")):
            assert flag == "--help" or re.search(rf"{flag}(?![\w-])", text), flag


def test_names_and_settings_are_strict() -> None:
    assert parse_settings(["lr=0.5", "optimizer=muon", "num-taps=3"]) == {"lr": 0.5, "optimizer": "muon", "num_taps": 3}
    assert list(chosen_studies(["gamma", "method"])) == ["gamma", "method"]
    with pytest.raises(Refusal, match="OPTION=VALUE"):
        parse_settings(["lr"])
    with pytest.raises(Refusal, match="did you mean 'gamma'"):
        chosen_studies(["gama"])
