"""The plan: everything that was decided about running a step, as frozen, JSON-serialisable data.

Automatic search and manual planners return the same `Plan`; lowering, running and explaining take nothing else.
A plan names ops and values by their number in the traced graph; `fingerprint` ties it to that graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from alpa_lite.errors import MismatchError, PlanError
from alpa_lite.plan.codec import decode, encode, hints_of, read_file, to_text
from alpa_lite.plan.parts import Accumulator as Accumulator
from alpa_lite.plan.parts import ArrayShape as ArrayShape
from alpa_lite.plan.parts import BatchDims as BatchDims
from alpa_lite.plan.parts import CollectiveUse as CollectiveUse
from alpa_lite.plan.parts import OpaqueUse as OpaqueUse
from alpa_lite.plan.parts import OpPlacement as OpPlacement
from alpa_lite.plan.parts import Prediction as Prediction
from alpa_lite.plan.parts import SolverReport as SolverReport
from alpa_lite.plan.parts import StagePlan as StagePlan
from alpa_lite.plan.parts import UndividedDim as UndividedDim
from alpa_lite.plan.plan_checks import check_plan
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.program.views import View, view
from alpa_lite.schedule import Schedule
from alpa_lite.schedule.tasks import SpanLike
from alpa_lite.sharding.meshes import sharing
from alpa_lite.step.rematerialisation import Remat
from cost_models.cluster import Cluster

FORMAT = 5
"""Version of the plan file."""

_LATER = ("batch",)
"""Fields that files of this format did not have from the beginning."""

INTERRUPTED = "interrupted"
"""The status of a search that the user ended; its plan is the best so far."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A complete decision about running a step.

    Attributes:
        name: of the planner that found it.
        function: name of the step.
        stages: in the order of the forward pass.
        schedule: in which order they run micro-batches.
        num_microbatches: into which the batch is cut.
        num_layers: of which stages are made.
        op_layers: the layer of each op; None: it is repeated where its result is read.
        input_layers: the layer of each graph input.
        loop_parts: into about how many parts loops over layers are cut (0: they are kept).
        cluster: for which it was made.
        prediction: what the cost model expects of it.
        solver: how it was found.
        fingerprint: of the step, by which a plan knows the step that it belongs to.
        alternatives: name and seconds of a step of every other plan that was priced; infinite where none was found.
        opaque: ops that run whole on every device for want of a rule.
        undivided: dims that stay whole because an axis does not divide them.
        averaged: the step is no sum over its samples, and its results are the means of those of the micro-batches.
        remat: what each layer computes again in its backward pass; () where the step runs as it is written. Ops have
            the numbers of the step with what is computed again.
        traced_layers: with `remat`, the layer of each op without what is computed again.
        buckets: gradients that are reduced together, one bucket after the other; () where each is by itself.
        batch: which arguments hold the batch, and whether that was assumed; None where no batch is known, and for plans
            of files that say nothing about it.
        request: what the plan answers (a `planners.PlanRequest`), from which explanations price alternatives. A plan
            that comes from a file has none until it is replayed: `al.plan(step, *args, planner=plan)`.
    """

    name: str
    function: str
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    num_microbatches: int
    num_layers: int
    op_layers: tuple[int | None, ...]
    input_layers: tuple[int, ...]
    loop_parts: int
    cluster: Cluster
    prediction: Prediction
    solver: SolverReport
    fingerprint: str
    alternatives: tuple[tuple[str, float], ...] = ()
    opaque: tuple[OpaqueUse, ...] = ()
    undivided: tuple[UndividedDim, ...] = ()
    averaged: bool = False
    remat: tuple[Remat, ...] = ()
    traced_layers: tuple[int | None, ...] = ()
    buckets: tuple[tuple[int, ...], ...] = ()
    batch: BatchDims | None = None
    request: Any = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """What goes into files and to other processes: all but the request."""
        return {**self.__dict__, "request": None}

    def stage_of_layer(self, layer: int) -> int:
        """The stage that a layer belongs to."""
        return next(i for i, s in enumerate(self.stages) if s.layers[0] <= layer <= s.layers[1])

    def capacity_bytes(self, stage: int) -> float:
        """The memory of each device of a stage; the least, where they differ."""
        submesh = self.stages[stage].submesh
        return float(self.cluster.at(submesh.first_device, submesh.num_devices).device.memory_bytes)

    @property
    def fullest_stage(self) -> int:
        """The stage that uses the largest part of its devices' memory."""
        return max(range(len(self.stages)), key=lambda n: self.prediction.peak_bytes[n] / self.capacity_bytes(n))

    @property
    def recomputed(self) -> str:
        """Which layers compute what again in their backward pass: `layers 0–6: full`, for instance; else empty."""
        runs = [(policy, list(run)) for policy, run in groupby(range(len(self.remat)), key=self.remat.__getitem__)]
        shown = [
            f"layers {run[0]}–{run[-1]}: {policy}" if len(run) > 1 else f"layer {run[0]}: {policy}"
            for policy, run in runs
            if policy is not Remat.NONE
        ]
        return ", ".join(shown)

    @property
    def stages_together(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the stages on each submesh; several where a schedule deals out more stages than submeshes."""
        return sharing([stage.submesh for stage in self.stages])

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` gives an equal plan."""
        return {"format": FORMAT, **{name: encode(getattr(self, name)) for name in _decided()}}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_json`. Raises `PlanError` when the data are no plan of this version."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise PlanError(f"This is no plan of format {FORMAT}. Give a file that plan.save of this version wrote.")
        hints = hints_of(Plan)
        missing = [name for name in _decided() if name not in data and name not in _LATER]
        if missing:
            raise PlanError(f"The plan file lacks {missing}: it is cut off or was edited. Save the plan again.")
        try:
            plan = Plan(**{name: _decoded(name, hints[name], data[name]) for name in _decided() if name in data})
            check_plan(plan)
        except RecursionError as error:
            raise PlanError("The plan nests too deeply. Give data that to_json of this version made.") from error
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, with a checksum."""
        Path(path).write_bytes(to_text(self.to_json()))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote. Raises `PlanError` for anything else.

        A file whose checksum is not that of its content is refused; one without a checksum is read, so that plans can
        be edited. Every file is checked for sense.
        """
        data = read_file(path)
        try:
            return Plan.from_json(data)
        except PlanError as error:
            raise PlanError(f"{path} holds no plan that can be used: {error}") from error

    def __str__(self) -> str:
        return view(View.PLAN_TEXT, self)

    def explain(self, subject: str) -> str:
        """Why something is as it is: a parameter's path, `op 12`, `layer 3`, `stage 0`, or part of a source line."""
        return view(View.PLAN_EXPLANATION, self, subject)

    def explain_time(self) -> str:
        """Where the time of a step goes, the most first, each with the line and what may be done about it."""
        return view(View.PLAN_TIME, self)

    def explain_memory(self) -> str:
        """When each stage holds the most, and what is alive then."""
        return view(View.PLAN_MEMORY, self)

    def diff(self, other: Plan) -> str:
        """What changes from this plan to another, and what it buys."""
        return view(View.PLAN_DIFF, self, other)

    def to_html(
        self,
        path: str | Path,
        *,
        simulated: Sequence[SpanLike] | None = None,
        measured: Sequence[SpanLike] | None = None,
        allocated_bytes: Sequence[float] | None = None,
    ) -> None:
        """Write the plan as one self-contained HTML page.

        Args:
            path: of the file.
            simulated: when each instruction of its program runs on the cost model (`lowered.simulate().times`); the
                page then shows it below the prediction.
            measured: the same on devices (`compiled.measure()`).
            allocated_bytes: of each stage what XLA allocates on a device (`peak_bytes` of `compiled.allocated()`); the
                page then shows it beside the predicted peak.
        """
        page = view(View.PLAN_PAGE, self, simulated=simulated, measured=measured, allocated_bytes=allocated_bytes)
        Path(path).write_text(page, encoding="utf-8")

    def _repr_html_(self) -> str:
        return view(View.PLAN_FRAGMENT, self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython prints where it shows no HTML."""
        printer.text(f"plan {self.name}" if cycle else str(self))

    def verify(self, step: StepGraph, cluster: Cluster | None = None) -> None:
        """Raise `MismatchError` unless this plan was made for this step (and this cluster)."""
        if self.fingerprint != fingerprint(step):
            raise MismatchError(
                f"This plan was made for {self.function!r} with other code or other argument shapes: its fingerprint "
                f"is {self.fingerprint[:12]}, that of this call is {fingerprint(step)[:12]}. Make a new plan with "
                "al.plan."
            )
        if cluster is not None and cluster.num_devices != self.cluster.num_devices:
            raise MismatchError(
                f"This plan is for {self.cluster.num_devices} devices ({self.cluster.name}), but {cluster.name} has "
                f"{cluster.num_devices}. Make a new plan for this cluster."
            )


def _decided() -> list[str]:
    """The fields that a plan consists of."""
    return [f.name for f in fields(Plan) if f.compare]


def _decoded(name: str, wanted: Any, data: Any) -> Any:
    """A field from its data."""
    try:
        return decode(wanted, data)
    except PlanError as error:
        raise PlanError(f"{name!r} of the plan file is none: {error}") from error


def fingerprint(step: StepGraph) -> str:
    """Digest of a step: its ops, shapes, dtypes, literals and phases, loop bodies included."""
    digest = hashlib.sha256()
    digest.update(_text_of(step.graph, {}))
    digest.update(repr([p.value for p in step.phases]).encode())
    digest.update(repr((step.num_microbatches, step.batch_size, *(["averaged"] if step.averaged else []))).encode())
    return digest.hexdigest()


def _text_of(graph: Graph, known: dict[Graph, bytes]) -> bytes:
    """What makes a graph this graph, as text; `known`: that of bodies, which many loops may share."""
    parts = [repr([(v.shape, v.dtype, v.literal) for v in graph.values]), repr((graph.inputs, graph.outputs))]
    found = [part.encode() for part in parts]
    for op in graph.ops:
        params = sorted(op.params.items(), key=lambda p: p[0])
        found.append(repr((op.primitive, op.operands, op.results, params)).encode())
        for body in op.bodies:
            if body not in known:
                known[body] = _text_of(body, known)
            found.append(known[body])
    return b"".join(found)
