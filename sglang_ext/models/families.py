"""The target families a drafter can be trained for, and the rules for reading their HF configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext.core.refusal import Refusal, nearest


@dataclass(frozen=True)
class Family:
    """One supported architecture.

    ``absent_head_dim`` and ``absent_kv_heads`` are what the architecture means when config.json leaves the field out;
    None means derived (``hidden_size / num_attention_heads``, and as many key/value heads as query heads).
    """

    architecture: str
    model_type: str
    qk_norm: bool
    absent_head_dim: int | None
    absent_kv_heads: int | None


FAMILIES = (
    Family("LlamaForCausalLM", "llama", qk_norm=False, absent_head_dim=None, absent_kv_heads=None),
    Family("Qwen3ForCausalLM", "qwen3", qk_norm=True, absent_head_dim=128, absent_kv_heads=32),
)


@dataclass(frozen=True)
class TargetShape:
    """The numbers a drafter must share with its target."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    qk_norm: bool


def supported_architectures() -> str:
    """Return the supported architectures as one comma-separated phrase."""
    return ", ".join(family.architecture for family in FAMILIES)


def integer(config: Mapping[str, Any], key: str, where: str, minimum: int = 1) -> int:
    """Return ``config[key]`` as an integer of at least ``minimum``.

    Raises:
        Refusal: if the key is absent, of another type, or too small.
    """
    allowed = f"{key} is a whole number of at least {minimum}"
    if key not in config:
        raise Refusal(f"{where} has no {key}{nearest(key, config)}", allowed, "add it to config.json")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise Refusal(f"{where} has {key} = {value!r}", allowed, "correct config.json")
    return value


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Return the family of an HF configuration, by architecture, or by model type where the class name is a drafter's.

    Raises:
        Refusal: if neither names a supported dense family, or the configuration asks for an unsupported variant.
    """
    architectures = config.get("architectures") or []
    model_type = config.get("model_type")
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise Refusal(f"{where} has architectures = {architectures!r}", "it is a list of names", "correct config.json")
    found = next((family for family in FAMILIES if family.architecture in architectures), None)
    if found is None:
        found = next((family for family in FAMILIES if family.model_type == model_type), None)
        foreign = [name for name in architectures if name.endswith("ForCausalLM")]
        if found is None or foreign:
            raise Refusal(
                f"{where} has architecture {(architectures or [model_type])[0]!r}",
                f"supported targets are {supported_architectures()} (dense)",
                "choose a target of one of these families",
            )
    if model_type is not None and model_type != found.model_type:
        raise Refusal(
            f"{where} has model_type {model_type!r}",
            f"{found.architecture} goes with {found.model_type!r}",
            "correct config.json",
        )
    for key in ("attention_bias", "use_sliding_window", "quantization_config"):
        if config.get(key):
            raise Refusal(f"{where} sets {key}", "only targets without it are supported", "choose another target")
    return found


def target_shape(config: Mapping[str, Any], where: str, layers_key: str = "num_hidden_layers") -> TargetShape:
    """Read the numbers a drafter must share with its target from an HF configuration.

    Args:
        config: parsed config.json of a target, or of a drafter with ``layers_key="num_target_layers"``.
        where: how messages call the file.

    Raises:
        Refusal: on an unsupported family or a missing, mistyped or inconsistent number.
    """
    family = family_of(config, where)
    hidden = integer(config, "hidden_size", where)
    heads = integer(config, "num_attention_heads", where)
    if config.get("num_key_value_heads") is not None:
        kv_heads = integer(config, "num_key_value_heads", where)
    else:
        kv_heads = family.absent_kv_heads or heads
    if config.get("head_dim") is not None:
        head_dim = integer(config, "head_dim", where)
    elif "head_dim" not in config and family.absent_head_dim is not None:
        head_dim = family.absent_head_dim
    elif hidden % heads:
        raise Refusal(
            f"{where} has hidden_size {hidden} and {heads} attention heads",
            "without head_dim the first must be a multiple of the second",
            "add head_dim to config.json",
        )
    else:
        head_dim = hidden // heads
    if heads % kv_heads:
        raise Refusal(
            f"{where} has {heads} attention heads and {kv_heads} key/value heads",
            "the first must be a multiple of the second",
            "correct config.json",
        )
    return TargetShape(
        architecture=family.architecture,
        hidden_size=hidden,
        num_layers=integer(config, layers_key, where),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=integer(config, "vocab_size", where),
        qk_norm=family.qk_norm,
    )
