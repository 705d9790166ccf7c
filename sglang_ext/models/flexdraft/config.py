"""What a FlexDraft drafter is: the typed form of its config.json (FlexDraft sections 3.2 and 3.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_ext.core.refusal import Refusal, refuse_unknown
from sglang_ext.models.families import TargetShape, integer, target_shape

CONFIG_KEY = "flexdraft_config"
#: The first published drafters use this name for the same object.
RELEASED_CONFIG_KEY = "dflash_config"
CALIBRATOR_FORMS = ("vocabulary", "hidden")

_METHOD_KEYS = (
    "target_layer_ids",
    "enable_anchor_bias_logits",
    "anchor_bias_rank",
    "anchor_bias_form",
    "draft_vocab_size",
)
_ORIGIN_KEYS = ("target_name", "vocabulary_digest", "training", "acceptance")
#: Written by the published drafters' training code and unused by the method: every slot has one learned embedding.
_RELEASED_KEYS = ("mask_token_id",)
#: Fields of an HF config that would carry a machine's path or foreign code into an export.
_NEVER_EXPORTED = ("_name_or_path", "auto_map", CONFIG_KEY, RELEASED_CONFIG_KEY, "torch_dtype")


@dataclass(frozen=True)
class FlexDraftConfig:
    """Sizes and switches of one drafter.

    ``block_size`` is K, the bonus token's slot included; ``num_layers`` is D, the deep layers that carry mask rows;
    ``num_target_layers`` is L; ``calibrator`` says where the calibrator's output is added: ``"vocabulary"`` (to the LM
    head's logits), ``"hidden"`` (to the final-normed hidden state before the LM head) or ``"none"``.
    ``draft_vocab_size`` is how many tokens the drafter can propose (their ids are a tensor of the checkpoint); None
    means the whole vocabulary. A short list makes the draft's LM head cheap and changes acceptance, never the text.

    Raises:
        Refusal: on construction, if the numbers contradict each other.
    """

    METHOD: ClassVar[str] = "flexdraft"

    block_size: int
    num_layers: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    qk_norm: bool
    calibrator: str
    calibrator_rank: int
    target_architecture: str
    target_name: str | None = None
    vocabulary_digest: str | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def split(self) -> int:
        """The first target layer that carries mask rows (s in FlexDraft section 3.2)."""
        return self.target_layer_ids[0]

    @property
    def target_shape(self) -> TargetShape:
        """The numbers this drafter needs its target to have."""
        return TargetShape(
            architecture=self.target_architecture,
            hidden_size=self.hidden_size,
            num_layers=self.num_target_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            qk_norm=self.qk_norm,
        )

    @classmethod
    def for_target(
        cls,
        target_hf_config: Mapping[str, Any],
        *,
        num_layers: int,
        block_size: int,
        calibrator: str = "vocabulary",
        calibrator_rank: int = 0,
        target_name: str | None = None,
        vocabulary_digest: str | None = None,
    ) -> FlexDraftConfig:
        """Describe a new drafter over the last ``num_layers`` layers of a target (its parsed config.json).

        Raises:
            Refusal: if the target's family is unsupported or the numbers do not fit it.
        """
        shape = target_shape(target_hf_config, "the target's config")
        if not 1 <= num_layers <= shape.num_layers:
            raise Refusal(
                f"a drafter of {num_layers} layers was asked for",
                f"the target has {shape.num_layers}",
                "choose a number in between",
            )
        ids = tuple(range(shape.num_layers - num_layers, shape.num_layers))
        return _from_shape(
            shape,
            block_size=block_size,
            target_layer_ids=ids,
            calibrator=calibrator,
            calibrator_rank=calibrator_rank,
            target_name=target_name,
            vocabulary_digest=vocabulary_digest,
        )

    @classmethod
    def from_hf_dict(cls, d: Mapping[str, Any], where: str = "config.json") -> FlexDraftConfig:
        """Read a drafter's parsed config.json; ``where`` is how messages call it.

        Raises:
            Refusal: on a missing, unknown, mistyped or contradictory entry.
        """
        method = _method_dict(d, where)
        inside = f"{where} ({CONFIG_KEY})"
        depth = integer(d, "num_hidden_layers", where)
        ids = _layer_ids(method, inside)
        if len(ids) != depth:
            raise Refusal(
                f"{where} has num_hidden_layers = {depth} and {len(ids)} target_layer_ids",
                "a drafter has one layer per target layer it joins",
                "correct config.json",
            )
        _check_layer_ids(ids, integer(d, "num_target_layers", where), inside)
        calibrator, rank = _calibrator(method, inside)
        return _from_shape(
            target_shape(d, where, layers_key="num_target_layers"),
            block_size=integer(d, "block_size", where, minimum=2),
            target_layer_ids=ids,
            calibrator=calibrator,
            calibrator_rank=rank,
            target_name=_optional_text(method, "target_name", inside),
            vocabulary_digest=_optional_text(method, "vocabulary_digest", inside),
            draft_vocab_size=integer(method, "draft_vocab_size", inside) if "draft_vocab_size" in method else None,
        )

    def to_hf_dict(self, target_hf_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of this drafter: the target's fields plus the drafter's own.

        ``target_hf_dict`` may also be a drafter's config.json (re-export); the result is then the same again.
        """
        result = {key: value for key, value in target_hf_dict.items() if key not in _NEVER_EXPORTED}
        layer_types = result.get("layer_types")
        if isinstance(layer_types, list) and len(layer_types) == self.num_target_layers:
            # HF checks that there is one entry per num_hidden_layers, which is D in a drafter's file.
            result["layer_types"] = [layer_types[i] for i in self.target_layer_ids]
        method: dict[str, Any] = {
            "target_layer_ids": list(self.target_layer_ids),
            "enable_anchor_bias_logits": self.calibrator != "none",
            "anchor_bias_rank": self.calibrator_rank,
        }
        if self.calibrator != "none":
            method["anchor_bias_form"] = self.calibrator
        if self.target_name is not None:
            method["target_name"] = self.target_name
        if self.vocabulary_digest is not None:
            method["vocabulary_digest"] = self.vocabulary_digest
        if self.draft_vocab_size is not None:
            method["draft_vocab_size"] = self.draft_vocab_size
        result.update(
            architectures=[self.target_architecture],
            block_size=self.block_size,
            num_hidden_layers=self.num_layers,
            num_target_layers=self.num_target_layers,
        )
        result[CONFIG_KEY] = method
        return result


