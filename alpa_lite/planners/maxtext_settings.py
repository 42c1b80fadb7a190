"""The settings of MaxText: degrees of its mesh axes between slices (`dcn_…`) and within them (`ici_…`), and rules.

What an axis stands for is said by the `logical_axis_rules`, which name the mesh axes that split each kind of dim. An
axis of several devices stands for the first of these that holds:

    pipeline    it is "stage"
    expert      it splits `exp` (the experts of weights) and the samples, `activation_batch`
    data        it splits the samples; ZeRO-3 if it splits weights too, `embed` or `mlp`
    context     it splits the positions, `activation_length`
    tensor      it splits hidden units, `activation_mlp`; with sequence parallelism if also `activation_norm_length`

Rules of a file replace those of MaxText's base.yml by name, as MaxText merges them. Its pipeline runs all forward
passes and then all backward passes, by differentiating a loop: GPipe.
Source: src/maxtext/configs/base.yml and types.py of github.com/AI-Hypercomputer/maxtext, August 2026.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from alpa_lite.planners.trainer_settings import Recompute, TrainerSettings
from alpa_lite.schedule import GPipe, OneFOneB
from cost_models import Cluster

AXES: Mapping[str, str] = {
    "data": "data",
    "stage": "pipeline",
    "fsdp": "fsdp",
    "fsdp_transpose": "fsdp_transpose",
    "context": "context",
    "context_usp_ulysses": "context_usp_ulysses",
    "tensor": "tensor",
    "tensor_sequence": "tensor_sequence",
    "expert": "expert",
}
"""The word of the options `ici_…_parallelism` and `dcn_…_parallelism` for each mesh axis that training uses."""

RULES: Mapping[str, tuple[str, ...]] = {
    "activation_batch": ("data", "fsdp", "fsdp_transpose", "expert"),
    "activation_length": ("context", "context_usp_ulysses"),
    "activation_norm_length": ("tensor_sequence", "context", "context_usp_ulysses"),
    "activation_mlp": ("tensor", "tensor_sequence"),
    "embed": ("fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "expert"),
    "mlp": ("fsdp_transpose", "tensor", "tensor_sequence"),
    "exp": ("expert",),
}
"""The rules of base.yml that say what an axis stands for."""

REMAT: Mapping[str, Recompute] = {
    "full": "full",
    # Everything but the results of products with weights.
    "minimal": "selective",
    # What attention makes is stored too: only elementwise operations are recomputed, which `Remat` does not tell from
    # none.
    "minimal_with_context": "none",
    "minimal_flash": "none",
    "none": "none",
}
"""The policies of recomputation that there are here, by `remat_policy`."""

_WHOLE_WEIGHTS = (
    "MaxText also splits weights without experts over the expert devices; this plan holds them whole there."
)
_UNSUPPORTED = ("diloco", "sequence", "context_autoregressive", "autoregressive")


def read_maxtext(text: str, cluster: Cluster | None) -> TrainerSettings:
    """Read the settings of MaxText: YAML, or words NAME=VALUE as on its command line.

    Raises `ValueError` or `TypeError` for what cannot be read, or has no plan here; the sentence says why.
    """
    values = _values(text)
    sizes, rules = _sizes(values, cluster), _rules(values)
    pipeline = sizes.pop("stage")
    roles = _Roles.of(sizes, rules)
    accumulated, number = int(values.get("gradient_accumulation_steps", 1)), 1
    if pipeline > 1:
        number = _pipeline_microbatches(values, pipeline)
    if accumulated > 1 and number > 1:
        raise ValueError(
            "gradient_accumulation_steps around a pipeline are two kinds of micro-batches, and plans have one"
        )
    number *= accumulated
    devices = pipeline * prod(sizes.values())
    # A float on purpose: MaxText rounds the product down, and fractions of a sample per device are usual.
    batch = int(float(values.get("per_device_batch_size", 12.0)) * devices) * accumulated
    ways = roles.shards * roles.replicas
    if cluster is not None and (batch < number * ways or batch % (number * ways)):
        raise ValueError(
            f"per_device_batch_size makes a batch of {batch} samples on {devices} devices, which {number} "
            f"micro-batches on {ways} data-parallel devices do not divide"
        )
    remat = str(values.get("remat_policy", "full"))
    if remat not in REMAT:
        raise ValueError(f"remat_policy {remat!r} is none of {', '.join(REMAT)}: others store what no policy here does")
    return TrainerSettings(
        pipeline=pipeline,
        tensor=roles.tensor,
        context=roles.context,
        expert=roles.expert,
        # Without ZeRO-3 all devices hold the same, and there are no groups of them.
        replicas=roles.replicas if roles.zero == 3 else 1,
        shards=roles.shards if roles.zero == 3 else None,
        zero=roles.zero or int(bool(values.get("shard_optimizer_over_data", False))),
        sequence_parallel=roles.sequence,
        remat=REMAT[remat],
        schedule=GPipe() if pipeline > 1 else OneFOneB(),
        samples=max(1, batch // (number * ways)),
        batch_size=batch if cluster is not None else None,
        num_microbatches=number,
        notes=roles.notes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roles:
    """The degrees of all axes but "stage", by what they stand for."""

    shards: int
    replicas: int
    context: int
    tensor: int
    expert: int
    zero: int
    sequence: bool
    notes: tuple[str, ...]

    @staticmethod
    def of(sizes: Mapping[str, int], rules: Mapping[str, tuple[str, ...]]) -> _Roles:
        wide = {axis: size for axis, size in sizes.items() if size > 1}
        of_weights = {*rules["embed"], *rules["mlp"]}
        role = {axis: _role(axis, rules, of_weights) for axis in wide}
        degree = {
            name: prod(size for axis, size in wide.items() if role[axis] == name)
            for name in ("fsdp", "data", "context", "tensor", "expert")
        }
        # State of a context axis is split as that of the data axes is.
        stored = [axis for axis in wide if role[axis] in ("fsdp", "context") and axis in of_weights]
        over_experts = [axis for axis in wide if role[axis] == "expert" and axis in of_weights]
        scattered = {axis in rules["activation_norm_length"] for axis in wide if role[axis] == "tensor"}
        if len(scattered) > 1:
            raise ValueError("some tensor axes split positions between products and others do not: use one of them")
        return _Roles(
            shards=degree["fsdp"] * degree["expert"],
            replicas=degree["data"],
            context=degree["context"],
            tensor=degree["tensor"],
            expert=degree["expert"],
            zero=3 if stored else 0,
            sequence=scattered == {True},
            notes=(_WHOLE_WEIGHTS,) if over_experts else (),
        )


def _role(axis: str, rules: Mapping[str, tuple[str, ...]], of_weights: set[str]) -> str:
    if axis in rules["activation_batch"]:
        if axis in rules["exp"]:
            return "expert"
        return "fsdp" if axis in of_weights else "data"
    if axis in rules["activation_length"]:
        return "context"
    if axis in rules["activation_mlp"]:
        return "tensor"
    raise ValueError(f"by its rules the axis {axis!r} splits neither samples, positions nor hidden units")


def _values(text: str) -> dict[str, Any]:
    import yaml

    try:
        found: object = yaml.safe_load(text)
        if not isinstance(found, dict):
            # As on MaxText's command line: a file of settings, and NAME=VALUE.
            words = [word.partition("=") for word in shlex.split(text)]
            if not any(equals for _, equals, _ in words):
                raise ValueError("it is neither YAML nor words NAME=VALUE, and there is no file of that name")
            found = {name: yaml.safe_load(value) for name, equals, value in words if equals}
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML ({getattr(error, 'problem', None) or error})") from error
    return cast("dict[str, Any]", found)


def _sizes(values: Mapping[str, Any], cluster: Cluster | None) -> dict[str, int]:
    """Return the number of devices along each mesh axis."""
    for kind in ("ici", "dcn"):
        for word in _UNSUPPORTED:
            if int(values.get(f"{kind}_{word}_parallelism", 1)) != 1:
                raise ValueError(f"{kind}_{word}_parallelism has no form in a plan: set it to 1")
    slices = int(values.get("num_slices", -1))
    if cluster is not None and slices < 1:
        slices = -(-cluster.num_hosts // cluster.hosts_per_domain)
    within = None if cluster is None else cluster.num_devices // slices
    between = _filled(values, "dcn", "data", None if cluster is None else slices, "slices")
    inside = _filled(values, "ici", "fsdp", within, "devices of a slice")
    return {axis: between[axis] * inside[axis] for axis in AXES}


def _filled(values: Mapping[str, Any], kind: str, filling: str, total: int | None, what: str) -> dict[str, int]:
    """Return degrees, the one of -1 replaced by what the others leave; `filling` is -1 unless it is given."""
    found = {
        axis: int(values.get(f"{kind}_{word}_parallelism", -1 if axis == filling else 1)) for axis, word in AXES.items()
    }
    left = [axis for axis, degree in found.items() if degree == -1]
    if len(left) > 1 or any(degree < 1 for degree in found.values() if degree != -1):
        raise ValueError(f"one of the {kind}_…_parallelism may be -1, and the others are at least 1")
    rest = prod(degree for degree in found.values() if degree != -1)
    if left:
        found[left[0]] = max(1, total // rest) if total is not None else 1
    if total is not None and prod(found.values()) != total:
        raise ValueError(
            f"the product of the {kind}_…_parallelism is {prod(found.values())}, but there are {total} {what}"
        )
    return found


def _rules(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    if values.get("custom_mesh_and_rule") and not values.get("logical_axis_rules"):
        raise ValueError(
            f"custom_mesh_and_rule {values['custom_mesh_and_rule']!r} names a file of MaxText: put its "
            "logical_axis_rules into the settings"
        )
    rules, seen = dict(RULES), set[str]()
    for name, axes in values.get("logical_axis_rules") or ():
        # Of several rules for a name the first counts; later ones are for dims that it does not divide.
        if name in rules and name not in seen:
            rules[name] = (axes,) if isinstance(axes, str) else tuple(axes or ())
        seen.add(name)
    return rules


def _pipeline_microbatches(values: Mapping[str, Any], pipeline: int) -> int:
    repeats = int(values.get("num_pipeline_repeats", -1))
    if repeats == -1 and "base_num_decoder_layers" in values:
        repeats = int(values["base_num_decoder_layers"]) // (
            pipeline * int(values.get("num_layers_per_pipeline_stage", 1))
        )
    if repeats != 1:
        raise ValueError(
            "plans have no pipeline that runs all micro-batches through its devices several times (circular): give "
            "num_pipeline_repeats=1, and num_layers_per_pipeline_stage accordingly"
        )
    if values.get("pipeline_delay_activation_forwarding"):
        raise ValueError(
            "plans do not delay what stages send by a turn: leave out pipeline_delay_activation_forwarding"
        )
    found = int(values.get("num_pipeline_microbatches", -1))
    return pipeline if found == -1 else found
