"""What is planned is what runs: XLA's collectives are those of the plan, by kind, bytes, devices and number.

The text of every executable is read; a combined collective counts as its parts, and each counts as often as its task
runs per step. Nothing may be added by XLA. What a plan has too many of is listed case by case (`Surplus`).
"""

from __future__ import annotations

import re
from collections import Counter
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


def emitted(compiled: Any) -> Counter[Collective]:
    """Collectives of one step over all executables."""
    executor = compiled.executor
    runs = Counter(i.task for i in executor.program.instructions if i.kind == "RUN")
    total: Counter[Collective] = Counter()
    for number, executable in enumerate(executor.executables):
        for collective in collectives_in(executable.compiled.as_text()):
            total[collective] += runs[number]
    return total


def planned(plan: al.Plan) -> Counter[Collective]:
    """Collectives of one step by the plan."""
    total: Counter[Collective] = Counter()
    for use in plan.prediction.collectives:
        total[(use.kind, round(use.bytes), use.num_devices)] += use.count
    return total


def _compile(model: str, planner: str, num_microbatches: int, optimizer: str = "momentum") -> Any:
    training = Training(model=model, optimizer=optimizer)
    step = al.parallelize(
        training.step(), cluster=eager_cluster(), planner=PLANNERS[planner], num_microbatches=num_microbatches
    )
    return step.compiled(training.start(), make_batch(MODELS[model], 0), jax.random.key(0))


EQUAL = [
    *[("mlp", planner, m) for planner in ("data_parallel", "zero_2", "fsdp", "hybrid", "pipeline_2") for m in (1, 4)],
    ("mlp", "megatron", 1),
    ("gpt", "data_parallel", 4),
    ("gpt", "zero_2", 1),
    ("cnn", "data_parallel", 1),
    ("cnn", "zero_2", 4),
]


@pytest.mark.parametrize(("model", "planner", "num_microbatches"), EQUAL)
def test_collectives_of_the_executables_are_those_of_the_plan(
    model: str, planner: str, num_microbatches: int, devices: Any
) -> None:
    compiled = _compile(model, planner, num_microbatches)
    assert emitted(compiled) == planned(compiled.plan)


@pytest.mark.parametrize(
    ("model", "planner", "num_microbatches"),
    [("mlp", "megatron", 4), ("gpt", "megatron", 1), ("gpt", "fsdp", 4), ("gpt", "hybrid", 4), ("cnn", "auto", 4)],
)
def test_xla_adds_no_collective_and_leaves_out_only_repeated_gathers(
    model: str, planner: str, num_microbatches: int, devices: Any
) -> None:
    compiled = _compile(model, planner, num_microbatches, "momentum+clip")
    got, want = emitted(compiled), planned(compiled.plan)
    assert not got - want
    # The plan prices forward and backward apart; what both gather is gathered once where they are one executable.
    assert {kind for kind, _, _ in want - got} <= {"all_gather"}
    assert sum((want - got).values()) <= 0.2 * sum(want.values())


def test_zero_reduces_gradients_by_reduce_scatter_once_per_step(devices: Any) -> None:
    compiled = _compile("mlp", "zero_2", 4)
    kinds = Counter(kind for kind, _, _ in emitted(compiled).elements())
    num_parameters = 8
    assert kinds["reduce_scatter"] == num_parameters
    assert kinds["all_reduce"] == 1  # the loss


def test_data_parallel_gradients_are_reduced_once_per_step_not_per_micro_batch(devices: Any) -> None:
    once, often = (emitted(_compile("mlp", "data_parallel", m)) for m in (1, 4))
    assert once == often and {kind for kind, _, _ in once} == {"all_reduce"}


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
