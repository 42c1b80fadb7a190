"""A plan as a module of the MPMD dialect, judged by the partitioner and the compiler of the jaxlib wheel.

The judge (`mpmd_judge`) knows nothing of alpa_lite. What it reads in the module, and what the wheel's passes make of
it, must be the instructions of the plan; what XLA computes from it must be what `jax.jit` computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

import alpa_lite as al
from alpa_lite.plan.instructions import InstructionKind
from alpa_lite.planners import FSDP, Auto, Hybrid, Pipeline
from alpa_lite.schedule import GPipe, Interleaved1F1B, ZeroBubbleH1
from tests.end_to_end.cases import TOLERANCE, relative_error
from tests.export import mpmd_judge as judge

WIDTH, SAMPLES = 16, 16
ARGUMENTS = (
    [np.random.default_rng(i).normal(size=(WIDTH, WIDTH)).astype(np.float32) for i in range(4)],
    jax.random.key(3),
    np.random.default_rng(4).normal(size=(SAMPLES, WIDTH)).astype(np.float32),
)

CASES = {
    "hybrid": (Hybrid(pipeline=2, data=2, tensor=2), 2),
    "interleaved": (Hybrid(pipeline=2, data=4, schedule=Interleaved1F1B(num_chunks=2)), 2),
    "zero_bubble": (Hybrid(pipeline=4, schedule=ZeroBubbleH1()), 4),
    "fsdp": (FSDP(), 1),
    "auto": (Auto(num_layers=2, manual=()), 2),
    "gpipe": (Pipeline(pipeline=4, schedule=GPipe()), 4),
}


def step(weights: Any, key: Any, x: Any) -> Any:
    """Weights that two stages share, a mask that follows the sample, a result of each sample and one of the batch."""

    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        y = jnp.where(jax.random.bernoulli(key, 0.8, y.shape), y, 0.0) @ weights[0]
        return jnp.mean((y - x) ** 2), y

    (value, y), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value, y


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def planned(planner: Any, num_microbatches: int) -> Any:
    parallel = al.parallelize(step, cluster="dgx-1", num_microbatches=num_microbatches, donate_argnums=0)
    return parallel.trace(*ARGUMENTS).plan(planner=planner)


def mesh_names(plan: Any) -> list[str]:
    """The mesh of each stage; stages on the same devices share one."""
    alike = [[i for i, other in enumerate(plan.stages) if other.submesh == stage.submesh] for stage in plan.stages]
    return ["_".join(map(str, ["stage", *numbers])) for numbers in alike]


def check_instructions(main: judge.Main, lowered: Any, plan: Any) -> None:
    """The tasks and the transfers of a module are those of the plan's program, in its order."""
    program, graph, names = lowered.program, lowered.step.step.graph, mesh_names(plan)
    runs = [each for each in program.instructions if each.kind is InstructionKind.RUN]
    expected = [(names[r.stage], r.stage, r.microbatch, origin_of(program.tasks[r.task])) for r in runs]
    # What makes, joins or reshards sums and outputs is of no task.
    extra = re.compile(r"stage \d+ (zeros|concat|add|reshard)")
    tasks = [op for op in main.fragments if not extra.fullmatch(op.origin[0][0])]
    assert [(op.mesh, op.stage, op.call_counter, op.origin) for op in tasks] == expected
    sent = [each for each in program.instructions if each.kind is InstructionKind.SEND and not each.transfer.in_place]
    assert main.transfers == [
        (names[s.source_stage], names[s.stage], s.transfer.array.shape, mlir_name(graph.values[s.reads[0].value].dtype))
        for s in sent
    ]


HALVES = ("input gradient", "weight gradient")


def origin_of(task: Any) -> tuple[tuple[str, int], ...]:
    """What the dialect calls a task: the stage as many times transposed, or a name of its own."""
    counts = {
        "forward": [0],
        "forward+backward": [0, 1],
        "backward": [1],
        "input gradient": [1],
        "weight gradient": [1],
    }
    if task.kind not in counts:
        return ((task.name, 0),)
    return tuple((f"stage {task.stage}", count) for count in counts[task.kind])


def mlir_name(dtype: str) -> str:
    """The name of a dtype in MLIR; typed keys are words."""
    with mlir.make_ir_context():
        return str(mlir.dtype_to_ir_type(jnp.dtype("uint32" if dtype.startswith("key<") else dtype)))


def inputs_of(main: judge.Main, traced: Any, arguments: Any) -> list[np.ndarray]:
    """The arrays that a module takes: whole leaves, rows of them, or micro-batches."""
    leaves = dict(zip(traced.inputs.names, jax.tree.leaves(arguments), strict=True))
    return [_input(info, kind, leaves) for info, kind in main.arguments]


