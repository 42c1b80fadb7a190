"""Plans that were made before, kept in files under all that they depend on.

    key      sha256 of the step, the arguments' names, the cluster, the planner with its options, the cost model, the
             number of micro-batches, the versions of what plans, and its own source                       `key_of`
    value    the plan as `Plan.save` writes it, after its key; it must belong to the step that asks         `planned`
    folder   the user's caches, bounded in size; what was not asked for longest goes first             `_make_room`

A file counts as one of the cache if it has the name and the first bytes that this module writes and belongs to the
user; all others are neither read nor removed.

What has no content to compare (planners and cost models of the user's, rules that the user registered) is planned each
time. So are plans that are chosen by running them, and those that were interrupted. A cache that cannot be read or
written is none; it is never an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
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

from alpa_lite.errors import BatchError, NonAdditiveError, PlanError, TraceError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan import codec
from alpa_lite.plan.plan import FORMAT, INTERRUPTED, Plan, fingerprint
from alpa_lite.planners.auto import Auto
from alpa_lite.planners.planner import Planner
from alpa_lite.planners.replay import Replay
from alpa_lite.program.ir import Graph
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.registry import only_own_rules
from alpa_lite.runtime.calibrate.device_fingerprint import cache_folder, make_private

VARIABLE = "ALPA_LITE_CACHE"
"""The environment variable that gives another folder, or "off"; options of functions go before it."""

MAX_BYTES = 256 * 2**20
"""What the files of a folder may take together."""

_MARK, _KEY, _WORDS = "kept", "key", "a plan that alpa_lite keeps"
"""The first two entries of a file: what it is, and of which key."""

_SUFFIX = ".json"
_NAME = re.compile(r"[0-9a-f]{64}(\.json|\.\w{8}\.tmp)")
_KEY_BYTES = 256  # more than the first two entries take

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
    known = _load(folder, key, request)
    if known is not None:
        request.progress(f"from the cache: this plan took {known.solver.seconds:.1f} s to find")
        return Answer(plan=known, cached=True)
    plan = _made(planner, request)
    if plan.solver.status != INTERRUPTED:
        _store(folder, key, plan)
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
    root = Path(__file__).parents[2]
    for path in sorted(path for package in _OWN for path in (root / package).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _load(folder: Path, key: str, request: PlanRequest) -> Plan | None:
    """The plan that is kept under a key, if it belongs to the step; noted as asked for."""
    path = folder / f"{key}{_SUFFIX}"
    try:
        data = codec.from_text(_own_text(path, codec.MAX_BYTES + 1) or b"", path)
        if (data.pop(_MARK), data.pop(_KEY)) != (_WORDS, key):
            return None
        plan = Plan.from_json(data)
        plan.verify(request.step_at(plan.num_microbatches, plan.loop_parts), request.cluster)
        os.utime(path)
    except Exception:  # a file that was damaged may fail in any way, and is written anew
        return None
    return plan


def _store(folder: Path, key: str, plan: Plan) -> None:
    """Write a plan so that others see all of it or nothing, and let old ones go."""
    with suppress(OSError, PlanError):
        text = codec.to_text({_MARK: _WORDS, _KEY: key, **plan.to_json()})
        make_private(folder)
        number, name = tempfile.mkstemp(dir=folder, prefix=f"{key}.", suffix=".tmp")
        try:
            with os.fdopen(number, "wb") as file:
                file.write(text)
            os.replace(name, folder / f"{key}{_SUFFIX}")
        except BaseException:
            os.unlink(name)
            raise
        _make_room(folder)


def _make_room(folder: Path) -> None:
    """Remove the plans that were not asked for longest, where all take more than `MAX_BYTES`.

    Whatever else is in the folder does not count and is not touched.
    """
    left = MAX_BYTES
    found = [(path, path.stat()) for path in folder.iterdir() if _is_ours(path)]
    for path, known in sorted(found, key=lambda each: each[1].st_mtime, reverse=True):
        left -= known.st_size
        if left < 0 and _is_ours(path):
            path.unlink()


def _is_ours(path: Path) -> bool:
    """Whether this cache wrote a file: for its name and first bytes, no other program did."""
    with suppress(OSError):
        return _NAME.fullmatch(path.name) is not None and _own_text(path, _KEY_BYTES) is not None
    return False


def _own_text(path: Path, size: int) -> bytes | None:
    """The first `size` bytes of a file that this cache wrote for this user; None for another. Raises `OSError`."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(number, "rb") as file:
        known = os.fstat(number)
        if not stat.S_ISREG(known.st_mode) or (hasattr(os, "getuid") and known.st_uid != os.getuid()):
            return None
        text = file.read(size)
    return text if text.startswith(_beginning(path.name.partition(".")[0])) else None


def _beginning(key: str) -> bytes:
    """The first bytes of the file of a key, as `to_text` writes them."""
    return json.dumps({_MARK: _WORDS, _KEY: key})[:-1].encode()
