"""Plans that were made before, kept in files under all that they depend on.

    key      sha256 of the step, the arguments' names, the cluster, the planner with its options, the cost model, the
             number of micro-batches, the versions of what plans, and its own source                       `key_of`
    value    the plan as `Plan.save` writes it; it must belong to the step that asks                       `planned`
    folder   the user's caches, bounded in size; what was not asked for longest goes first                 `_store`

What has no content to compare (planners and cost models of the user's, rules that the user registered) is planned each
time. So are plans that are chosen by running them, and those that were interrupted. A cache that cannot be read or
written is none; it is never an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from alpa_lite.errors import BatchError, NonAdditiveError, TraceError
from alpa_lite.graph.ir import Graph
from alpa_lite.graph.phases import StepGraph
from alpa_lite.plan import FORMAT, INTERRUPTED, Plan, fingerprint
from alpa_lite.planners.auto import Auto
from alpa_lite.planners.planner import Planner, PlanRequest
from alpa_lite.planners.replay import Replay
from alpa_lite.rules.registry import only_own_rules
from alpa_lite.runtime.fingerprint import cache_folder

VARIABLE = "ALPA_LITE_CACHE"
"""The environment variable that gives another folder, or "off"; options of functions go before it."""

MAX_BYTES = 256 * 2**20
"""What the files of a folder may take together."""

_OWN = ("alpa_lite", "cost_models")
_PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "highspy", "numba", "pulp", "networkx")

Cache = bool | str | Path
"""Whether plans are kept, and taken again where all that they depend on is the same; or in which folder."""


class _NoContentError(Exception):
    """Something that cannot be told from another by its content."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, and whether it was made before."""

    plan: Plan
    cached: bool


def planned(planner: Planner, request: PlanRequest, kept: Cache) -> Answer:
    """The plan of a planner, if possible one that was made before. Raises what the planner raises."""
    folder = folder_of(kept)
    key = key_of(planner, request) if folder is not None else None
    if folder is None or key is None:
        return Answer(plan=_made(planner, request), cached=False)
    path = folder / f"{key}.json"
    known = _load(path, request)
    if known is not None:
        request.progress(f"from the cache: this plan took {known.solver.seconds:.1f} s to find")
        return Answer(plan=known, cached=True)
    plan = _made(planner, request)
    if plan.solver.status != INTERRUPTED:
        _store(path, plan)
    return Answer(plan=plan, cached=False)


def _made(planner: Planner, request: PlanRequest) -> Plan:
    """A new plan, for the step as it is traced at the plan's number of micro-batches, whatever others were like."""
    likely = request.likely_step_at
    if likely is not None and not _measures(planner):
        plan = planner.plan(replace(request, step_at=likely))
        with suppress(NonAdditiveError, BatchError, TraceError):
            if plan.fingerprint == fingerprint(request.step_at(plan.num_microbatches, plan.loop_parts)):
                return plan
        request.progress("the step differs between numbers of micro-batches: planned again, with all of them traced")
    return planner.plan(request)


def _measures(planner: Planner) -> bool:
    """Whether plans are run before one is chosen."""
    return isinstance(planner, Auto) and planner.measure_top > 0


def folder_of(kept: Cache) -> Path | None:
    """Where plans are kept; None for nowhere."""
    if not isinstance(kept, bool):
        return Path(kept)
    wanted = os.environ.get(VARIABLE, "")
    if not kept or wanted.lower() in ("off", "0", "no", "false"):
        return None
    return Path(wanted) if wanted else cache_folder() / "plans"


def key_of(planner: Planner, request: PlanRequest) -> str | None:
    """The digest of all that a plan depends on; None where that has no content."""
    if isinstance(planner, Replay) or _measures(planner) or not only_own_rules():
        return None
    asked = (request.function, request.num_arguments, request.batch_size, request.num_microbatches, request.advise)
    asked += (request.arguments, request.results)
    try:
        model = _content(request.cost_model_for)
        parts = (_content(planner), _content(request.cluster), model, asked, request.on_non_additive)
    except _NoContentError:
        return None
    digest = hashlib.sha256(json.dumps([FORMAT, own_digest(), *parts]).encode())
    _add_step(digest, request.step_at(1, 0))
    return digest.hexdigest()


def content_digest(value: Any) -> str:
    """The beginning of a digest that equal values share; empty where there is no content to compare."""
    try:
        return hashlib.sha256(json.dumps(_content(value)).encode()).hexdigest()[:12]
    except _NoContentError:
        return ""


def _content(value: Any) -> Any:
    """Data that equal values share, and others do not. Raises `_NoContentError` for what is not known well enough."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return [_content(item) for item in value]
    if isinstance(value, Mapping):
        return [[_content(key), _content(item)] for key, item in value.items()]
    if isinstance(value, partial):
        return ["partial", _content(value.func), _content(value.args), _content(value.keywords)]
    if isinstance(value, PartitionSpec):
        return ["PartitionSpec", [_content(entry) for entry in value]]
    named = value if isinstance(value, type) else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    if named.__module__.partition(".")[0] not in _OWN or "<" in name:
        raise _NoContentError(name)
    if isinstance(value, type):
        return name
    if isinstance(value, Enum):
        return [name, value.name]
    if not is_dataclass(value):
        raise _NoContentError(name)
    return [name, [[field.name, _content(getattr(value, field.name))] for field in fields(value)]]


def _add_step(digest: Any, step: StepGraph) -> None:
    """All of a step; the lines of its source too, since plans name them."""
    digest.update(fingerprint(step).encode())
    parts = (step.full_shapes, step.batch_dims, step.input_parts, step.output_parts, sorted(step.aliases.items()))
    digest.update(repr((parts, sorted(step.runs.items()), step.batch_problem)).encode())
    seen = set[Graph]()

    def add(graph: Graph) -> None:
        digest.update(repr([value.name for value in graph.values]).encode())
        digest.update(repr([(op.source, op.name_stack, op.effectful) for op in graph.ops]).encode())
        for body in (body for op in graph.ops for body in op.bodies if body not in seen):
            seen.add(body)
            digest.update(repr(step.bodies.get(body)).encode())
            add(body)

    add(step.graph)


@cache
def own_digest() -> str:
    """The source of what plans, and the versions of what it plans with: nothing is left of a plan after an upgrade."""
    versions = [("python", platform.python_version()), *((name, metadata.version(name)) for name in _PACKAGES)]
    digest = hashlib.sha256(repr(versions).encode())
    root = Path(__file__).parent.parent
    for path in sorted(path for package in _OWN for path in (root / package).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _load(path: Path, request: PlanRequest) -> Plan | None:
    """The plan of a file, if it belongs to the step; noted as asked for."""
    try:
        plan = Plan.load(path)
        plan.verify(request.step_at(plan.num_microbatches, plan.loop_parts), request.cluster)
        os.utime(path)
    except Exception:  # a file that was damaged may fail in any way, and is written anew
        return None
    return plan


def _store(path: Path, plan: Plan) -> None:
    """Write a plan so that others see all of it or nothing, and let old ones go."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(number)
        try:
            plan.save(name)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        left = MAX_BYTES
        for file in sorted(path.parent.iterdir(), key=lambda f: f.stat().st_mtime, reverse=True):
            left -= file.stat().st_size
            if left < 0:
                file.unlink()
