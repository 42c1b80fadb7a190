"""The way in: settings of trainers with fixed forms of parallelism, as plans.

A run of Megatron-LM, torchtitan or DeepSpeed has degrees of parallelism, micro-batches, ZeRO and recomputation. These
decide a `Hybrid` plan for a step and a cluster, with as many data-parallel devices as the other degrees leave:

    data          =  devices / (pipeline · tensor · context)
    micro-batches =  batch / (samples of a micro-batch · data)

Settings of other things (learning rates, files) are passed over. `Plan.export` writes the same settings.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.planner import Planner
from alpa_lite.schedule import DualPipeV, GPipe, Interleaved1F1B, OneFOneB, Schedule, ZeroBubbleV
from alpa_lite.text import did_you_mean

_Recompute = Literal["none", "selective", "full"]


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
    """

    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    replicas: int = 1
    shards: int | None = None
    zero: int = 0
    sequence_parallel: bool = False
    remat: _Recompute = "none"
    schedule: Schedule = field(default_factory=OneFOneB)
    samples: int = 1
    batch_size: int | None = None
    num_microbatches: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainerConfiguration(Planner):
    """The plan that the settings of another trainer stand for.

    Attributes:
        trainer: "megatron", "torchtitan" or "deepspeed".
        settings: the flags of Megatron-LM, the TOML of torchtitan or the JSON of DeepSpeed, or the path of a file with
            them, which is read at once.
    """

    trainer: str
    settings: str

    def __post_init__(self) -> None:
        """Read the file that is named, so that an edited file makes another planner: cached plans go by its value."""
        object.__setattr__(self, "settings", _written(self.settings))

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"{self.trainer} settings"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan.

        Raises:
            PlanError: unreadable settings, or settings that do not suit the cluster or the batch of the step.
        """
        found = settings_of(self.trainer, self.settings)
        devices, others = request.cluster.num_devices, found.pipeline * found.tensor * found.context
        if devices % others:
            raise PlanError(
                f"The {self.name} say {found.pipeline} pipeline × {found.tensor} tensor × {found.context} context "
                f"devices, whose product {others} does not divide the {devices} devices of {request.cluster.name}. "
                "Choose a cluster of another size."
            )
        data = devices // others
        if found.shards is not None and found.shards * found.replicas != data:
            raise PlanError(
                f"The {self.name} say {found.replicas} × {found.shards} data-parallel devices, but the other degrees "
                f"leave {data} of the {devices} devices of {request.cluster.name}."
            )
        hybrid = Hybrid(
            pipeline=found.pipeline,
            data=data,
            tensor=found.tensor,
            context=found.context,
            expert=found.expert,
            replicas=found.replicas,
            zero=found.zero,
            sequence_parallel=found.sequence_parallel,
            projections=found.tensor > 1,
            schedule=found.schedule,
            remat=found.remat,
        )
        number = self._num_microbatches(request, found, data)
        plan = hybrid.plan(replace(request, num_microbatches=number))
        return replace(plan, name=f"{self.name} ({hybrid.name})")

    def _num_microbatches(self, request: PlanRequest, found: TrainerSettings, data: int) -> int:
        """Return the number of micro-batches. Raises `PlanError` if settings, batch and request do not agree."""
        batch = request.batch_size
        if batch is None:
            raise PlanError(f"The {self.name} count samples, but the step has no known batch: name batch_argnums.")
        number = found.num_microbatches or max(1, batch // (found.samples * data))
        said = found.batch_size or number * found.samples * data
        if said != batch or number * found.samples * data != batch:
            raise PlanError(
                f"The {self.name} make {number} micro-batches of {found.samples} samples on {data} data-parallel "
                f"devices of {request.cluster.name}, of a batch of {said} samples, but the step has {batch}. Pass the "
                "step a batch of that size."
            )
        if request.num_microbatches not in ("auto", number):
            raise PlanError(
                f"num_microbatches={request.num_microbatches} was asked for, but the {self.name} make {number} of the "
                f'batch of {batch} samples. Leave it at "auto".'
            )
        return number


def settings_of(trainer: str, text: str) -> TrainerSettings:
    """Read settings, or the file of that name. Raises `PlanError` if they cannot be read, or say what no plan can."""
    read = READERS.get(trainer)
    if read is None:
        raise PlanError(
            f"There is no reader for settings of {trainer!r}.{did_you_mean(trainer, READERS)} "
            f"Choose one of {', '.join(READERS)}."
        )
    try:
        return read(_written(text))
    # Parsers and the conversions of numbers raise errors of several classes, all of these kinds.
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(f"The {trainer} settings {text[:60]!r} cannot be read: {error}.") from error


def _written(text: str) -> str:
    """Return the content of the file of that name, or the text. Raises `PlanError` if the file cannot be read."""
    path = Path(text.strip())
    # No file has a name of several lines, or one as long as settings may be.
    if "\n" in text.strip() or len(text) >= 256 or not path.is_file():
        return text
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"The settings {str(path)!r} cannot be read: {error}.") from error


def _megatron(text: str) -> TrainerSettings:
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


TORCHTITAN_SCHEDULES: Mapping[str, Callable[[], Schedule]] = {
    "GPipe": GPipe,
    "1F1B": OneFOneB,
    "Interleaved1F1B": lambda: Interleaved1F1B(num_chunks=2),
    "ZBVZeroBubble": ZeroBubbleV,
    "DualPipeV": DualPipeV,
}
"""The schedules of torchtitan (`pipeline_parallel_schedule`) that there are here; two stages per group, if several."""


def _torchtitan(text: str) -> TrainerSettings:
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


def _deepspeed(text: str) -> TrainerSettings:
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


def _policy(name: str) -> _Recompute:
    if name == "none":
        return "none"
    if name == "selective":
        return "selective"
    if name == "full":
        return "full"
    raise ValueError(f"recomputation {name!r} is none of none, selective, full")


READERS: Mapping[str, Callable[[str], TrainerSettings]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
}
"""The readers of settings by the name of the trainer, as `Plan.export` names its targets."""
