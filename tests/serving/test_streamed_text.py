"""The printable part of a growing text only grows: streamed text never repeats itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.serving.streamed_text import HOOK, printable_text


@given(st.text(max_size=12), st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_what_was_sent_stays_a_prefix(text: str, steps: list[int]) -> None:
    data = text.encode("utf-8", errors="ignore")
    sent, end = "", 0
    for step in steps:
        end += step
        printable = printable_text(data[:end].decode("utf-8", errors="replace"))
        assert printable.startswith(sent)
        assert not printable.endswith("�")
        sent = printable
    assert data.decode("utf-8").startswith(sent) or "�" in text


@pytest.mark.parametrize("text", ("、世�", "、世界。�", "done 🎉 �", "�", ""))
def test_only_the_end_is_withheld(text: str) -> None:
    assert printable_text(text) == text.replace("�", "")


def test_the_host_has_the_function_we_replace() -> None:
    from importlib import import_module

    module, _, name = HOOK.rpartition(".")
    assert callable(vars(import_module(module))[name])
