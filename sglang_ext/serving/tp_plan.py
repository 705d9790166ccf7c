"""What ``--tp-size`` asks of a target and a drafter, refused before any weights are read."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.models.families import integer
from sglang_ext.models.files import read_json_object
from sglang_ext.models.flexdraft import checkpoint
from sglang_ext.models.tapped import checkpoint as tapped
from sglang_ext.serving.drafters.sharding import check_split
from sglang_ext.serving.plan import SpecPlan


def check_tp_size(plan: SpecPlan, model_path: str, tp_size: int) -> None:
    """Refuse a number of ranks that the target or the drafter of ``plan`` cannot be split over; reads only JSON.

    Raises:
        Refusal: one readable line naming ``--tp-size``.
    """
    if tp_size == 1:
        return
    target_config = Path(model_path) / "config.json"
    if target_config.is_file():  # a hub target is split by the host, which refuses in its own words
        raw, where = read_json_object(target_config), str(target_config)
        heads = integer(raw, "num_attention_heads", where)
        shared = raw.get("num_key_value_heads") is not None
        kv_heads = integer(raw, "num_key_value_heads", where) if shared else heads
        check_split(tp_size, f"the target {model_path}", heads, kv_heads)
    if plan.drafter_path is None:
        return
    whose = f"the drafter {plan.drafter_path}"
    if plan.algorithm == "DFLARE":
        own, _ = tapped.load_config(plan.drafter_path)
        check_split(tp_size, whose, own.num_attention_heads, own.num_key_value_heads, own.intermediate_size)
    else:
        joined, _ = checkpoint.load_config(plan.drafter_path)
        check_split(tp_size, whose, joined.num_attention_heads, joined.num_key_value_heads)
