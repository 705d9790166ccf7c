"""What a drafter over taps is: the typed form of its config.json (DFlare section 3, DFlash section 4).

The files of both methods are those of a small Qwen3 model with a few fields more, so published ones load unchanged.
Their architecture string does not tell the methods apart; the names of the tensors do.

Shape legend: D drafter layers, T taps, L target layers, H hidden, V vocabulary, K block size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

from sglang_ext.core.refusal import Refusal, refuse_unknown
from sglang_ext.models.families import integer

CONFIG_KEY = "dflash_config"
#: Written in place of ``mask_token_id`` where the target has no token to spare: the tensor ``mask_embedding``.
LEARNED_MASK = "learned"
#: What the released configuration class means when config.json leaves a field out.
ABSENT_HEAD_DIM = 128
ABSENT_EPS = 1e-6
#: Kinds of rotary angles, and the numbers each needs beside ``rope_theta``.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

_RELEASED_KEYS = ("mask_token_id", "target_layer_ids", "block_size")
_OWN_KEYS = (
    "mask_embedding",
    "separate_context_projections",
    "draft_vocab_size",
    "target_architecture",
    "target_name",
    "vocabulary_digest",
    "training",
    "acceptance",
)
#: Variants of the released architecture that these drafters do not have, and their only supported values.
_FIXED = {
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "hidden_act": ("silu", None),
}

Config = TypeVar("Config", bound="TappedConfig")


@dataclass(frozen=True)
class TappedConfig:
    """Sizes and switches of one drafter.

    ``block_size`` is K, the bonus token's slot included; ``num_layers`` is D; ``target_layer_ids`` are the T taps, the
    outputs of these target layers (0-based); ``num_target_layers`` is L. ``rope`` holds the rotary parameters as sorted
    pairs. ``mask_token_id`` None means a learned mask embedding, a tensor of the checkpoint. With
    ``separate_context_projections`` the context has key and value matrices of its own. ``draft_vocab_size`` is how many
    tokens the drafter can propose (their ids are a tensor too); None means the whole vocabulary.

    Raises:
        Refusal: on construction, if the numbers contradict each other.
    """

    #: Set by each method: its name, the architecture string of exports, whether the context has its own projections.
    METHOD: ClassVar[str]
    TITLE: ClassVar[str]
    ARCHITECTURE: ClassVar[str]
    SEPARATE_PROJECTIONS: ClassVar[bool]

    block_size: int
    num_layers: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: tuple[tuple[str, float | str], ...]
    max_position_embeddings: int
    mask_token_id: int | None
    separate_context_projections: bool
    draft_vocab_size: int | None = None
    target_architecture: str | None = None
    target_name: str | None = None
    vocabulary_digest: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    def fusion_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors that bring the taps together."""
        raise NotImplementedError

    @classmethod
    def for_target(
        cls: type[Config],
        target_hf_config: Mapping[str, Any],
        *,
        num_layers: int,
        num_taps: int,
        block_size: int,
        intermediate_size: int | None = None,
        mask_token_id: int | None = None,
        separate_context_projections: bool | None = None,
        target_name: str | None = None,
        vocabulary_digest: str | None = None,
    ) -> Config:
        """Describe a new drafter for a target (its parsed config.json), with layers shaped like the target's.

        Args:
            target_hf_config: the target's parsed config.json.
            num_layers: D.
            num_taps: T; the taps are spread over the target as the released drafters' are.
            block_size: K.
            intermediate_size: width of the feed-forward parts; None: the target's.
            mask_token_id: an unused id of the vocabulary; None: a learned embedding.
            separate_context_projections: None: as the method has it.
            target_name, vocabulary_digest: recorded in the checkpoint.

        Raises:
            Refusal: if a number is missing or does not fit the target.
        """
        where, d = "the target's config", target_hf_config
        depth = integer(d, "num_hidden_layers", where)
        architectures = d.get("architectures") or [None]
        separate = cls.SEPARATE_PROJECTIONS if separate_context_projections is None else separate_context_projections
        width = integer(d, "intermediate_size", where) if intermediate_size is None else intermediate_size
        return cls(
            block_size=block_size,
            num_layers=num_layers,
            num_target_layers=depth,
            target_layer_ids=spread_taps(depth, num_taps),
            hidden_size=integer(d, "hidden_size", where),
            intermediate_size=width,
            **_heads(d, where, integer(d, "hidden_size", where) // integer(d, "num_attention_heads", where)),
            vocab_size=integer(d, "vocab_size", where),
            rms_norm_eps=_number(d, "rms_norm_eps", where, ABSENT_EPS),
            rope=_rope(d, where),
            max_position_embeddings=integer(d, "max_position_embeddings", where),
            mask_token_id=mask_token_id,
            separate_context_projections=separate,
            target_architecture=architectures[0],
            target_name=target_name,
            vocabulary_digest=vocabulary_digest,
        )

    @classmethod
    def from_hf_dict(cls: type[Config], d: Mapping[str, Any], where: str = "config.json") -> Config:
        """Read a drafter's parsed config.json; ``where`` is how messages call it.

        Raises:
            Refusal: on a missing, unknown, mistyped, unsupported or contradictory entry.
        """
        method = _method_dict(d, where)
        inside = f"{where} ({CONFIG_KEY})"
        _refuse_variants(d, where)
        return cls(
            block_size=_block_size(d, method, where, inside),
            num_layers=integer(d, "num_hidden_layers", where),
            num_target_layers=integer(d, "num_target_layers", where),
            target_layer_ids=_tap_ids(method, inside),
            hidden_size=integer(d, "hidden_size", where),
            intermediate_size=integer(d, "intermediate_size", where),
            **_heads(d, where, ABSENT_HEAD_DIM),
            vocab_size=integer(d, "vocab_size", where),
            rms_norm_eps=_number(d, "rms_norm_eps", where, ABSENT_EPS),
            rope=_rope(d, where),
            max_position_embeddings=integer(d, "max_position_embeddings", where),
            mask_token_id=_mask(method, inside),
            separate_context_projections=_switch(
                method, "separate_context_projections", inside, cls.SEPARATE_PROJECTIONS
            ),
            draft_vocab_size=integer(method, "draft_vocab_size", inside) if "draft_vocab_size" in method else None,
            target_architecture=_optional_text(method, "target_architecture", inside),
            target_name=_optional_text(method, "target_name", inside),
            vocabulary_digest=_optional_text(method, "vocabulary_digest", inside),
        )

    def to_hf_dict(self) -> dict[str, Any]:
        """Return the config.json of this drafter, in the released form."""
        method: dict[str, Any] = {"target_layer_ids": list(self.target_layer_ids)}
        if self.mask_token_id is None:
            method["mask_embedding"] = LEARNED_MASK
        else:
            method["mask_token_id"] = self.mask_token_id
        if self.separate_context_projections != self.SEPARATE_PROJECTIONS:
            method["separate_context_projections"] = self.separate_context_projections
        for name in ("draft_vocab_size", "target_architecture", "target_name", "vocabulary_digest"):
            value = vars(self)[name]
            if value is not None:
                method[name] = value
        rope = dict(self.rope)
        kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        return {
            "architectures": [self.ARCHITECTURE],
            "model_type": "qwen3",
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "layer_types": ["full_attention"] * self.num_layers,
            **{name: vars(self)[name] for name in (*kept, "vocab_size", "rms_norm_eps", "max_position_embeddings")},
            "rope_parameters": rope,
            # Readers older than rope_parameters look for these two.
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else rope,
            "block_size": self.block_size,
            "num_hidden_layers": self.num_layers,
            "num_target_layers": self.num_target_layers,
            CONFIG_KEY: method,
        }

    def with_draft_vocabulary(self: Config, size: int) -> Config:
        """Return this drafter proposing only ``size`` tokens."""
        return replace(self, draft_vocab_size=size)


def spread_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Return ``count`` layer ids from 1 to L - 3, evenly spread and rounded; the middle layer for a count of 1.

    Raises:
        Refusal: if the target has too few layers for so many different taps.
    """
    last = num_target_layers - 3
    if count == 1:
        return (num_target_layers // 2,)
    if count < 1 or count > last:
        raise Refusal(
            f"{count} taps were asked for",
            f"1 to {max(1, last)} are allowed for a target of {num_target_layers} layers",
            "choose fewer taps",
        )
    return tuple(round(1 + i * (last - 1) / (count - 1)) for i in range(count))


def origin_fields(d: Mapping[str, Any], where: str = "config.json") -> tuple[dict[str, Any], list[Any]]:
    """Return the ``training`` object and the ``acceptance`` rows kept inside a drafter's config.json, empty if absent.

    Raises:
        Refusal: if either has the wrong JSON type.
    """
    method = _method_dict(d, where)
    training, acceptance = method.get("training", {}), method.get("acceptance", [])
    if not isinstance(training, dict):
        raise Refusal(f"{where} has training = {training!r}", "it is a JSON object", "correct config.json")
    if not isinstance(acceptance, list):
        raise Refusal(f"{where} has acceptance = {acceptance!r}", "it is a list of rows", "correct config.json")
    return training, acceptance


def _check(config: TappedConfig) -> None:
    where, ids = f"{config.TITLE} config", config.target_layer_ids
    if config.block_size < 2:
        raise Refusal(f"{where} has block_size = {config.block_size}", "a block has at least 2 slots", "correct it")
    if config.num_layers < 1:
        raise Refusal(f"{where} has {config.num_layers} layers", "at least 1 is needed", "correct it")
    inside = all(0 <= i < config.num_target_layers for i in ids)
    if not ids or not inside or any(a >= b for a, b in pairwise(ids)):
        raise Refusal(
            f"{where} has target_layer_ids = {list(ids)}",
            f"they are increasing numbers of target layers, 0 to {config.num_target_layers - 1}",
            "correct target_layer_ids or num_target_layers in config.json",
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise Refusal(
            f"{where} has {config.num_attention_heads} heads and {config.num_key_value_heads} key/value heads",
            "the first must be a multiple of the second",
            "correct config.json",
        )
    for name, value, first in (
        ("mask_token_id", config.mask_token_id, 0),
        ("draft_vocab_size", config.draft_vocab_size, 1),
    ):
        last = config.vocab_size - 1 + first
        if value is not None and not first <= value <= last:
            raise Refusal(
                f"{where} has {name} = {value}",
                f"{first} to {last} is allowed with a vocabulary of {config.vocab_size}",
                "correct config.json",
            )


def _method_dict(d: Mapping[str, Any], where: str) -> dict[str, Any]:
    if CONFIG_KEY not in d:
        raise Refusal(
            f"{where} has no {CONFIG_KEY}",
            "a DFlare or DFlash drafter carries it",
            "name a folder that holds such a drafter",
        )
    method = d[CONFIG_KEY]
    if not isinstance(method, dict):
        raise Refusal(f"{where} has {CONFIG_KEY} = {method!r}", "it is a JSON object", "correct config.json")
    refuse_unknown(f"{where} ({CONFIG_KEY})", method, _RELEASED_KEYS + _OWN_KEYS)
    return method


def _refuse_variants(d: Mapping[str, Any], where: str) -> None:
    for key, allowed in _FIXED.items():
        if d.get(key) not in allowed:
            raise Refusal(
                f"{where} has {key} = {d[key]!r}", f"only {allowed[0]!r} is supported", "choose another drafter"
            )
    types = d.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise Refusal(f"{where} has layer_types = {types!r}", "only full attention is supported", "choose another one")


def _block_size(d: Mapping[str, Any], method: Mapping[str, Any], where: str, inside: str) -> int:
    """K, which released files keep at the top or among the method's own fields."""
    if "block_size" not in method:
        return integer(d, "block_size", where, minimum=2)
    size = integer(method, "block_size", inside, minimum=2)
    if d.get("block_size") not in (None, size):
        raise Refusal(f"{where} has block_size = {d['block_size']!r}", f"{inside} has {size}", "correct one of them")
    return size


def _tap_ids(method: Mapping[str, Any], where: str) -> tuple[int, ...]:
    key = "target_layer_ids"
    if key not in method:
        raise Refusal(f"{where} has no {key}", "it lists the target layers that are tapped", "add it to config.json")
    ids = method[key]
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise Refusal(f"{where} has {key} = {ids!r}", "it is a list of layer numbers", "correct config.json")
    return tuple(ids)


def _heads(d: Mapping[str, Any], where: str, absent_head_dim: int) -> dict[str, int]:
    heads = integer(d, "num_attention_heads", where)
    kv_heads = heads if d.get("num_key_value_heads") is None else integer(d, "num_key_value_heads", where)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": absent_head_dim if d.get("head_dim") is None else integer(d, "head_dim", where),
    }


