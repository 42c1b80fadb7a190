"""The way in: settings of trainers with fixed forms of parallelism, as plans.

A run of Megatron-LM, NeMo, torchtitan, DeepSpeed or MaxText has degrees of parallelism, micro-batches, ZeRO and
recomputation. These decide a `Hybrid` plan for a step and a cluster, with as many data-parallel devices as the other
degrees leave:

    data          =  devices / (pipeline · tensor · context)
    micro-batches =  batch / (samples of a micro-batch · data)

`Plan.export` writes the same settings. A new trainer takes a reader and an entry in `READERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.maxtext_settings import read_maxtext
from alpa_lite.planners.planner import Planner
from alpa_lite.planners.trainer_settings import (
    TrainerSettings,
    read_deepspeed,
    read_megatron,
    read_nemo,
    read_torchtitan,
)
from alpa_lite.text import did_you_mean
from cost_models import Cluster


@dataclass(frozen=True, kw_only=True)
class TrainerConfiguration(Planner):
    """The plan that the settings of another trainer stand for.

    Attributes:
        trainer: "megatron", "nemo", "torchtitan", "deepspeed" or "maxtext".
        settings: the flags of Megatron-LM, the overrides of a NeMo recipe, the TOML of torchtitan, the JSON of
            DeepSpeed, or the YAML of MaxText or its words NAME=VALUE; or the path of a file with them, which is read at
            once.
    """

    trainer: str
    settings: str

    def __post_init__(self) -> None:
        """Read the file that is named, so that an edited file makes another planner: cached plans go by its value."""
        object.__setattr__(self, "settings", written(self.settings))

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"{self.trainer} settings"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan.

        Raises:
            PlanError: unreadable settings, or settings that do not suit the cluster or the batch of the step.
        """
        found = settings_of(self.trainer, self.settings, request.cluster)
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
        return replace(plan, name=f"{self.name} ({hybrid.name})", notes=(*plan.notes, *found.notes))

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


def settings_of(trainer: str, text: str, cluster: Cluster | None = None) -> TrainerSettings:
    """Read settings, or the file of that name. Raises `PlanError` if they cannot be read, or say what no plan can.

    Degrees that a trainer fills up with the devices at hand follow from the cluster; without one they are 1.
    """
    read = READERS.get(trainer)
    if read is None:
        raise PlanError(
            f"There is no reader for settings of {trainer!r}.{did_you_mean(trainer, READERS)} "
            f"Choose one of {', '.join(READERS)}."
        )
    try:
        return read(written(text), cluster)
    # Parsers and the conversions of numbers raise errors of several classes, all of these kinds.
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(f"The {trainer} settings {text[:60]!r} cannot be read: {error}.") from error


def written(text: str) -> str:
    """Return the content of the file of that name, or the text. Raises `PlanError` if the file cannot be read."""
    path = Path(text.strip())
    # No file has a name of several lines, or one as long as settings may be.
    if "\n" in text.strip() or len(text) >= 256 or not path.is_file():
        return text
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"The settings {str(path)!r} cannot be read: {error}.") from error


READERS: Mapping[str, Callable[[str, Cluster | None], TrainerSettings]] = {
    "megatron": lambda text, _: read_megatron(text),
    "nemo": lambda text, _: read_nemo(text),
    "torchtitan": lambda text, _: read_torchtitan(text),
    "deepspeed": lambda text, _: read_deepspeed(text),
    "maxtext": read_maxtext,
}
"""The readers of settings by the name of the trainer, as `Plan.export` names its targets."""
