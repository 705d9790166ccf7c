"""Every private name of SGLang this package leans on, with the signature it expects.

:func:`check` reads the installed source without importing it (so it costs the same in every process and on every
machine) and reports each name that is gone or has changed. It runs when the plugin loads and in ``sglang-ext doctor``.
To lean on a further symbol, add a line to :data:`SYMBOLS`.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from sglang_ext.core.refusal import Refusal

SUPPORTED_VERSIONS = ("0.5.23",)
"""SGLang releases every symbol below was read in."""


@dataclass(frozen=True)
class Symbol:
    """A name in the host and what we assume about it.

    Attributes:
        path: ``"module:name"`` or ``"module:Class.name"``, relative to ``sglang.``, where the name is defined.
        parameters: names our call sites or overrides use, in any order, ``self`` left out; None if it is not called.
        why: what breaks without it.
    """

    path: str
    parameters: tuple[str, ...] | None
    why: str


@dataclass(frozen=True)
class Problem:
    """A symbol that does not match, and in which way."""

    symbol: Symbol
    found: str

    def __str__(self) -> str:
        return f"sglang.{self.symbol.path} {self.found} (needed for {self.symbol.why})"


SYMBOLS: tuple[Symbol, ...] = (
    Symbol("srt.speculative.spec_info:SpeculativeAlgorithm.register",
           ("name", "supports_overlap", "validate_server_args", "spec_class"), "registering algorithms"),
    Symbol("srt.speculative.spec_registry:get_spec", ("name",), "registering algorithms once"),
    Symbol("srt.speculative.spec_registry:CustomSpecAlgo.__init__",
           ("name", "factory", "supports_overlap", "validate_server_args"), "registering algorithms"),
    Symbol("srt.plugins.hook_registry:HookRegistry.register", ("target", "hook", "hook_type"), "CPU hooks"),
    Symbol("srt.plugins.hook_registry:HookRegistry.apply_hooks", (), "CPU hooks"),
    Symbol("srt.plugins.hook_registry:HookType.REPLACE", None, "CPU hooks"),
    Symbol("srt.arg_groups.speculative_hook:_resolve_speculative_algorithm_alias",
           ("speculative_algorithm", "speculative_draft_model_path"), "naming the flag of a bad drafter"),
    Symbol("srt.managers.tokenizer_manager:TokenizerManager._validate_one_request", ("obj", "input_ids"),
           "answering bad overrides with 400"),
    Symbol("srt.managers.tokenizer_manager:TokenizerManager._calculate_spec_decoding_metrics",
           ("meta_info", "recv_obj", "i"), "counting verified drafts"),
    Symbol("srt.batch_invariant_ops.batch_invariant_ops:enable_batch_invariant_mode", ("enable_bmm",),
           "deterministic inference on a CPU"),
    Symbol("srt.layers.sampler:multinomial_with_seed", ("logprobs", "seed", "positions"),
           "deterministic inference on a CPU"),
    Symbol("utils:find_printable_text", ("text",), "streaming several tokens per step"),
    Symbol("srt.speculative.base_spec_worker:BaseSpecWorker.alloc_memory_pool",
           ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"), "the worker"),
    Symbol("srt.speculative.spec_registry:CustomSpecAlgo.handle_server_args", ("server_args",), "start-up defaults"),
    Symbol("srt.managers.overlap_utils:FutureMap.__init__", None, "overlapped scheduling"),
    Symbol("srt.managers.utils:GenerationBatchResult",
           ("logits_output", "next_token_ids", "accept_lens", "cap_lens", "can_run_cuda_graph", "next_draft_input",
            "speculative_num_draft_tokens", "speculative_output_stride", "new_seq_lens"), "returning a step"),
    Symbol("srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
           ("batch", "forward_batch", "is_verify", "skip_attn_backend_init"), "the target pass"),
    Symbol("srt.speculative.dflash_info:DFlashVerifyInput",
           ("draft_token", "positions", "draft_token_num", "capture_hidden_mode"), "the verify input"),
    Symbol("srt.speculative.dflash_info:DFlashVerifyInput.prepare_for_verify",
           ("batch", "target_worker", "defer_metadata_init"),
           "the verify input"),
    Symbol("srt.speculative.dflash_info_v2:DFlashDraftInputV2",
           ("topk_p", "topk_index", "bonus_tokens", "new_seq_lens", "hidden_states"), "state between steps"),
    Symbol("srt.speculative.spec_utils:GrammarTree.from_linear_chain", ("verify_ids_2d",), "grammars"),
    Symbol("srt.speculative.spec_utils:build_grammar_vocab_mask",
           ("reqs", "tree", "sampling_info", "device", "barrier"), "grammars"),
    Symbol("srt.layers.logprob_processor:compute_spec_logprobs",
           ("batch", "logits_output", "predict", "chain_stride"), "logprobs"),
    Symbol("srt.layers.sampler:apply_custom_logit_processor", ("logits", "sampling_batch_info"), "logit processors"),
    Symbol("srt.layers.sampler:sampling_from_probs_torch", ("probs", "sampling_seed", "positions"), "seeded sampling"),
    Symbol("srt.layers.sampler:top_k_top_p_min_p_sampling_from_probs_torch",
           ("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions", "max_top_k"),
           "seeded sampling"),
    Symbol("srt.sampling.sampling_batch_info:SamplingBatchInfo._apply_pre_grammar_logits_transforms", ("logits",),
           "penalties"),
    Symbol("srt.sampling.sampling_batch_info:SamplingBatchInfo",
           ("temperatures", "top_ps", "top_ks", "min_ps", "is_all_greedy", "is_any_greedy", "need_top_p_sampling",
            "need_top_k_sampling", "need_min_p_sampling", "logit_bias", "sampling_seed", "max_top_k",
            "acc_additive_penalties", "acc_scaling_penalties", "penalizer_orchestrator", "has_custom_logit_processor"),
           "sampling"),
    Symbol("srt.managers.auxiliary_output:DeviceAuxiliaryOutput.copy_to_host", ("copy_tensor",), "step records"),
    Symbol("srt.managers.auxiliary_output:HostAuxiliaryOutput.consume", ("batch", "commits"), "step records"),
    Symbol("srt.layers.layer_boundary.residual.batch:start", ("forward_batch",), "the walk over the target's layers"),
    Symbol("srt.layers.layer_boundary.residual.batch:stream_of", ("forward_batch",),
           "the walk over the target's layers"),
    Symbol("srt.layers.layer_boundary.residual.batch:final_norm", ("hidden_states", "forward_batch", "layernorm"),
           "the walk over the target's layers"),
    Symbol("srt.layers.layer_boundary.residual.stream:ResidualStream.from_handoff", ("hidden", "residual", "update"),
           "the walk over the target's layers"),
    Symbol("srt.layers.layer_boundary.residual.stream:ResidualStream.export", ("hidden",),
           "the walk over the target's layers"),
    Symbol("srt.layers.layer_boundary.residual.add_norm:PLAIN_ADD", None, "the walk over the target's layers"),
    Symbol("srt.model_executor.forward_context:ForwardContext", ("attn_backend",), "the drafter's own pass"),
    Symbol("srt.models.llama:LlamaModel.forward", ("input_ids", "positions", "forward_batch"), "taps of Llama"),
    Symbol("srt.models.qwen3:Qwen3Model.forward", ("input_ids", "positions", "forward_batch"), "taps of Qwen3"),
    Symbol("srt.models.gpt_oss:GptOssModel.forward", ("input_ids", "positions", "forward_batch"), "taps of GPT-OSS"),
    Symbol("srt.layers.aux_hidden_states:AuxHiddenStateList.capture", ("hidden",), "taps of the target"),
    Symbol("srt.model_executor.pool_configurator:create_memory_pool_configurator", ("kvc",),
           "counting a drafter's keys and values in the memory budget"),
    Symbol("srt.model_executor.pool_configurator:MemoryPoolConfig.max_total_num_tokens", None,
           "sizing a drafter's pool"),
    Symbol("srt.models.llama:LlamaDecoderLayer.forward", ("positions", "hidden_states", "forward_batch"), "Llama"),
    Symbol("srt.models.qwen3:Qwen3DecoderLayer.forward", ("positions", "hidden_states", "forward_batch"), "Qwen3"),
    Symbol("srt.managers.scheduler_components.internal_state:SchedulerInternalStateController._add_speculative",
           ("state",), "the plan in /server_info"),
    Symbol("srt.managers.schedule_batch:ScheduleBatch.chunked_req", None, "drafting once a prompt is read"),
    Symbol("srt.model_executor.runner.base_cuda_graph_runner:freeze_gc", ("enable_cudagraph_gc",), "captured passes"),
    Symbol("srt.distributed.parallel_state:graph_capture", ("stream",), "captured passes"),
    Symbol("srt.model_executor.runner_utils.pool:get_or_create_global_graph_capture_stream", (), "captured passes"),
    Symbol("srt.model_executor.forward_batch_info:ForwardBatch.next_token_logits_buffer", None, "captured passes"),
    Symbol("srt.distributed.parallel_state:get_tp_group", (), "--tp-size"),
    Symbol("srt.distributed.parallel_state:GroupCoordinator.all_reduce", ("input_",), "--tp-size"),
    Symbol("srt.distributed.parallel_state:GroupCoordinator.all_gather", ("input_", "dim"), "--tp-size"),
    Symbol("srt.distributed.parallel_state:GroupCoordinator.broadcast", ("input_", "src"), "--tp-size"),
    Symbol("srt.distributed.parallel_state:GroupCoordinator.first_rank", None, "--tp-size"),
    Symbol("srt.layers.vocab_parallel_embedding:VocabParallelEmbedding.forward", ("input_",), "--tp-size"),
    Symbol("srt.utils.numa_utils:init_threads_binding", ("numa_index", "world_size"), "--tp-size on a CPU"),
    Symbol("srt.configs.update_config:adjust_config_with_unaligned_cpu_tp",
           ("model_config", "load_config", "tp_size"), "--tp-size on a CPU"),
    Symbol("srt.utils.common:get_cpu_ids_by_node", (), "--tp-size on a CPU"),
    Symbol("srt.plugins:_plugins_loaded", None, "CPU hooks"),
    Symbol("srt.platforms.cpu:CpuDeviceMixin", None, "the CPU platform"),
    Symbol("srt.platforms.interface:SRTPlatform.apply_server_args_defaults", ("server_args",), "the CPU platform"),
    Symbol("srt.platforms.interface:SRTPlatform.get_kv_pool_cls", ("kind",), "the CPU KV pool"),
    Symbol("srt.platforms.interface:SRTPlatform.get_speculative_cache_locs_fn", (), "CPU verification"),
    Symbol("srt.platforms.interface:SRTPlatform.init_backend", (), "the CPU attention backend"),
    Symbol("srt.platforms.interface:SRTPlatform.post_load_model", ("model",), "checking the CPU hooks"),
    Symbol("srt.platforms.device_mixin:PlatformEnum.OOT", None, "the CPU platform"),
    Symbol("srt.arg_groups.choices:add_draft_attention_backend_choices", None, "draft models on a CPU"),
    Symbol("srt.layers.attention.attention_registry:ATTENTION_BACKENDS", None, "the CPU attention backend"),
    Symbol("srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.__init__", ("model_runner",),
           "the CPU attention backend"),
    Symbol("srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_extend",
           ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"), "the CPU attention backend"),
    Symbol("srt.layers.radix_attention:AttentionType.ENCODER_ONLY", None, "the CPU attention backend"),
    Symbol("srt.mem_cache.memory_pool:KVWriteLoc", ("loc", "swa_loc"), "the CPU attention backend"),
    Symbol("srt.mem_cache.memory_pool:KVWriteLoc.for_layer", ("forward_batch", "layer"), "verification on a GPU"),
    Symbol("srt.layers.attention.flashinfer_backend:FlashInferAttnBackend.init_forward_metadata", ("forward_batch",),
           "verification on a GPU"),
    Symbol("srt.layers.attention.flashinfer_backend:FlashInferAttnBackend.forward_extend",
           ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"), "verification on a GPU"),
    Symbol("srt.layers.attention.flashinfer_backend:FlashInferAttnBackend._kv_write_scales", ("layer",),
           "verification on a GPU"),
    Symbol("srt.layers.attention.flashinfer_backend:FlashInferIndicesUpdaterPrefill.__init__",
           ("model_runner", "attn_backend"), "verification on a GPU"),
    Symbol("srt.arg_groups.model_override_base:attention_backends_of", ("cfg",), "start-up on a GPU"),
    Symbol("srt.model_executor.cuda_graph_config:with_phase", ("config", "phase"), "start-up on a GPU"),
    Symbol("srt.model_executor.cuda_graph_config:Backend.DISABLED", None, "start-up on a GPU"),
    Symbol("srt.model_executor.cuda_graph_config:Phase.ALL", None, "start-up on a GPU"),
    Symbol("srt.speculative.base_spec_worker:BaseSpecWorker.init_cuda_graphs", (), "captured passes"),
    Symbol("srt.model_executor.forward_batch_info:ForwardBatch",
           ("forward_mode", "batch_size", "input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu",
            "orig_seq_lens", "out_cache_loc", "seq_lens_sum", "positions", "spec_algorithm", "spec_info",
            "capture_hidden_mode", "return_logprob"), "captured passes"),
    Symbol("srt.model_executor.forward_context:forward_context", ("ctx", "forward_batch"), "captured passes"),
    Symbol("srt.mem_cache.kv_index_translator:KVIndexTranslator.bind_runner_slots", ("forward_batch",),
           "captured passes"),
    Symbol("srt.runtime_context:get_parallel", (), "captured passes"),
    Symbol("srt.managers.schedule_batch:ScheduleBatch.req_pool_indices_cpu", None, "steps decided on the device"),
    Symbol("srt.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer",
           ("layer", "loc_info", "cache_k", "cache_v"), "the CPU attention backend"),
    Symbol("srt.mem_cache.memory_pool:MHATokenToKVPool.get_key_buffer", ("layer_id",), "the CPU attention backend"),
    Symbol("srt.mem_cache.memory_pool:MHATokenToKVPool._init_kv_copy_and_warmup", (), "the CPU KV pool"),
    Symbol("srt.mem_cache.allocation_sizing:get_req_to_token_extra_context_len", (), "the length of slot rows"),
    Symbol("srt.mem_cache.allocation_sizing:get_alloc_reserve_per_decode", (), "the length of slot rows"),
    Symbol("srt.mem_cache.allocation:assign_req_to_token_pool_func",
           ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
           "allocating KV slots for drafts on a CPU"),
    Symbol("kernels.ops.speculative.cache_locs:assign_extend_cache_locs_func",
           ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "batch_size", "draft_token_num",
            "device"), "reading KV slots for drafts"),
)  # fmt: skip


def check(symbols: Iterable[Symbol] = SYMBOLS) -> list[Problem]:
    """Return every symbol the installed host does not provide as expected; empty means all is well."""
    problems = []
    for symbol in symbols:
        found = _mismatch(symbol)
        if found:
            problems.append(Problem(symbol, found))
    return problems


def require(symbols: Sequence[Symbol] = SYMBOLS) -> None:
    """Refuse a host that does not match.

    Raises:
        Refusal: naming the first mismatch, the version seen and the versions supported.
    """
    problems = check(symbols)
    if not problems:
        return
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    raise Refusal(
        f"SGLang {host_version()} does not match: {problems[0]}{more}",
        f"supported versions are {', '.join(SUPPORTED_VERSIONS)}",
        f"pip install sglang=={SUPPORTED_VERSIONS[-1]} (`sglang-ext doctor` lists every mismatch)",
    )


def host_version() -> str:
    """Version of the installed SGLang distribution."""
    return version("sglang")


def _mismatch(symbol: Symbol) -> str:
    module, _, name = symbol.path.partition(":")
    path = _source(module)
    if path is None:
        return "is gone: no such module"
    node: ast.AST = _tree(path)
    for part in name.split("."):
        found = _member(node, part)
        if found is None:
            return "is gone"
        node = found
    if symbol.parameters is None:
        return ""
    has = _parameters(node)
    missing = [parameter for parameter in symbol.parameters if parameter not in has]
    return f"takes ({', '.join(has)}), not {', '.join(missing)}" if missing else ""


def _source(module: str) -> Path | None:
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(spec.submodule_search_locations[0], *module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            return path
    return None


@functools.lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _member(node: ast.AST, name: str) -> ast.AST | None:
    if not isinstance(node, (ast.Module, ast.ClassDef)):
        return None
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == name:
            return child
        if isinstance(child, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in child.targets):
            return child
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and child.target.id == name:
            return child
    return None


def _parameters(node: ast.AST) -> list[str]:
    """Parameter names of a function, or of the constructor of a class (dataclass fields included)."""
    if isinstance(node, ast.ClassDef):
        constructor = _member(node, "__init__")
        if constructor is not None:
            return _parameters(constructor)
        return [c.target.id for c in node.body if isinstance(c, ast.AnnAssign) and isinstance(c.target, ast.Name)]
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [argument.arg for argument in every if argument.arg not in ("self", "cls")]
