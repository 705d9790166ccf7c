"""Turning a GGUF file into the folder SGLang serves: safetensors, config, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor

from sglang_ext.core.refusal import Refusal
from sglang_ext.models.families import target_shape
from sglang_ext.models.files import json_bytes, read_json_object

_NOT_A_TARGETS = ("quantization_config", "_name_or_path", "_model_name_or_path")
_LOCAL_TO_THIS_RUN = ("is_local", "local_files_only", "gguf_file", "name_or_path")
#: GGUF names a pre-tokenizer and transformers falls back to plain byte level for this one: digits are split one by one
#: before the byte-level split, which matters where several spaces come before a number.
_DIGIT_SPLITTERS = ("smollm",)


def gguf_to_folder(gguf: Path, out: Path, eos_token: str) -> None:
    """Write the model in ``gguf`` to ``out`` in bfloat16, dequantised, and check that the tokenizer can chat.

    Raises:
        Refusal: if the file's family is unsupported or its tokenizer lacks a chat template or ``eos_token``.
    """
    config = _write_weights(gguf, out)
    target_shape(config, gguf.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not tokenizer.chat_template or tokenizer.eos_token != eos_token:
        raise Refusal(
            f"{gguf.name} ends a turn with {tokenizer.eos_token!r}",
            f"a chat template and {eos_token!r} were expected",
            "use the pinned package version",
        )
    tokenizer.save_pretrained(str(out))
    _correct_tokenizer(gguf, out, context_length=config["max_position_embeddings"])
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (out / "generation_config.json").write_bytes(json_bytes(special))
    _check_chat(out, eos_token, config["eos_token_id"])


def _write_weights(gguf: Path, out: Path) -> dict[str, Any]:
    """Dequantise, write ``model.safetensors`` and ``config.json``; return the latter."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in _NOT_A_TARGETS}
    config["architectures"] = [type(model).__name__]
    tensors = dict(model.state_dict())
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    packed = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if packed:
        raise Refusal(
            f"{packed[0]} of {gguf.name} stayed quantised",
            "all weights must be dense",
            "install the pinned transformers",
        )
    config["dtype"] = "bfloat16"
    dense: dict[str, Tensor] = {name: tensors[name].to(torch.bfloat16).contiguous() for name in sorted(tensors)}
    # Serialised here rather than by save_file: a full disk is then an ordinary OSError.
    (out / "model.safetensors").write_bytes(safetensors.torch.save(dense, metadata={"format": "pt"}))
    (out / "config.json").write_bytes(json_bytes(config))
    return config


def _correct_tokenizer(gguf: Path, out: Path, context_length: int) -> None:
    path = out / "tokenizer_config.json"
    settings = {key: value for key, value in read_json_object(path).items() if key not in _LOCAL_TO_THIS_RUN}
    settings["model_max_length"] = context_length
    path.write_bytes(json_bytes(settings))
    if _pre_tokenizer_name(gguf) not in _DIGIT_SPLITTERS:
        return
    path = out / "tokenizer.json"
    content = read_json_object(path)
    byte_level = content["pre_tokenizer"]
    if byte_level["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _pre_tokenizer_name(gguf: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(str(gguf)).fields.get("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else None


def _check_chat(out: Path, eos_token: str, eos_token_id: int) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(out))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    if "Hello" not in prompt or tokenizer.convert_tokens_to_ids(eos_token) != eos_token_id:
        raise Refusal(
            f"the chat template gives {prompt!r} and {eos_token!r} is token "
            f"{tokenizer.convert_tokens_to_ids(eos_token)}",
            f"the user's text and id {eos_token_id} were expected",
            "use the pinned package version",
        )
