"""The table of host symbols: it matches the installed host, and it notices every kind of change."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from sglang_ext import plugin
from sglang_ext.core.refusal import Refusal
from sglang_ext.serving import host_symbols
from sglang_ext.serving.host_symbols import SYMBOLS, Symbol, check, host_version, require


def test_every_symbol_is_there():
    assert [str(problem) for problem in check()] == []


def test_the_installed_version_is_a_supported_one():
    assert host_version() in host_symbols.SUPPORTED_VERSIONS


def test_no_symbol_is_listed_twice():
    paths = [symbol.path for symbol in SYMBOLS]
    assert sorted(set(paths)) == sorted(paths)


@pytest.mark.parametrize(
    ("path", "parameters", "words"),
    [
        ("srt.no_such_module:thing", None, "no such module"),
        ("srt.mem_cache.memory_pool:NoSuchPool", None, "is gone"),
        ("srt.mem_cache.memory_pool:MHATokenToKVPool.no_such_method", (), "is gone"),
        ("srt.mem_cache.memory_pool:MHATokenToKVPool.get_key_buffer", ("layer_id", "color"), "color"),
        ("srt.mem_cache.memory_pool:KVWriteLoc", ("loc", "color"), "color"),
    ],
)
def test_a_changed_host_is_refused_by_name_with_versions_and_fix(path, parameters, words):
    with pytest.raises(Refusal) as caught:
        require([Symbol(path, parameters, "this test")])
    message = str(caught.value)
    assert "\n" not in message
    for part in (path, words, "this test", host_version(), host_symbols.SUPPORTED_VERSIONS[-1], "sglang-ext doctor"):
        assert part in message


def test_a_method_is_not_found_through_a_base_class():
    # The table names the place a symbol is defined in, so that a move between classes is noticed.
    inherited = Symbol("srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward", None, "this test")
    assert check([inherited])


def refused_by(name):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    with pytest.raises(Refusal) as caught:
        SpeculativeAlgorithm.from_string(name).validate_server_args(None)
    return caught.value


@pytest.fixture
def forget():
    """Take the test's algorithm names out of the host's registry again."""
    from sglang.srt.speculative import spec_registry

    before = dict(spec_registry._REGISTRY)
    yield
    spec_registry._REGISTRY.clear()
    spec_registry._REGISTRY.update(before)


def test_a_failure_while_loading_reaches_whoever_asks_for_the_algorithm(forget, monkeypatch):
    monkeypatch.setattr(plugin, "ALGORITHM_NAMES", ("TEST_BROKEN",))
    monkeypatch.setattr(host_symbols, "require", lambda: 1 / 0)
    plugin.register()
    error = refused_by("test_broken")
    assert "ZeroDivisionError: division by zero" in str(error)
    assert "sglang-ext doctor" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_refusal_while_loading_reaches_the_user_unchanged(forget, monkeypatch):
    refusal = Refusal("SGLang 9.9 does not match", "supported versions are 0.5.23", "install that")

    def refuse():
        raise refusal

    monkeypatch.setattr(plugin, "ALGORITHM_NAMES", ("TEST_REFUSED",))
    monkeypatch.setattr(host_symbols, "require", refuse)
    plugin.register()
    assert refused_by("test_refused") is refusal


def test_a_failure_after_registration_refuses_too(forget):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    SpeculativeAlgorithm.register("TEST_LATE", supports_overlap=True)(lambda args: object)
    plugin.register_refusal("TEST_LATE", RuntimeError("half loaded"))
    assert "half loaded" in str(refused_by("test_late"))


def test_registering_twice_is_harmless(forget):
    plugin.register()
    plugin.register()
    from sglang.srt.speculative.spec_registry import get_spec

    assert all(get_spec(name) is not None for name in plugin.ALGORITHM_NAMES)
