"""Options: every key is checked, unknown ones name the nearest, request overrides raise what becomes a 400."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from sglang_ext.core.config import RequestOptions, SpecOptions, load_options, parse_request_options
from sglang_ext.core.prune import PruneConfig, PruneStrategy
from sglang_ext.core.refusal import Refusal

DOCS = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def test_defaults_without_the_flag() -> None:
    assert load_options(None) == SpecOptions()


def test_inline_and_file_give_the_same(tmp_path: Path) -> None:
    text = json.dumps({"mode": "sequential", "prune_threshold": 0.2})
    path = tmp_path / "options.json"
    path.write_text(text)
    assert load_options(text) == load_options(str(path)) == SpecOptions(mode="sequential", prune_threshold=0.2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"moed": "plain"}', "did you mean 'mode'"),
        ('{"mode": "paralel"}', "did you mean 'parallel'"),
        ('{"mode": 3}', "mode is 3"),
        ('{"pruning": "cumulative"}', "cumulative_product"),
        ('{"prune_threshold": 0}', "strictly between 0 and 1"),
        ('{"prune_threshold": true}', "prune_threshold is True"),
        ('{"acceptance": "greedy"}', "target_only"),
        ('{"parallel_max_batch": -1}', "integer >= 0"),
        ('{"plain_min_batch": 0}', "integer >= 1"),
        ('{"adaptive": 1}', "true or false"),
        ('{"draft_top_m": 1.5}', "draft_top_m is 1.5"),
        ('{"profile": "yes"}', "profile is 'yes'"),
        ("{", "is not JSON"),
        ('{"mode": ' + "[" * 100_000, "is not JSON"),
        ('{"draft_top_m": ' + "9" * 10_000 + "}", "is not JSON"),
        ("no/such/file.json", "cannot be read"),
    ],
)
def test_bad_options_are_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(Refusal) as refused:
        load_options(text)
    message = str(refused.value)
    assert said in message
    assert "\n" not in message


def test_a_request_prunes_by_its_own_settings() -> None:
    server = SpecOptions(prune_threshold=0.2).prune_config()
    assert parse_request_options({"speculative": {}}).prune_config(server) is server
    own = parse_request_options({"speculative": {"pruning": "min_confidence", "prune_threshold": 0.5}})
    assert own.prune_config(server) == PruneConfig(PruneStrategy.MIN_CONFIDENCE, 0.5)
    for given, said in (({"pruning": "some"}, "min_confidence"), ({"prune_threshold": 1}, "strictly between 0 and 1")):
        with pytest.raises(ValueError, match=said):
            parse_request_options({"speculative": given})


def test_a_file_that_holds_a_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text("[1]")
    with pytest.raises(Refusal, match="holds a list"):
        load_options(str(path))


def test_request_overrides() -> None:
    assert parse_request_options(None) == RequestOptions()
    assert parse_request_options({"other": 1}) == RequestOptions()
    given = {"speculative": {"mode": "plain", "records": True}}
    assert parse_request_options(given) == RequestOptions(mode="plain", records=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("plain", "is a str"),
        ({"mod": "plain"}, "did you mean 'mode'"),
        ({"mode": "fast"}, "allowed: auto, parallel, sequential, plain"),
        ({"records": 1}, "true or false"),
        ({"script": 3}, "a string is allowed"),
    ],
)
def test_bad_request_overrides_raise(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_request_options({"speculative": given})


@pytest.mark.parametrize("given", ([], [{"speculative": {}}], "plain", 5, True))
def test_custom_params_that_are_no_object_raise(given: object) -> None:
    with pytest.raises(ValueError, match="an object is allowed"):
        parse_request_options(given)  # type: ignore[arg-type]


def test_options_given_as_an_object_from_python_are_refused() -> None:
    with pytest.raises(Refusal, match="dumps"):
        load_options({"mode": "plain"})  # type: ignore[arg-type]


def test_every_option_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", DOCS.read_text(), flags=re.MULTILINE))
    documented = {key: json.loads(value) for key, value in rows.items()}
    assert documented == {field.name: field.default for field in dataclasses.fields(SpecOptions)}
