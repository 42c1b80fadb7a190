"""What the settings of other trainers say of a run, and the readers of Megatron-LM, NeMo, torchtitan and DeepSpeed.

Settings of other things (learning rates, files) are passed over. `maxtext_settings` has the reader of MaxText.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from alpa_lite.schedule import DualPipeV, GPipe, Interleaved1F1B, OneFOneB, Schedule, ZeroBubbleV

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """What settings say of a run; None where they leave it open.

    Attributes:
        pipeline, tensor, context, expert: degrees.
        replicas: groups of data-parallel devices, each with a whole copy of what `zero` splits.
        shards: data-parallel devices of such a group; None: all that there are.
        zero: the stage of ZeRO.
        sequence_parallel: whether sums over tensor-parallel devices are scattered.
        remat: policy of recomputation.
        schedule: schedule of the pipeline.
        samples: samples of a micro-batch on one data-parallel device.
        batch_size: samples of a step.
        num_microbatches: micro-batches of a step, where it is said and does not follow from the batch.
        notes: sentences on what the settings say and the plan does not.
    """

    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    replicas: int = 1
    shards: int | None = None
    zero: int = 0
    sequence_parallel: bool = False
    remat: Recompute = "none"
    schedule: Schedule = field(default_factory=OneFOneB)
    samples: int = 1
    batch_size: int | None = None
    num_microbatches: int | None = None
    notes: tuple[str, ...] = ()


def read_megatron(text: str) -> TrainerSettings:
    """Read flags of Megatron-LM. Raises `ValueError` or `TypeError` for what cannot be read."""
    flags: dict[str, str] = {}
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            following = words[place + 1] if place + 1 < len(words) else "--"
            flags[name.replace("_", "-")] = value if has_value else "" if following.startswith("--") else following
    # A name of a file that is not there would otherwise stand for the defaults of all flags.
    if not flags:
        raise ValueError("it has no flag such as --tensor-model-parallel-size, and there is no file of that name")
    pipeline = int(flags.get("pipeline-model-parallel-size", 1))
    chunks = int(flags.get("num-virtual-stages-per-pipeline-rank", 1))
    if "num-layers-per-virtual-pipeline-stage" in flags:
        layers = int(flags["num-layers"]) if "num-layers" in flags else 0
        chunks = layers // (pipeline * int(flags["num-layers-per-virtual-pipeline-stage"]))
        if chunks < 1:
            raise ValueError("--num-layers-per-virtual-pipeline-stage needs --num-layers, of which a stage has more")
    recompute = flags.get("recompute-granularity", "selective" if "recompute-activations" in flags else "none")
    batch = flags.get("global-batch-size")
    return TrainerSettings(
        pipeline=pipeline,
        tensor=int(flags.get("tensor-model-parallel-size", 1)),
        context=int(flags.get("context-parallel-size", 1)),
        expert=int(flags.get("expert-model-parallel-size", 1)),
        zero=int("use-distributed-optimizer" in flags),
        sequence_parallel="sequence-parallel" in flags,
        remat=_policy(recompute),
        schedule=Interleaved1F1B(num_chunks=chunks) if chunks > 1 else OneFOneB(),
        samples=int(flags.get("micro-batch-size", 1)),
        batch_size=int(batch) if batch else None,
    )


def read_nemo(text: str) -> TrainerSettings:
    """Read overrides of a NeMo 2.0 recipe, such as `trainer.strategy.tensor_model_parallel_size=8`.

    The recipe's own values are not known here. Raises `ValueError` or `TypeError` for what cannot be read.
    """
    words = [word.partition("=") for word in shlex.split(text.replace("\\\n", " "), comments=True)]
    values = {name.rpartition(".")[2]: value for name, is_override, value in words if is_override}
    if not values:
        raise ValueError("it has no NAME=VALUE such as trainer.strategy.tensor_model_parallel_size=8")
    # What is unset in Python is None on the command line of a recipe.
    values = {name: value for name, value in values.items() if value.lower() not in ("none", "null")}
    chunks, batch = int(values.get("virtual_pipeline_model_parallel_size", 1)), values.get("global_batch_size")
    return TrainerSettings(
        pipeline=int(values.get("pipeline_model_parallel_size", 1)),
        tensor=int(values.get("tensor_model_parallel_size", 1)),
        context=int(values.get("context_parallel_size", 1)),
        expert=int(values.get("expert_model_parallel_size", 1)),
        zero=int(_is_true(values.get("use_distributed_optimizer", "false"))),
        sequence_parallel=_is_true(values.get("sequence_parallel", "false")),
        remat=_policy(values.get("recompute_granularity", "none")),
        schedule=Interleaved1F1B(num_chunks=chunks) if chunks > 1 else OneFOneB(),
        samples=int(values.get("micro_batch_size", 1)),
        batch_size=int(batch) if batch else None,
    )


def _is_true(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


TORCHTITAN_SCHEDULES: Mapping[str, Callable[[], Schedule]] = {
    "GPipe": GPipe,
    "1F1B": OneFOneB,
    "Interleaved1F1B": lambda: Interleaved1F1B(num_chunks=2),
    "ZBVZeroBubble": ZeroBubbleV,
    "DualPipeV": DualPipeV,
}
"""The schedules of torchtitan (`pipeline_parallel_schedule`) that there are here; two stages per group, if several."""


def read_torchtitan(text: str) -> TrainerSettings:
    """Read the TOML of torchtitan. Raises `ValueError` or `TypeError` for what cannot be read."""
    sections: dict[str, dict[str, Any]] = tomllib.loads(text)
    parallelism, training = sections.get("parallelism", {}), sections.get("training", {})
    pipeline = int(parallelism.get("pipeline_parallel_degree", 1))
    shards = int(parallelism.get("data_parallel_shard_degree", -1))
    local, batch = int(training.get("local_batch_size", 1)), int(training.get("global_batch_size", -1))
    number, samples = None, local
    schedule: Schedule = OneFOneB()
    if pipeline > 1:
        name = str(parallelism.get("pipeline_parallel_schedule", "1F1B"))
        if name not in TORCHTITAN_SCHEDULES:
            raise ValueError(f"the schedule {name!r} is none of {', '.join(TORCHTITAN_SCHEDULES)}")
        schedule = TORCHTITAN_SCHEDULES[name]()
        samples = int(parallelism.get("pipeline_parallel_microbatch_size", 1))
        number = local // samples
    return TrainerSettings(
        pipeline=pipeline,
        tensor=int(parallelism.get("tensor_parallel_degree", 1)),
        context=int(parallelism.get("context_parallel_degree", 1)),
        expert=int(parallelism.get("expert_parallel_degree", 1)),
        replicas=int(parallelism.get("data_parallel_replicate_degree", 1)) if shards != 1 else 1,
        shards=shards if shards > 1 else None,
        zero=0 if shards == 1 else 3,
        sequence_parallel=True,
        remat=_policy(str(sections.get("activation_checkpoint", {}).get("mode", "selective"))),
        schedule=schedule,
        samples=samples,
        batch_size=batch if batch > 0 else None,
        num_microbatches=number,
    )


def read_deepspeed(text: str) -> TrainerSettings:
    """Read the JSON of DeepSpeed. Raises `ValueError` or `TypeError` for what cannot be read."""
    values: dict[str, Any] = json.loads(text)
    batch, number = values.get("train_batch_size"), values.get("gradient_accumulation_steps")
    samples = values.get("train_micro_batch_size_per_gpu")
    if "auto" in (batch, number, samples) or samples is None:
        raise ValueError("train_micro_batch_size_per_gpu is needed, as a number, and no batch size may be 'auto'")
    return TrainerSettings(
        pipeline=int(values.get("pipeline", {}).get("stages", 1)),
        tensor=int(values.get("tensor_parallel", {}).get("autotp_size", 1)),
        zero=int(values.get("zero_optimization", {}).get("stage", 0)),
        samples=int(samples),
        batch_size=None if batch is None else int(batch),
        num_microbatches=None if number is None else int(number),
    )


def _policy(name: str) -> Recompute:
    if name == "none":
        return "none"
    if name == "selective":
        return "selective"
    if name == "full":
        return "full"
    raise ValueError(f"recomputation {name!r} is none of none, selective, full")