def origin_fields(d: Mapping[str, Any], where: str = "config.json") -> tuple[dict[str, Any], list[Any]]:
    """Return the ``training`` object and the ``acceptance`` rows kept inside a drafter's config.json, empty if absent.

    Raises:
        Refusal: if either has the wrong JSON type.
    """
    method = _method_dict(d, where)
    training = method.get("training", {})
    acceptance = method.get("acceptance", [])
    if not isinstance(training, dict):
        raise Refusal(f"{where} has training = {training!r}", "it is a JSON object", "correct config.json")
    if not isinstance(acceptance, list):
        raise Refusal(f"{where} has acceptance = {acceptance!r}", "it is a list of rows", "correct config.json")
    return training, acceptance


def _from_shape(
    shape: TargetShape,
    *,
    block_size: int,
    target_layer_ids: tuple[int, ...],
    calibrator: str,
    calibrator_rank: int,
    target_name: str | None,
    vocabulary_digest: str | None,
    draft_vocab_size: int | None = None,
) -> FlexDraftConfig:
    return FlexDraftConfig(
        block_size=block_size,
        num_layers=len(target_layer_ids),
        num_target_layers=shape.num_layers,
        target_layer_ids=target_layer_ids,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        qk_norm=shape.qk_norm,
        calibrator=calibrator,
        calibrator_rank=calibrator_rank,
        target_architecture=shape.architecture,
        target_name=target_name,
        vocabulary_digest=vocabulary_digest,
        draft_vocab_size=draft_vocab_size,
    )


def _check_layer_ids(ids: tuple[int, ...], num_target_layers: int, where: str) -> None:
    expected = tuple(range(num_target_layers - len(ids), num_target_layers))
    if not ids or ids[0] < 0 or ids != expected:
        raise Refusal(
            f"{where} has target_layer_ids = {list(ids)}",
            f"they are contiguous and end at the target's last layer, {num_target_layers - 1}",
            "correct target_layer_ids or num_target_layers in config.json",
        )


