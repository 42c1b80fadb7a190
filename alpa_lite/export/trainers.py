"""A plan as the options of trainers with fixed forms of parallelism: Megatron-LM, NeMo, torchtitan, DeepSpeed.

The options say degrees, micro-batches, recomputation and ZeRO. How the weights of a layer are split over
tensor-parallel devices, and where a pipeline is cut, is for the trainer and its model to say. Plans of other forms are
refused.
"""

from __future__ import annotations

import json

from alpa_lite.errors import PlanError
from alpa_lite.export.degrees import ParallelDegrees, degrees_of
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.trainer_settings import TORCHTITAN_SCHEDULES

_TORCHTITAN_NAMES = {schedule().name: name for name, schedule in TORCHTITAN_SCHEDULES.items()}
"""The name that torchtitan has for a schedule, by ours."""


def megatron(plan: Plan) -> str:
    """Return a plan as flags of Megatron-LM, one in each line.

    Raises `PlanError` for parameters that are split over data-parallel devices, and for schedules but 1F1B and its
    interleaved form.
    """
    found = _as_megatron(plan, "Megatron-LM")
    flags: dict[str, object] = {
        "tensor-model-parallel-size": found.tensor,
        "pipeline-model-parallel-size": found.pipeline,
        "context-parallel-size": found.context,
        "expert-model-parallel-size": found.expert,
        "micro-batch-size": found.microbatch_samples,
        "global-batch-size": found.batch_size,
    }
    if found.chunks > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = found.chunks
    if found.sequence_parallel:
        flags["sequence-parallel"] = ""
    if found.zero:
        flags["use-distributed-optimizer"] = ""
    if found.recompute != "none":
        flags["recompute-granularity"] = found.recompute
    if found.recompute == "full":
        flags |= {"recompute-method": "uniform", "recompute-num-layers": 1}
    return "".join(f"--{name} {value}".rstrip() + "\n" for name, value in flags.items())


def nemo(plan: Plan) -> str:
    """Return a plan as overrides of a NeMo 2.0 recipe, `NAME=VALUE`, one in each line.

    The degrees are arguments of `nemo.lightning.MegatronStrategy`, recomputation is that of Megatron Core's
    `TransformerConfig`. Raises `PlanError` as `megatron` does, whose runtime NeMo has.
    """
    found = _as_megatron(plan, "NeMo")
    strategy: dict[str, object] = {
        "tensor_model_parallel_size": found.tensor,
        "pipeline_model_parallel_size": found.pipeline,
        "context_parallel_size": found.context,
        "expert_model_parallel_size": found.expert,
        "sequence_parallel": found.sequence_parallel,
    }
    if found.chunks > 1:
        strategy["virtual_pipeline_model_parallel_size"] = found.chunks
    values = {f"trainer.strategy.{name}": value for name, value in strategy.items()}
    values |= {"data.micro_batch_size": found.microbatch_samples, "data.global_batch_size": found.batch_size}
    # The strategy takes this over for its own buffers of gradients.
    values["optim.config.use_distributed_optimizer"] = found.zero > 0
    if found.recompute != "none":
        values["model.config.recompute_granularity"] = found.recompute
    if found.recompute == "full":
        values |= {"model.config.recompute_method": "uniform", "model.config.recompute_num_layers": 1}
    return "".join(f"{name}={value}\n" for name, value in values.items())


def _as_megatron(plan: Plan, where: str) -> ParallelDegrees:
    """Return the degrees of a plan that the runtime of Megatron has. Raises `PlanError` for others."""
    found = degrees_of(plan)
    require(plan, where, found.schedule in ("", "1f1b", "interleaved-1f1b"), f"schedule {found.schedule}")
    require(plan, where, found.zero < 3, "parameters split over data-parallel devices (ZeRO-3)")
    require(plan, where, found.replicas == 1, "replicas of what is split over data-parallel devices")
    return found


def torchtitan(plan: Plan) -> str:
    """Return a plan as sections of a torchtitan configuration, in TOML.

    Raises `PlanError` for optimizer state that is split where parameters are whole, and for schedules that torchtitan
    has not.
    """
    found = degrees_of(plan)
    require(plan, "torchtitan", found.zero in (0, 3), f"ZeRO-{found.zero}: it splits state with the parameters or not")
    require(plan, "torchtitan", found.schedule in ("", *_TORCHTITAN_NAMES), f"schedule {found.schedule}")
    require(
        plan, "torchtitan", found.chunks <= 2, f"{found.chunks} stages of each group unless it is told where to cut"
    )
    shards = found.data * found.expert if found.zero == 3 else found.expert
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": found.ways // shards,
        "data_parallel_shard_degree": shards,
        "tensor_parallel_degree": found.tensor,
        "context_parallel_degree": found.context,
        "expert_parallel_degree": found.expert,
        "pipeline_parallel_degree": found.pipeline,
    }
    local = found.microbatch_samples
    if found.pipeline > 1:
        parallelism["pipeline_parallel_schedule"] = _TORCHTITAN_NAMES[found.schedule]
        parallelism["pipeline_parallel_microbatch_size"] = found.microbatch_samples
        # Without a pipeline micro-batches are steps of gradient accumulation; with one they are parts of a local batch.
        local *= found.num_microbatches
    sections: dict[str, dict[str, object]] = {
        "training": {"local_batch_size": local, "global_batch_size": found.batch_size},
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": found.recompute},
    }
    # Of these values the form in JSON is the one in TOML.
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )


def deepspeed(plan: Plan) -> str:
    """Return a plan as a configuration of DeepSpeed, in JSON. Recomputation is a matter of the model's code there.

    Raises `PlanError` for forms that its configuration has no key for: context and expert parallelism, replicas,
    interleaved stages, and schedules but 1F1B.
    """
    found = degrees_of(plan)
    others = found.context * found.expert * found.replicas * found.chunks
    require(plan, "DeepSpeed's configuration", others == 1, "context, expert, replica or interleaved degrees above 1")
    require(plan, "DeepSpeed's configuration", found.schedule in ("", "1f1b"), f"schedule {found.schedule}")
    require(plan, "DeepSpeed's pipeline", found.pipeline == 1 or found.zero < 2, f"a pipeline with ZeRO-{found.zero}")
    values: dict[str, object] = {
        "train_batch_size": found.batch_size,
        "train_micro_batch_size_per_gpu": found.microbatch_samples,
        "gradient_accumulation_steps": found.num_microbatches,
        "zero_optimization": {"stage": found.zero},
    }
    if found.tensor > 1:
        values["tensor_parallel"] = {"autotp_size": found.tensor}
    if found.pipeline > 1:
        values["pipeline"] = {"stages": found.pipeline}
    return json.dumps(values, indent=2) + "\n"


def require(plan: Plan, where: str, holds: bool, what: str) -> None:
    """Raise `PlanError` for a plan of a form that a target does not have, unless the condition holds."""
    if not holds:
        raise PlanError(
            f"{plan.name} cannot be exported: {where} does not have {what}. Choose another planner or another target."
        )
