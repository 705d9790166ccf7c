"""Registration of the algorithms with the host, and every start-up refusal.

``register`` runs in each process of the server, before arguments are parsed; it must stay light. The order at start:
:func:`validate_server_args` refuses what cannot work, ``PluginAlgorithm.handle_server_args`` fills in what follows from
the drafter, and the worker is built after the target's weights are loaded.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ext.core.config import OPTIONS_FLAG
from sglang_ext.core.refusal import Refusal
from sglang_ext.models.flexdraft.checkpoint import load_config
from sglang_ext.models.tapped.checkpoint import load_config as load_tapped_config
from sglang_ext.serving import request_hooks, streamed_text
from sglang_ext.serving.gpu_plan import apply_gpu_defaults, check_gpu_args, plan_graphs
from sglang_ext.serving.plan import BLOCK_FLAG, SpecPlan, locate_drafter, resolve_plan
from sglang_ext.serving.tp_plan import check_tp_size

ALGORITHMS = ("FLEXDRAFT", "DFLARE", "SCRIPTED")
ALIAS_HOOK = "sglang.srt.arg_groups.speculative_hook._resolve_speculative_algorithm_alias"
DEFAULT_MAX_RUNNING_REQUESTS = 48


class PluginAlgorithm(CustomSpecAlgo):
    """One of our algorithms as the host sees it.

    The stock base class lacks three methods its callers use; they are added here. To the host no algorithm of ours has
    a drafter KV pool: FlexDraft reads the target's, and DFlare's own follows the target's slots without the host's help
    (:mod:`sglang_ext.serving.drafter_pool`, which also has it counted in the host's memory budget).
    """

    def supports_target_verify_for_draft(self) -> bool:
        """Target passes run as TARGET_VERIFY, so graphs are captured for that mode."""
        return True

    def has_draft_kv(self) -> bool:
        """No drafter KV pool that the host would have to manage."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """No hidden states travel between steps."""
        return False

    def need_topk(self) -> bool:
        """No top-k relay: drafts stay in the worker."""
        return False

    def get_platform_worker_cls(self) -> None:
        """No platform replaces our worker."""
        return

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """Build the host's relay of lengths and bonus tokens between overlapped steps.

        Steps are planned from lengths on the host, whatever the host's attention backend could do without: Triton's
        says that it needs none, and the relay would leave them out of the batch.
        """
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=needs_confidence_relay
        )

    def handle_server_args(self, server_args: Any) -> None:
        """Set the fields that follow from the drafter; refuse what the drafter cannot do."""
        from sglang.srt.arg_groups.model_override_base import attention_backends_of

        from sglang_ext.serving.device import CPU, ways_of

        plan = plan_from_args(self.name, server_args)
        check_tp_size(plan, server_args.model_path, server_args.tp_size)
        server_args.speculative_num_draft_tokens = plan.block_size
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = 1
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        _, backend = attention_backends_of(server_args)
        ways = ways_of(server_args.device, backend)
        if not ways.overlaps:
            server_args.disable_overlap_schedule = True
        if server_args.device != CPU:
            check_gpu_args(server_args)
            apply_gpu_defaults(server_args)
        if server_args.device != CPU or ways.recorder is not None:
            plan_graphs(server_args, captures=ways.recorder is not None)
        # Arguments are resolved in the process that serves HTTP; the other processes never import its front end.
        request_hooks.install(ALGORITHMS)


def plan_from_args(algorithm: str, server_args: Any) -> SpecPlan:
    """Resolve the :class:`SpecPlan` from the host's argument record (idempotent)."""
    return resolve_plan(
        algorithm,
        model_path=server_args.model_path,
        drafter_path=server_args.speculative_draft_model_path,
        block_size=server_args.speculative_num_draft_tokens,
        options=server_args.speculative_adaptive_config,
    )


def validate_server_args(server_args: Any) -> None:
    """Refuse combinations that this release cannot serve losslessly.

    Raises:
        Refusal: one readable line naming the flag.
    """
    for flag, on, fix in _unsupported(server_args):
        if on:
            raise Refusal(
                f"{flag} was given together with --speculative-algorithm {server_args.speculative_algorithm.lower()}",
                "this combination is not supported",
                fix,
            )


def _unsupported(args: Any) -> list[tuple[str, bool, str]]:
    drop = "leave the flag out"
    return [
        ("--pp-size", args.pp_size != 1, "use --pp-size 1"),
        *_other_splits(args),
        ("--dp-size", args.dp_size != 1, "run one server per replica behind a router"),
        ("--tokenizer-worker-num", args.tokenizer_worker_num != 1, "use --tokenizer-worker-num 1"),
        ("--enable-dp-attention", bool(args.enable_dp_attention), drop),
        ("--disaggregation-mode", args.disaggregation_mode != "null", drop),
        ("--enable-two-batch-overlap", bool(args.enable_two_batch_overlap), drop),
        ("--enable-lora", bool(args.enable_lora) or bool(args.lora_paths), "merge the adapter into the target"),
        ("--enable-hierarchical-cache", bool(args.enable_hierarchical_cache), drop),
        ("--enable-pdmux", bool(args.enable_pdmux), drop),
        *(_without_own_pool(args) if args.speculative_algorithm == "DFLARE" else []),
        ("--enable-mixed-chunk", bool(args.enable_mixed_chunk), drop),
        ("--enable-return-hidden-states", bool(args.enable_return_hidden_states), drop),
        ("--enable-watermark", bool(args.enable_watermark), drop),
        ("--quantization", args.quantization is not None, "use an unquantised target"),
        ("--speculative-adaptive", bool(args.speculative_adaptive), f"{OPTIONS_FLAG} alone carries our options"),
        ("--speculative-num-steps", args.speculative_num_steps not in (None, 1),
         "use --speculative-num-draft-tokens"),
        ("--speculative-eagle-topk", args.speculative_eagle_topk not in (None, 1), drop),
        ("--speculative-use-rejection-sampling", bool(args.speculative_use_rejection_sampling),
         "leave the flag out: sampled requests accept by rejection sampling anyway"),
        ("--speculative-accept-threshold-single", args.speculative_accept_threshold_single != 1.0,
         "leave the flag out: thresholds below 1 change the output"),
        ("--speculative-accept-threshold-acc", args.speculative_accept_threshold_acc != 1.0,
         "leave the flag out: thresholds below 1 change the output"),
        ("--speculative-token-map", args.speculative_token_map is not None, drop),
        ("--speculative-draft-window-size", args.speculative_draft_window_size is not None, drop),
        ("--speculative-dflash-block-size", args.speculative_dflash_block_size is not None, f"use {BLOCK_FLAG}"),
    ]  # fmt: skip


def _other_splits(args: Any) -> list[tuple[str, bool, str]]:
    """Ways of sharing rows or keys among the ranks of ``--tp-size`` that mask rows and drafters know nothing of."""
    given = {
        "--dcp-size": args.dcp_size != 1,
        "--attn-cp-size": args.attn_cp_size != 1,
        "--enable-layernorm-sp": args.enable_layernorm_sp,
        "--enable-attn-tp-input-scattered": args.enable_attn_tp_input_scattered,
    }
    return [(flag, bool(on), "leave the flag out") for flag, on in given.items()]


def _without_own_pool(args: Any) -> list[tuple[str, bool, str]]:
    """What moves tokens' slots, or fills them without a pass of the target, leaving a drafter's own pool behind.

    Compiled passes are among them: they may run without the hook that hands out the taps.
    """
    given = {
        "--enable-unified-memory": args.enable_unified_memory,
        "--enable-hisparse": args.enable_hisparse,
        "--enable-lmcache": args.enable_lmcache,
        "--enable-flexkv": args.enable_flexkv,
        "--enable-unified-cache-external-linker": args.enable_unified_cache_external_linker,
        "--enable-torch-compile": args.enable_torch_compile,
    }
    return [(flag, bool(on), "leave the flag out") for flag, on in given.items()]


def _flexdraft_worker(server_args: Any) -> type:
    from sglang_ext.serving.worker import SpecWorker

    return SpecWorker


def check_drafter(
    speculative_algorithm: str | None, speculative_draft_model_path: str | None, *_: Any, **__: Any
) -> None:
    """Look at the drafter before the host does, whose reader would fail in words that name no flag (hook)."""
    if speculative_algorithm in ALGORITHMS and speculative_draft_model_path is not None:
        read = load_tapped_config if speculative_algorithm == "DFLARE" else load_config
        read(locate_drafter(speculative_draft_model_path))


def register() -> None:
    """Register our algorithms once per process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    missing = [name for name in ALGORITHMS if get_spec(name) is None]
    for name in missing:
        SpeculativeAlgorithm.register(
            name, supports_overlap=True, validate_server_args=validate_server_args, spec_class=PluginAlgorithm
        )(_flexdraft_worker)
    if missing:
        HookRegistry.register(ALIAS_HOOK, check_drafter, HookType.BEFORE)
        HookRegistry.register(streamed_text.HOOK, streamed_text.printable_text, HookType.REPLACE)
