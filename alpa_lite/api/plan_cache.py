"""A cache of plans in files, each under a digest of everything that the plan depends on.

    key      sha256 of the step, the arguments' names, the cluster, the planner with its options, the cost model, the
             number of micro-batches, the versions of the planning packages, and their own source          `key_of`
    value    the plan as `Plan.save` writes it, after its key; it is verified against the step             `planned`
    folder   the user's cache folder, bounded in size; the least recently used plans are removed first     `_make_room`

A file belongs to the cache if it has the name and the first bytes that this module writes and is owned by the user; all
others are neither read nor removed.

Planners, cost models and rules of the user have no content that could be compared, so their plans are made each time.
The same holds for plans that are chosen by running them, and interrupted searches are not stored. A cache that cannot
be read or written is treated as empty; it never raises an error.

In a job of several processes, process 0 plans and the others take its plan. Planning on each process would be simpler,
but a search with a time limit depends on the clock, so two processes could get different plans.

    before    all processes must have traced the same step, with the same options and versions     `_facts`
    during    plans that process 0 wants to measure are run by all processes                       `_leading`,
              `_following`
    after     the others have the plan of process 0, or raise the error that it raised
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
import tempfile
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from alpa_lite import errors
from alpa_lite.errors import AlpaLiteError, PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan import codec
from alpa_lite.plan.instructions import Program
from alpa_lite.plan.plan import FORMAT, INTERRUPTED, Plan, fingerprint
from alpa_lite.planners.auto import Auto
from alpa_lite.planners.planner import Planner, Replay
from alpa_lite.program.identity import content
from alpa_lite.program.ir import Graph
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.registry import only_own_rules
from alpa_lite.runtime.calibrate.calibrate import CACHE_VARIABLE, cache_folder, is_cache_off, make_private
from alpa_lite.runtime.job.consensus import agreed_data, same_everywhere

"""The environment variable that gives another folder, "off", or "on" (the usual folder).

The `cache` options of functions override it.
"""

MAX_BYTES = 256 * 2**20
"""The greatest total size of the plan files of a folder, in bytes."""

_MARK, _KEY, _WORDS = "kept", "key", "a plan that alpa_lite keeps"
"""The first two entries of a file: the mark of this cache, and the key."""

_SUFFIX = ".json"
_NAME = re.compile(r"[0-9a-f]{64}(\.json|\.\w{8}\.tmp)")
_KEY_BYTES = 256  # enough for the first two entries, so that a scan of the folder reads no whole plan

_OWN = ("alpa_lite", "cost_models")
_PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "highspy", "numba", "pulp", "networkx")

Cache = bool | str | Path
"""Whether plans are cached and reused when everything they depend on is the same; or the folder of the cache."""


Json = str | list["Json"]
"""Data that `json` writes."""


class _NoContentError(Exception):
    """A value has no content by which it could be compared with another one."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A plan, whether it comes from the cache, and its file there; None if this process has none."""

    plan: Plan
    cached: bool
    path: Path | None = None


def planned(planner: Planner, request: PlanRequest, kept: Cache) -> Answer:
    """Return the plan of a planner, from the cache if it is there. Raises what the planner raises."""
    folder = folder_of(kept)
    # The key is a digest of the whole step: without a cache no time is spent on it.
    key = key_of(planner, request) if folder is not None else None
    if folder is None or key is None:
        return Answer(plan=planner.plan(request), cached=False)
    known = _load(folder, key, request)
    if known is not None:
        request.progress(f"from the cache: the search for this plan took {known.solver.seconds:.1f} s")
        return Answer(plan=known, cached=True, path=_path(folder, key))
    plan = planner.plan(request)
    # A complete search may find a better plan, which a stored one would keep from being looked for.
    if plan.solver.status != INTERRUPTED:
        return Answer(plan=plan, cached=False, path=_store(folder, key, plan))
    return Answer(plan=plan, cached=False)


def _measures(planner: Planner) -> bool:
    """Whether the planner runs plans before it chooses one."""
    return isinstance(planner, Auto) and planner.measure_top > 0


def folder_of(kept: Cache) -> Path | None:
    """Return the folder of the cache; None if plans are not cached."""
    if not isinstance(kept, bool):
        return Path(kept)
    if not kept or is_cache_off():
        return None
    wanted = os.environ.get(CACHE_VARIABLE, "")
    in_usual_folder = wanted.lower() in ("", "on", "1", "yes", "true")
    return cache_folder() / "plans" if in_usual_folder else Path(wanted)


