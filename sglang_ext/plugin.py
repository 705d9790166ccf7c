"""Entry points the host loads: ``register`` (algorithms) and ``activate_platform``.

The host calls ``register`` in every process of a server and only logs what it raises; users would then read "Unknown
speculative algorithm". So whatever goes wrong is kept and raised again, with its fix, when the algorithm is asked for.
Nothing but the standard library is imported here.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

ALGORITHM_NAMES = ("FLEXDRAFT", "DFLARE", "SCRIPTED")
"""Names a user may type; each is registered even if the package cannot load."""


def activate_platform() -> str | None:
    """Return the CPU platform class path on a machine without an accelerator, else None."""
    from sglang_ext.serving.platform.activation import activate

    return activate()


def register() -> None:
    """Register the algorithms. Safe to call repeatedly."""
    try:
        _register()
    except Exception as error:
        logger.exception("sglang_ext could not load; its algorithms will refuse with this error")
        for name in ALGORITHM_NAMES:
            register_refusal(name, error)


def _register() -> None:
    from sglang_ext.serving import host_symbols

    host_symbols.require()
    from sglang_ext.serving.platform import activation

    if activation.is_active():
        from sglang_ext.serving.platform import shims

        shims.allow_draft_backend()
        shims.hook_thread_binding()
    from sglang_ext.serving import algorithm

    algorithm.register()


def register_refusal(name: str, error: Exception) -> None:
    """Make ``--speculative-algorithm name`` raise ``error`` with its fix instead of being unknown."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    from sglang_ext.core.refusal import Refusal

    def refuse(server_args: Any) -> None:
        if isinstance(error, Refusal):
            raise error
        raise Refusal(
            f"--speculative-algorithm {name.lower()} could not load: {type(error).__name__}: {error}",
            "the sglang-flexdraft installation must be complete and match SGLang",
            "run `sglang-ext doctor`",
        ) from error

    def no_worker(server_args: Any) -> type:
        refuse(server_args)
        raise AssertionError("unreachable")

    spec = get_spec(name)
    if spec is None:
        SpeculativeAlgorithm.register(name, supports_overlap=True, validate_server_args=refuse)(no_worker)
    else:
        spec.validate_server_args = refuse