def _number(d: Mapping[str, Any], key: str, where: str, absent: float) -> float:
    value = d.get(key, absent)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise Refusal(f"{where} has {key} = {value!r}", "it is a positive number", "correct config.json")
    return float(value)


def _rope(d: Mapping[str, Any], where: str) -> tuple[tuple[str, float | str], ...]:
    """The rotary parameters from ``rope_parameters``, or from the older ``rope_theta`` and ``rope_scaling``."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(d.get(key) or {}, Mapping):
            raise Refusal(f"{where} has {key} = {d[key]!r}", "it is a JSON object", "correct config.json")
    given = d.get("rope_parameters") or {**(d.get("rope_scaling") or {}), "rope_theta": d.get("rope_theta")}
    found = {key: value for key, value in given.items() if key not in ("type", "rope_type") and value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise Refusal(
            f"{where} has rope_type = {kind!r}", f"it is one of {', '.join(ROPE_TYPES)}", "choose another one"
        )
    for key in ("rope_theta", *ROPE_TYPES[kind]):
        if key not in found:
            raise Refusal(f"{where} has no {key}", f"rotary angles of type {kind} need it", "add it to config.json")
        _number(found, key, where, 0.0)
    for key, value in found.items():
        if not isinstance(value, int | float):
            raise Refusal(f"{where} has {key} = {value!r}", "rotary parameters are numbers", "correct config.json")
    return tuple(sorted({**found, "rope_type": kind}.items()))


def _mask(method: Mapping[str, Any], where: str) -> int | None:
    """``mask_token_id``, or None for a learned embedding; exactly one of the two is recorded."""
    learned = method.get("mask_embedding")
    if ("mask_token_id" in method) == (learned is not None):
        raise Refusal(
            f"{where} has {'both' if learned is not None else 'neither'} mask_token_id and mask_embedding",
            f"masked slots are one token, or an embedding of the checkpoint (mask_embedding = {LEARNED_MASK!r})",
            "correct config.json",
        )
    if learned is None:
        return integer(method, "mask_token_id", where, minimum=0)
    if learned != LEARNED_MASK:
        raise Refusal(f"{where} has mask_embedding = {learned!r}", f"it is {LEARNED_MASK!r}", "correct config.json")
    return None


def _switch(method: Mapping[str, Any], key: str, where: str, absent: bool) -> bool:
    value = method.get(key, absent)
    if not isinstance(value, bool):
        raise Refusal(f"{where} has {key} = {value!r}", "it is true or false", "correct config.json")
    return value


def _optional_text(method: Mapping[str, Any], key: str, where: str) -> str | None:
    value = method.get(key)
    if value is not None and not isinstance(value, str):
        raise Refusal(f"{where} has {key} = {value!r}", "it is a text", "correct config.json")
    return value