def key_of(planner: Planner, request: PlanRequest) -> str | None:
    """Return the digest of everything that a plan depends on; None if a part has no content to compare."""
    # A replayed plan needs no search, a measured one depends on the state of the machine, and rules of the user are
    # code without a digest.
    if isinstance(planner, Replay) or _measures(planner) or not only_own_rules():
        return None
    signature = request.signature
    asked = (signature.function, signature.num_arguments, request.batch_size, request.num_microbatches, request.advise)
    asked += (signature.arguments, signature.results)
    given = (planner, request.cluster, request.cost_model_for, asked, signature.user_shardings, request.on_non_additive)
    try:
        parts = content(given, _content)
    except _NoContentError:
        return None
    digest = hashlib.sha256(repr((FORMAT, own_digest(), parts)).encode())
    # The key holds the step at the full batch alone; `_load` verifies a plan against the step at its own number.
    _add_step(digest, request.step_at(1, 0))
    return digest.hexdigest()


def content_digest(value: object) -> str:
    """Return the first 12 hex digits of a digest that equal values share; "" if a value has no content to compare."""
    try:
        return hashlib.sha256(repr(content(value, _content)).encode()).hexdigest()[:12]
    except _NoContentError:
        return ""


def _content(value: object) -> Hashable:
    """Return a key of an object that equal ones share in all processes. Raises `_NoContentError` if there is none."""
    if isinstance(value, partial):
        return "partial", content((value.func, value.args, value.keywords), _content)
    if isinstance(value, PartitionSpec):
        return "PartitionSpec", content(tuple(value), _content)
    named = value if isinstance(value, type) else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    # Local classes ("<locals>") and lambdas of one name may differ in content.
    if named.__module__.partition(".")[0] not in _OWN or "<" in name:
        raise _NoContentError(name)
    if isinstance(value, type):
        return name
    if isinstance(value, Enum):
        return name, value.name
    if not is_dataclass(value):
        raise _NoContentError(name)
    return name, content({field.name: getattr(value, field.name) for field in fields(value)}, _content)


def _add_step(digest: hashlib._Hash, step: StepGraph) -> None:
    """Add a step to a digest: its structure, and its names and source lines too, since plans mention them."""
    digest.update(fingerprint(step).encode())
    parts = (step.full_shapes, step.batch_dims, step.input_parts, step.output_parts, sorted(step.aliases.items()))
    digest.update(repr((parts, sorted(step.loop_results.runs.items()), step.batch.problem)).encode())
    seen = set[Graph]()

    def add(graph: Graph) -> None:
        digest.update(repr([value.name for value in graph.values]).encode())
        digest.update(repr([(op.source, op.name_stack, op.effectful) for op in graph.ops]).encode())
        for body in (body for op in graph.ops for body in op.bodies if body not in seen):
            seen.add(body)
            digest.update(repr(step.bodies.get(body)).encode())
            add(body)

    add(step.graph)


@memoized(entries=1)
def own_digest() -> str:
    """Return the digest of the planning source and of the versions it plans with: an upgrade invalidates all plans."""
    versions = [("python", platform.python_version()), *((name, metadata.version(name)) for name in _PACKAGES)]
    digest = hashlib.sha256(repr(versions).encode())
    root = Path(__file__).parents[2]
    # Sorted, since the order of a folder's files depends on the file system.
    for path in sorted(path for package in _OWN for path in (root / package).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _load(folder: Path, key: str, request: PlanRequest) -> Plan | None:
    """Return the plan stored under a key if it fits the step, and mark it as used; None otherwise."""
    path = _path(folder, key)
    try:
        # One byte more than is allowed shows that a file is too long.
        data = codec.from_text(_own_text(path, codec.MAX_BYTES + 1) or b"", path)
        if (data.pop(_MARK), data.pop(_KEY)) != (_WORDS, key):
            return None
        plan = Plan.from_json(data)
        plan.verify(request.step_of(plan), request.cluster)
        # The time of change stands for the last use, by which `_make_room` orders files.
        os.utime(path)
    except Exception:  # a file that was damaged may fail in any way, and is written anew
        return None
    return plan


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}{_SUFFIX}"


def _store(folder: Path, key: str, plan: Plan) -> Path | None:
    """Write a plan atomically, so that other processes never see part of it, and remove old plans.

    Returns:
        The file; None if it could not be written.
    """
    # A full disk, or a plan too large for a file, costs the entry in the cache but not the plan.
    with suppress(OSError, PlanError):
        text = codec.to_text({_MARK: _WORDS, _KEY: key, **plan.to_json()})
        make_private(folder)
        # In the same folder, since `os.replace` is atomic within one file system only.
        number, name = tempfile.mkstemp(dir=folder, prefix=f"{key}.", suffix=".tmp")
        try:
            with os.fdopen(number, "wb") as file:
                file.write(text)
            os.replace(name, _path(folder, key))
        # Ctrl-C must not leave part of a file behind either.
        except BaseException:
            os.unlink(name)
            raise
        _make_room(folder)
        return _path(folder, key)
    return None


