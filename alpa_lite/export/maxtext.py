"""A plan as settings of MaxText: degrees of its mesh axes, the rules of its logical axes, micro-batches, recomputation.

    replicas    data                            expert      expert
    data        fsdp under ZeRO-3, else data    context     context
    pipeline    stage                           tensor      tensor_sequence where sums are scattered, else tensor

An axis is cut into a degree between slices (`dcn_…`) and one within them (`ici_…`): of the axes in the order of the
devices, the first ones lie over the slices (`_cut_at_slices`). The rules are those of base.yml with the axes of the
plan: where MaxText would split more than the plan does, such as all weights over the expert devices, its rule is
replaced. `planners.maxtext_settings` reads what is written here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from alpa_lite.errors import PlanError
from alpa_lite.export.degrees import ParallelDegrees, degrees_of
from alpa_lite.export.trainers import require
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.maxtext_settings import AXES

_POLICIES = {"full": "full", "selective": "minimal", "none": "minimal_with_context"}
"""The `remat_policy` for each policy here, as `maxtext_settings.REMAT` reads it."""


def maxtext(plan: Plan) -> str:
    """Return a plan as settings of MaxText, in YAML, which its base.yml completes.

    Raises `PlanError` for optimizer state that is split over replicas or with whole sums of gradients (ZeRO-2), for
    schedules but GPipe, and for axes that lie across the slices of the cluster.
    """
    found, where = degrees_of(plan), "MaxText"
    require(plan, where, found.schedule in ("", "gpipe") and found.chunks == 1, f"schedule {found.schedule}")
    require(
        plan, where, found.zero in (0, 1, 3), "sums of gradients that are split where parameters are whole (ZeRO-2)"
    )
    require(
        plan, where, found.zero == 3 or found.replicas == 1, "optimizer state split within replicas of the parameters"
    )
    turns = found.num_microbatches % found.pipeline == 0
    require(
        plan, where, turns, f"{found.num_microbatches} micro-batches on {found.pipeline} stages: it takes multiples"
    )
    words = _axis_names(found)
    between, within = _cut_at_slices(plan, found)
    settings: dict[str, object] = {"base_config": "base.yml"}
    for kind, degrees in (("dcn", between), ("ici", within)):
        # All axes are written: one of base.yml is filled up with the devices that are left.
        sizes = dict.fromkeys(AXES, 1) | {
            axis: math.prod(size for role, size in degrees if words[role] == axis) for axis in words.values()
        }
        settings |= {f"{kind}_{word}_parallelism": sizes[axis] for axis, word in AXES.items()}
    settings["per_device_batch_size"] = _per_device(found)
    if found.pipeline > 1:
        settings |= {"num_pipeline_microbatches": found.num_microbatches, "num_pipeline_repeats": 1}
    else:
        settings["gradient_accumulation_steps"] = found.num_microbatches
    settings["remat_policy"] = _POLICIES[found.recompute]
    settings["shard_optimizer_over_data"] = found.zero == 1
    rules = [f"  [{json.dumps(name)}, {json.dumps(axes)}]," for name, axes in _rules(found, words).items()]
    lines = [f"{name}: {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join([*_not_said(plan, found), *lines, "logical_axis_rules: [", *rules, "]"]) + "\n"


def _axis_names(found: ParallelDegrees) -> dict[str, str]:
    """Return the mesh axis for each kind of degree."""
    return {
        "replicas": "data",
        "data": "fsdp" if found.zero == 3 else "data",
        "pipeline": "stage",
        "expert": "expert",
        "context": "context",
        "tensor": "tensor_sequence" if found.sequence_parallel else "tensor",
    }


def _cut_at_slices(plan: Plan, found: ParallelDegrees) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return the degrees between slices and those within one. Raises `PlanError` if an axis does not divide so."""
    cluster = plan.cluster
    used = math.prod(size for _, size in found.axes)
    left = max(1, used // (cluster.devices_per_host * cluster.hosts_per_domain))
    between, within = list[tuple[str, int]](), list[tuple[str, int]]()
    for role, size in found.axes:
        over = math.gcd(size, left)
        # An axis that goes on within a slice has covered all slices.
        if over not in (size, left):
            raise PlanError(
                f"{plan.name} cannot be exported: its {role} axis of {size} devices lies across {left} slices of "
                f"{cluster.name}, and MaxText cuts axes at slices. Choose degrees that divide these."
            )
        left //= over
        between += [(role, over)]
        within += [(role, size // over)]
    return between, within


def _per_device(found: ParallelDegrees) -> float:
    """Return the samples of a device in one pass, of which MaxText rounds the product with the devices down."""
    devices = math.prod(size for _, size in found.axes)
    accumulated = 1 if found.pipeline > 1 else found.num_microbatches
    samples = found.batch_size // accumulated
    per_device = samples / devices
    return per_device if int(per_device * devices) == samples else math.nextafter(per_device, math.inf)


def _rules(found: ParallelDegrees, words: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the mesh axes that split the dims of each name."""
    present = {role for role, _ in found.axes}

    def axes(*roles: str) -> list[str]:
        return list(dict.fromkeys(words[role] for role in roles if role in present))

    samples, positions, tensor = axes("replicas", "data", "expert"), axes("context"), axes("tensor")
    scattered = tensor if found.sequence_parallel else []
    stored = axes(*found.stored) if found.zero == 3 else []
    names: dict[str, list[str]] = {
        "activation_batch activation_batch_attn activation_batch_moe": samples,
        "activation_embed_and_logits_batch": [*samples, *axes("pipeline")],
        "activation_length activation_length_attn activation_length_moe activation_q_length": positions,
        "activation_norm_length activation_norm_length_moe activation_input_length_attn": [*scattered, *positions],
        "activation_heads activation_kv_heads activation_vocab activation_mlp activation_mlp_moe": tensor,
        # What flows between layers is whole along it, or scattered by positions.
        "activation_embed activation_embed_attn activation_embed_moe norm": [],
        "heads q_heads kv_heads vocab mlp mlp_moe": tensor,
        "embed embed_vocab embed_moe q_lora kv_lora": stored,
        "exp activation_exp": axes("expert"),
    }
    return {name: split for several, split in names.items() for name in several.split()}


def _not_said(plan: Plan, found: ParallelDegrees) -> list[str]:
    """Return comments on what the plan decides and MaxText decides for itself."""
    lines = [f"# {plan.function}: {found.words} on {plan.cluster.name}"]
    if found.recompute == "none":
        lines.append("# The plan recomputes nothing; MaxText always recomputes elementwise operations of a layer.")
    if found.pipeline > 1:
        lines.append(f"# num_layers_per_pipeline_stage: the number of decoder layers / {found.pipeline}")
    if plan.buckets:
        lines.append(f"# Gradients in {len(plan.buckets)} buckets: XLA combines collectives by its own flags.")
    return lines