def _input(info: str, kind: judge.OnMesh, leaves: Any) -> np.ndarray:
    name, _, number = info.partition(", micro-batch ")
    whole = name if name in leaves else name[: name.rindex("[")]
    array = words(leaves[whole])
    if name != whole:
        first, last = name[len(whole) + 1 : -1].split(":")
        array = array[int(first) : int(last)]
    if number:
        (dim,) = [i for i, size in enumerate(kind.shape) if array.shape[i] != size]
        array = np.take(array, range(int(number) * kind.shape[dim], (int(number) + 1) * kind.shape[dim]), dim)
    assert array.shape == kind.shape
    return array


def words(array: Any) -> np.ndarray:
    is_key = jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array, None if is_key else jnp.result_type(array))


def outputs_of(main: judge.Main, results: list[np.ndarray], traced: Any) -> list[np.ndarray]:
    """The leaves of what a step returns, from the results of its module: whole leaves, or parts of their rows."""
    found: dict[str, list[np.ndarray]] = {}
    for name, array in zip(main.results, results, strict=True):
        found.setdefault(name if name in traced.outputs.names else name[: name.rindex("[")], []).append(array)
    return [np.concatenate(found[name]) if len(found[name]) > 1 else found[name][0] for name in traced.outputs.names]


@pytest.mark.parametrize("case", CASES)
def test_fragments_and_transfers_are_the_instructions_of_the_plan(case: str) -> None:
    found = planned(*CASES[case])
    plan = found.last_plan
    module = judge.parsed(plan.export("mpmd", platform="cpu"))
    given = judge.main_of(module)
    assert given.meshes == {
        name: dict(stage.mesh_shape.axis_sizes) for name, stage in zip(mesh_names(plan), plan.stages, strict=True)
    }
    check_instructions(given, found.lower(), plan)
    # No pass of the wheel finds anything to add, to merge or to leave out.
    after = judge.main_of(judge.partitioned(module))
    assert after.transfers == given.transfers
    assert [(op.mesh, op.origin) for op in after.operations if op.name == "mpmd.fragment_call"] == [
        (op.mesh, op.origin) for op in given.fragments
    ]


@pytest.mark.parametrize(
    "case", ["hybrid", "interleaved", *(pytest.param(c, marks=pytest.mark.slow) for c in list(CASES)[2:])]
)
def test_numbers_are_those_of_jit(case: str, devices: Any) -> None:
    """In programs that the wheel's passes and XLA make of the module, with the donations that it marks."""
    found = planned(*CASES[case])
    traced = found.function.traced
    module = judge.partitioned(judge.parsed(found.last_plan.export("mpmd")))
    main = judge.main_of(module)
    got = outputs_of(main, judge.run(module, inputs_of(main, traced, ARGUMENTS)), traced)
    for one, other in zip(got, jax.tree.leaves(jax.jit(step)(*ARGUMENTS)), strict=True):
        assert relative_error(one, np.asarray(other)) < TOLERANCE


def test_equal_tasks_are_one_function() -> None:
    plan = planned(*CASES["gpipe"]).last_plan
    module = judge.parsed(plan.export("mpmd", platform="cpu"))
    called = [str(op.attributes["sym_name"]) for op in module.body.operations if "function_type" in op.attributes]
    fragments = judge.main_of(module).fragments
    assert len(called) == len(set(called)) < len(fragments) / 2


def test_another_process_without_alpa_lite_reads_it(tmp_path: Path) -> None:
    """A module is a file for whoever has jaxlib."""
    planned(*CASES["hybrid"]).last_plan.export("mpmd", tmp_path / "step.mlir")
    code = (
        "import sys; sys.modules['alpa_lite'] = None; import mpmd_judge as judge; from pathlib import Path\n"
        "module = judge.parsed(Path('step.mlir').read_text())\n"
        "given, after = judge.main_of(module), judge.main_of(judge.partitioned(module))\n"
        "assert given.transfers == after.transfers and given.meshes == after.meshes\n"
        "print(len(given.fragments), len(given.transfers), *given.meshes)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(judge.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    program = planned(*CASES["hybrid"]).lower().program
    kinds = Counter(each.kind for each in program.instructions)
    fragments, transfers, *meshes = done.stdout.split()
    assert int(transfers) == kinds["SEND"] and meshes == ["stage_0", "stage_1"]
    assert int(fragments) == kinds["RUN"] + kinds["ZEROS"] + kinds["CONCAT"]


@pytest.mark.parametrize(
    ("planner", "num_microbatches", "reason"),
    [
        (Hybrid(data=8, host_optimizer=True), 1, "memory of the host"),
        (Hybrid(pipeline=2, schedule=Hippie()), 4, "order of tasks"),
    ],
)
def test_what_the_dialect_cannot_say_is_refused(planner: Any, num_microbatches: int, reason: str) -> None:
    plan = planned(planner, num_microbatches).last_plan
    with pytest.raises(PlanError, match=reason):
        plan.export("mpmd")