def _make_room(folder: Path) -> None:
    """Remove the least recently used plans while all plans together take more than `MAX_BYTES`.

    Other files in the folder do not count and are not touched.
    """
    left = MAX_BYTES
    found = [(path, path.stat()) for path in folder.iterdir() if _is_ours(path)]
    for path, known in sorted(found, key=lambda each: each[1].st_mtime, reverse=True):
        left -= known.st_size
        # Checked again right before the removal: the file may have been replaced since the folder was listed.
        if left < 0 and _is_ours(path):
            path.unlink()


def _is_ours(path: Path) -> bool:
    """Whether this cache wrote a file, judged by its name and first bytes, which no other program writes."""
    with suppress(OSError):
        return _NAME.fullmatch(path.name) is not None and _own_text(path, _KEY_BYTES) is not None
    return False


def _own_text(path: Path, size: int) -> bytes | None:
    """Return the first `size` bytes of a file that this cache wrote for this user; None otherwise. Raises `OSError`."""
    # The folder may be shared with others: links are not followed, and opening a named pipe must not block.
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(number, "rb") as file:
        known = os.fstat(number)
        if not stat.S_ISREG(known.st_mode) or (hasattr(os, "getuid") and known.st_uid != os.getuid()):
            return None
        text = file.read(size)
    return text if text.startswith(_beginning(path.name.partition(".")[0])) else None


def _beginning(key: str) -> bytes:
    """Return the first bytes of the file of a key, as `to_text` writes them."""
    return json.dumps({_MARK: _WORDS, _KEY: key})[:-1].encode()


def planned_together(planner: Planner, request: PlanRequest, kept: Cache) -> Answer:
    """Run `plan_cache.planned` on process 0, and return its answer on all processes.

    Raises:
        MismatchError: the processes want plans for different steps; raised on all of them.
        AlpaLiteError: the error that process 0 raised; raised on all of them.
    """
    if jax.process_count() == 1:
        return planned(planner, request, kept)
    same_everywhere(_facts(planner, request))
    return _leading(planner, request, kept) if jax.process_index() == 0 else _following(request)


def check_same_program(plan: Plan, program: Program, donated: object) -> None:
    """Raise `MismatchError` on all processes unless they are about to run the same program of the same plan."""
    if jax.process_count() > 1:
        facts = {"plan": _digest(json.dumps(plan.to_json())), "program": _digest(str(program))}
        same_everywhere({**_versions(), **facts, "donated arguments": str(donated)})


def _versions() -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    return {"Python": platform.python_version(), **versions, "source of alpa_lite and its solvers": own_digest()[:12]}


def _facts(planner: Planner, request: PlanRequest) -> Mapping[str, str]:
    asked = (request.num_microbatches, request.on_non_additive)
    return {
        **_versions(),
        f"step {request.signature.function!r}, traced as": fingerprint(request.step_at(1, 0))[:12],
        "planner": f"{planner.name} {content_digest(planner)}".rstrip(),
        "cluster": f"{request.cluster.name} {content_digest(request.cluster)}",
        "options": str(asked),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _leading(planner: Planner, request: PlanRequest, kept: Cache) -> Answer:
    measure = request.measure

    def measured(plan: Plan) -> float:
        # Every process must run the plan, since its collectives span all of them.
        agreed_data({"measure": plan.to_json()})
        return measure(plan) if measure is not None else 0.0

    try:
        answer = planned(planner, replace(request, measure=measured if measure is not None else None), kept)
    # The other processes wait for an answer: they would hang if planning failed here without one.
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, AlpaLiteError) else PlanError.__name__
        text = str(error) if isinstance(error, AlpaLiteError) else f"Process 0 could not plan: {error!r}."
        agreed_data({"error": kind, "text": text})
        raise
    agreed_data({"plan": answer.plan.to_json(), "cached": answer.cached})
    return answer


def _following(request: PlanRequest) -> Answer:
    request.progress("waiting for the plan of process 0")
    while True:
        said: dict[str, Any] = agreed_data(None)
        if "error" in said:
            raise getattr(errors, said["error"], PlanError)(said["text"])
        if "plan" in said:
            return Answer(plan=Plan.from_json(said["plan"]), cached=said["cached"])
        if request.measure is not None:
            # Only the time that process 0 measures counts; here the plan merely has to run.
            request.measure(Plan.from_json(said["measure"]))
