"""What is planned is what runs: XLA gets the collectives of the plan, by kind, bytes, devices and number.

The program of every task is read twice: as it is handed to XLA, where it must agree exactly, and as XLA compiled it,
where nothing may be added. XLA on CPU drops barriers and may then merge a gather of the backward pass with an equal one
of the forward pass. A combined collective counts as its parts, and each counts as often as its task runs per step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import jax
import pytest

import alpa_lite as al
from tests.end_to_end.cases import MODELS, PLANNERS, Training, eager_cluster, make_batch

Collective = tuple[str, int, int]
"""Kind, bytes of the buffer per device, devices in a group."""

_COLLECTIVE = re.compile(
    r" = (?P<type>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")
_BITS = re.compile(r"\d+")


def collectives_in(text: str) -> list[Collective]:
    """The collectives of an executable outside loops, combined ones taken apart."""
    found: list[Collective] = []
    for line in text.splitlines():
        match = _COLLECTIVE.search(re.sub(r"/\*.*?\*/", "", line))
        if match is None:
            continue
        kind, devices = match["kind"].replace("-", "_"), _group_size(match["rest"])
        parts = [_bytes_of(dtype, dims) for dtype, dims in _SHAPE.findall(match["type"])]
        if kind == "all_to_all" and len(parts) > 1:
            parts = [sum(parts)]
        found += [(kind, size * (devices if kind == "reduce_scatter" else 1), devices) for size in parts]
    return found


def _bytes_of(dtype: str, dims: str) -> int:
    bits = _BITS.search(dtype)
    item = 1 if bits is None else int(bits[0]) // 8
    return item * prod(int(n) for n in dims.split(",") if n)


def _group_size(attributes: str) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return len(listed[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)
    assert counted, attributes
    return int(counted[1])


_OPERATION = re.compile(r"stablehlo\.(?P<kind>all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute)\"?\(")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)>")


def collectives_handed_over(text: str) -> list[Collective]:
    """The collectives of a program in StableHLO, outside loops; variadic ones taken apart."""
    found: list[Collective] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        match = _OPERATION.search(line)
        if match is None:
            continue
        groups = re.search(r"replica_groups = dense<.*?> : tensor<\d+x(\d+)xi64>", line)
        assert groups is not None, line
        # The types of an operation with a region stand where the region closes.
        signature = next(later for later in lines[number:] if ") -> " in later)
        operands, results = signature.rsplit(" : (", 1)[1].split(") -> ")
        buffers = operands if match["kind"] == "reduce_scatter" else results
        for dims, dtype in _TENSOR.findall(buffers):
            found.append((match["kind"], _bytes_of(dtype, dims.rstrip("x").replace("x", ",")), int(groups[1])))
    return found


def count(compiled: Any, read: Callable[[Any], list[Collective]]) -> Counter[Collective]:
    """Collectives of one step over all executables, as `read` finds them in each."""
    executor = compiled.executor
    runs = Counter(i.task for i in executor.program.instructions if i.kind == "RUN")
    total: Counter[Collective] = Counter()
    for number, executable in enumerate(executor.executables):
        for collective in read(executable):
            total[collective] += runs[number]
    return total


def handed_over(compiled: Any) -> Counter[Collective]:
    """Collectives of one step as they are handed to XLA."""
    return count(compiled, lambda e: collectives_handed_over(jax.jit(e.function).lower(*e.avals).as_text()))


def emitted(compiled: Any) -> Counter[Collective]:
    """Collectives of one step in the compiled executables."""
    return count(compiled, lambda e: collectives_in(e.compiled.as_text()))


def planned(plan: al.Plan) -> Counter[Collective]:
    """Collectives of one step by the plan."""
    total: Counter[Collective] = Counter()
    for use in plan.prediction.collectives:
        total[(use.kind, round(use.bytes), use.num_devices)] += use.count
    return total


@cache
def _compile(model: str, planner: str, num_microbatches: int, optimizer: str) -> Any:
    training = Training(model=model, optimizer=optimizer)
    step = al.parallelize(
        training.step(), cluster=eager_cluster(), planner=PLANNERS[planner], num_microbatches=num_microbatches
    )
    return step.compiled(training.start(), make_batch(MODELS[model], 0), jax.random.key(0))


CASES = [
    *[("mlp", planner, 4) for planner in PLANNERS],
    *[("mlp", planner, 1) for planner in ("fsdp", "megatron", "hybrid")],
    ("gpt", "megatron", 1),
    ("gpt", "fsdp", 4),
]
SLOW = [("cnn", "auto", 4), ("gpt", "data_parallel", 4), ("gpt", "zero_2", 1), ("gpt", "hybrid", 4)]


@pytest.mark.parametrize(
    ("model", "planner", "num_microbatches"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_the_collectives_that_run_are_those_of_the_plan(
    model: str, planner: str, num_microbatches: int, devices: Any
) -> None:
    compiled = _compile(model, planner, num_microbatches, "momentum+clip")
    plan = planned(compiled.plan)
    assert handed_over(compiled) == plan
    compiled_to = emitted(compiled)
    assert not compiled_to - plan, "XLA added a collective"
    merged = plan - compiled_to
    assert {kind for kind, _, _ in merged} <= {"all_gather", "all_to_all"}
    assert all(compiled_to[collective] > 0 for collective in merged)


def test_zero_reduces_gradients_by_reduce_scatter_once_per_step(devices: Any) -> None:
    compiled = _compile("mlp", "zero_2", 4, "momentum+clip")
    found = emitted(compiled)
    assert sum(n for (kind, _, _), n in found.items() if kind == "reduce_scatter") == 8  # parameters
    # The loss, and the square of each gradient's norm.
    assert {size for kind, size, _ in found if kind == "all_reduce"} == {4}


def test_data_parallel_gradients_are_reduced_once_per_step_not_per_micro_batch(devices: Any) -> None:
    once, often = (emitted(_compile("mlp", "data_parallel", m, "momentum+clip")) for m in (1, 4))
    assert once == often and {kind for kind, _, _ in once} == {"all_reduce"}


def test_parameters_split_by_fsdp_are_gathered_in_both_passes(devices: Any) -> None:
    plan = planned(_compile("mlp", "fsdp", 4, "momentum+clip").plan)
    gathered = sum(number for (kind, _, _), number in plan.items() if kind == "all_gather")
    assert gathered > 4 * len(jax.tree.leaves(Training(model="mlp").start().params))


def test_the_text_of_hlo_is_read_right() -> None:
    text = """
      %a = f32[128,64]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
      ROOT %b = (f32[8]{0}, /*index=1*/bf16[4,4]{1,0}) all-reduce-start(%p, %q), replica_groups=[2,4]<=[8]T(1,0)
      %c = f32[16]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}
      %d = f32[16]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
      %e = (s32[2]{0}, s32[2]{0}) all-to-all(%p, %q), replica_groups={{0,1}}
      %f = f32[8]{0} add(%all-reduce.1, %p)
    """
    assert collectives_in(text) == [
        ("all_reduce", 128 * 64 * 4, 4),
        ("all_reduce", 32, 4),
        ("all_reduce", 32, 4),
        ("reduce_scatter", 16 * 4 * 8, 8),
        ("all_gather", 64, 2),
        ("all_to_all", 16, 2),
    ]