def _check(config: FlexDraftConfig) -> None:
    where, ids = "FlexDraft config", config.target_layer_ids
    if config.block_size < 2:
        raise Refusal(f"{where} has block_size = {config.block_size}", "a block has at least 2 slots", "correct it")
    _check_layer_ids(ids, config.num_target_layers, where)
    if config.num_layers != len(ids):
        raise Refusal(
            f"{where} has {config.num_layers} layers and {len(ids)} target_layer_ids",
            "a drafter has one layer per target layer it joins",
            "correct one of the two",
        )
    forms = (*CALIBRATOR_FORMS, "none")
    if config.calibrator not in forms:
        raise Refusal(f"{where} has calibrator {config.calibrator!r}", f"it is one of {', '.join(forms)}", "correct it")
    if (config.calibrator == "none") != (config.calibrator_rank == 0) or config.calibrator_rank < 0:
        raise Refusal(
            f"{where} has calibrator {config.calibrator!r} with rank {config.calibrator_rank}",
            "a calibrator has a rank of at least 1, no calibrator has rank 0",
            "correct anchor_bias_rank or the calibrator",
        )
    if config.draft_vocab_size is not None and not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise Refusal(
            f"{where} has draft_vocab_size = {config.draft_vocab_size}",
            f"1 to {config.vocab_size}, the size of the vocabulary, is allowed",
            "correct it, or leave it out to draft from the whole vocabulary",
        )


def _method_dict(d: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The nested object under either of its names, checked for unknown keys."""
    present = [key for key in (CONFIG_KEY, RELEASED_CONFIG_KEY) if key in d]
    if not present:
        raise Refusal(
            f"{where} has no {CONFIG_KEY}",
            f"a FlexDraft drafter carries it (or {RELEASED_CONFIG_KEY}, as published)",
            "name a folder that holds a FlexDraft drafter",
        )
    merged: dict[str, Any] = {}
    for key in present:
        inner = d[key]
        if not isinstance(inner, dict):
            raise Refusal(f"{where} has {key} = {inner!r}", "it is a JSON object", "correct config.json")
        known = _METHOD_KEYS + _ORIGIN_KEYS + (_RELEASED_KEYS if key == RELEASED_CONFIG_KEY else ())
        refuse_unknown(f"{where} ({key})", inner, known)
        for name, value in inner.items():
            if merged.setdefault(name, value) != value:
                raise Refusal(
                    f"{where} has {name} = {merged[name]!r} in {CONFIG_KEY} and {value!r} in {RELEASED_CONFIG_KEY}",
                    "the two are names of one object",
                    f"remove {RELEASED_CONFIG_KEY}",
                )
    return merged


def _layer_ids(method: Mapping[str, Any], where: str) -> tuple[int, ...]:
    if "target_layer_ids" not in method:
        raise Refusal(f"{where} has no target_layer_ids", "it lists the deep target layers", "add it to config.json")
    ids = method["target_layer_ids"]
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise Refusal(f"{where} has target_layer_ids = {ids!r}", "it is a list of layer numbers", "correct config.json")
    return tuple(ids)


def _calibrator(method: Mapping[str, Any], where: str) -> tuple[str, int]:
    key = "enable_anchor_bias_logits"
    if key not in method:
        raise Refusal(f"{where} has no {key}", "it is true or false", "name a folder that holds a FlexDraft drafter")
    enabled = method[key]
    if not isinstance(enabled, bool):
        raise Refusal(f"{where} has {key} = {enabled!r}", "it is true or false", "correct config.json")
    form = method.get("anchor_bias_form", CALIBRATOR_FORMS[0])
    if form not in CALIBRATOR_FORMS:
        raise Refusal(
            f"{where} has anchor_bias_form = {form!r}", f"it is one of {', '.join(CALIBRATOR_FORMS)}", "correct it"
        )
    return (form, integer(method, "anchor_bias_rank", where)) if enabled else ("none", 0)


def _optional_text(method: Mapping[str, Any], key: str, where: str) -> str | None:
    value = method.get(key)
    if value is not None and not isinstance(value, str):
        raise Refusal(f"{where} has {key} = {value!r}", "it is a text", "correct config.json")
    return value
