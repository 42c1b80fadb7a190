"""Equal tasks share tracing, lowering and executables; what differs in anything does not; failures name the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite import _jax
from alpa_lite.errors import ExecutionError
from alpa_lite.lower.emission import Emitted
from alpa_lite.plan.progress import Progress
from alpa_lite.planners import Hybrid, Pipeline
from alpa_lite.runtime.execute.compile import LoweredStep, precompile, task_units
from alpa_lite.schedule import Interleaved1F1B
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.runtime.pipelines import arguments, compiled, step_with

pytestmark = pytest.mark.usefixtures("compiled_afresh")

EQUAL = [0.5] * 8


def _check(found: Any, scales: Sequence[float]) -> None:
    got = want = arguments(len(scales))[0]
    x = arguments(len(scales))[1]
    for _ in range(2):
        got, value = found(got, x)
        want, wanted = jax.jit(step_with(scales))(want, x)
        assert_same((got, value), (want, wanted))


def _same(found: Any) -> dict[str, list[int]]:
    """By kind of task, for each stage the first stage with the same program."""
    first: dict[int, int] = {}
    table: dict[str, list[int]] = {}
    for executable in found.executor.executables:
        stage = first.setdefault(id(executable.emitted), executable.task.stage)
        table.setdefault(executable.task.kind, []).append(stage)
    return table


def test_equal_stages_are_compiled_once(devices: Any) -> None:
    found = compiled(EQUAL, Pipeline(pipeline=4), 4)
    same = _same(found)
    assert same["forward"] == [0, 1, 1] and same["backward"] == [2, 2, 0]
    assert same["update"] == [0, 0, 0, 3]  # the last stage returns the loss, too
    counts = found.executor.counts
    assert counts.units == 15 and counts.compiled == counts.lowered == 9 and counts.loaded == 6
    assert str(counts).startswith("15 executables: 9 traced and lowered, 9 compiled, 6 loaded")
    _check(found, EQUAL)


def test_each_executable_is_on_the_devices_of_its_stage(devices: Any) -> None:
    found = compiled(EQUAL, Pipeline(pipeline=4), 4)
    for executable in found.executor.executables:
        assert executable.compiled.runtime_executable().local_devices() == [*executable.mesh.devices.flat]


def test_chunks_on_the_same_devices_share_one_executable(devices: Any) -> None:
    found = compiled(EQUAL, Hybrid(pipeline=2, schedule=Interleaved1F1B(num_chunks=4)), 4)
    forward = [e.compiled for e in found.executor.executables if e.task.kind == "forward"]
    assert len(forward) == 7 and len({*map(id, forward[1:])}) == 2
    assert forward[1] is forward[3] is forward[5] and forward[2] is forward[4] is forward[6]
    assert found.executor.counts.units > found.executor.counts.compiled + found.executor.counts.loaded
    _check(found, EQUAL)


@pytest.mark.parametrize(
    ("scales", "forward"), [([0.5] * 4 + [0.25] * 4, [0, 1, 2]), ([0.5, 0.5, 0.5, 0.25] + [0.5] * 4, [0, 1, 2])]
)
def test_a_literal_makes_another_program(scales: list[float], forward: list[int], devices: Any) -> None:
    found = compiled(scales, Pipeline(pipeline=4), 4)
    assert _same(found)["forward"] == forward
    _check(found, scales)


def _lowered(found: al.CompiledFunction) -> LoweredStep:
    """The program of a compiled step, and what it was lowered from."""
    executor = found.executor
    return LoweredStep(program=executor.program, plan=executor.plan, step=executor.step, equations=found.step.equations)


def test_donation_and_placement_make_another_program(devices: Any) -> None:
    found = compiled(EQUAL, Pipeline(pipeline=4), 4)
    executor = found.executor
    lowered = _lowered(found)
    forms = [unit.form for unit in task_units(lowered, executor.meshes, {})]
    assert forms[1] == forms[2] and hash(forms[1]) == hash(forms[2])
    given = task_units(lowered, executor.meshes, {1: (0,)})
    assert given[1].form != given[2].form
    stages = list(executor.plan.stages)
    tasks = executor.program.tasks
    (one,) = [i for i in tasks[2].ops if executor.step.graph.ops[i].primitive == "dot_general"][:1]
    placement = stages[2].ops[one]
    whole = type(placement)(factors=((),) * len(placement.factors), results=placement.results)
    stages[2] = replace(stages[2], ops={**stages[2].ops, one: whole})
    moved = task_units(replace(lowered, plan=replace(executor.plan, stages=tuple(stages))), executor.meshes, {})
    assert (moved[1].form == moved[2].form) == (placement == whole)


def test_what_cannot_be_packed_is_compiled_for_each_submesh(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax, "packed", lambda compiled, devices: None)
    found = compiled(EQUAL, Pipeline(pipeline=4), 4)
    assert found.executor.counts.loaded == 0 and found.executor.counts.lowered == 9
    _check(found, EQUAL)


def test_an_executable_is_not_loaded_on_the_wrong_devices(devices: Any) -> None:
    found = compiled(EQUAL, Pipeline(pipeline=4), 4)
    executable = found.executor.executables[0]
    mesh = tuple(executable.mesh.devices.flat)
    packed = _jax.packed(executable.compiled, mesh)
    assert packed is not None
    other = tuple(d for d in devices if d not in mesh)[: len(mesh)]
    loaded = _jax.unpacked(packed, other)
    assert loaded is not None and loaded.runtime_executable().local_devices() == [*other]
    assert _jax.unpacked(packed, other[:1]) is None
    broken = _jax.Packed(data=b"broken", in_tree=packed.in_tree, out_tree=packed.out_tree, devices=mesh)
    assert _jax.unpacked(broken, other) is None


class Broken:
    """A lowered program that XLA refuses."""

    def compile(self, **_: Any) -> Any:
        """As XLA does."""
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory")


def test_a_failure_names_the_task(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emitted, "lower", lambda self, on=None: Broken())
    with pytest.raises(ExecutionError, match=r"could not compile stage \d (for|back)ward.*RESOURCE_EXHAUSTED"):
        compiled(EQUAL, Pipeline(pipeline=4), 4)


def test_progress_is_told_in_order_and_to_the_end(devices: Any) -> None:
    told: list[tuple[int, int]] = []
    found = compiled(EQUAL, Pipeline(pipeline=4), 4)
    executor = found.executor
    units = task_units(_lowered(found), executor.meshes, {})
    made = precompile(units, lambda name, done, total: told.append((done, total)), num_threads=1)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[0] == (0, len(units)) and told[-1] == (len(units), len(units))
    assert len(made.compiled) == len(units)


def test_the_phases_of_compiling_are_followed(devices: Any) -> None:
    said, progress = list[str](), Progress()
    phases: set[str] = set()
    progress.follow(lambda p: phases.add(p.phase))
    progress.follow(lambda p: said.append(p.doing))
    compiled(EQUAL, Pipeline(pipeline=2), 2, progress=progress)
    assert {"trace", "lower", "compile"} <= phases
    assert progress.left["compile"] == 0 and progress.done["compile"] == 7
    assert any(text.startswith("stage 0 forward (") for text in said)


def test_nothing_is_compiled_after_the_first_step(devices: Any) -> None:
    found = compiled(EQUAL, Pipeline(pipeline=4), 4)
    weights, x = arguments(8)
    events: list[str] = []
    weights, _ = found(weights, x)
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    weights, value = found(weights, x)
    assert not [name for name in events if "backend_compile" in name]
    assert np.isfinite(value)


@pytest.mark.parametrize("starts", [(0, 0, 8, 8), (0, 8, 8, 8)])
def test_where_a_task_reads_makes_another_program(starts: tuple[int, ...], devices: Any) -> None:
    """Ops of one class share a rule, though they may read other rows; a form must tell them apart."""
    weights, x = arguments(4)

    def step(weights: list[Any], x: Any) -> Any:
        def loss(weights: list[Any]) -> Any:
            h = x
            for w, start in zip(weights, starts, strict=True):
                h = jnp.tanh(h @ w) + jnp.tile(jax.lax.slice_in_dim(h, start, start + 8, axis=1), (1, 2))
            return jnp.mean(h**2)

        return jax.value_and_grad(loss)(weights)

    function = al.parallelize(
        step, cluster=eager_cluster(), planner=Pipeline(pipeline=4), num_microbatches=4, batch_argnums=1
    )
    found = function.compiled(weights, x)
    forward = _same(found)["forward"]
    assert (forward[1] == forward[2]) == (starts[1] == starts[2])
    assert_same(found(weights, x), jax.jit(step)(weights, x))
