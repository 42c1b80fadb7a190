"""Prices of single ops: work of one device, bodies of control flow, collectives of split reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from alpa_lite.plan.estimator import Estimator
from alpa_lite.plan.plan import OpPlacement
from alpa_lite.plan.pricing import Pricer, own_collectives, transfer_seconds
from alpa_lite.plan.walk import Application, Walk, replicated_placement
from alpa_lite.program.ir import Graph, Op
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec, replicated
from alpa_lite.sharding.transfer import ArrayForm, Placement, plan_transfer
from alpa_lite.trace.from_jaxpr import from_jaxpr
from cost_models.cluster import load_cluster
from cost_models.composed import ComposedCostModel
from cost_models.hardware import Backend

PRICER = Pricer(
    cost_model=ComposedCostModel(load_cluster("p3.16xlarge")),
    submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=8),
    mesh=LogicalMesh(axis_names=("x",), shape=(8,)),
)
N = 256
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)


def _op(function: Callable[..., Any], primitive: str, *args: Any) -> tuple[Graph, Op]:
    graph = from_jaxpr(jax.make_jaxpr(function)(*args), [f"arg{i}" for i in range(len(args))]).graph
    return graph, next(op for op in graph.ops if op.primitive == primitive)


def _replicated(function: Callable[..., Any], primitive: str, *args: Any) -> tuple[float, float]:
    """Seconds and FLOPs of one op, bodies included, that runs whole on every device."""
    graph, op = _op(function, primitive, *args)
    estimator = Estimator(PRICER, stage=0, phase="forward", runs=1)
    walk: Walk[None] = Walk(graph, {}, PRICER.sizes, estimator)
    for value in graph.values:
        walk.put(value.id, replicated(value.rank), None)
    walk.run([op.id])
    return estimator.compute_seconds, estimator.flops


def test_a_matrix_product_costs_two_flops_per_multiplication_and_splits_evenly() -> None:
    graph, op = _op(jnp.matmul, "dot_general", SQUARE, SQUARE)
    whole = PRICER.price(graph, op, replicated_placement(graph, op))
    split = PRICER.price(graph, op, OpPlacement(factors=(("x",), (), ())))
    assert whole.flops == 2 * N**3 and split.flops == 2 * N**3 / 8
    assert split.seconds < whole.seconds


def test_a_product_of_experts_is_issued_expert_by_expert() -> None:
    """Where the host issues kernels, and not where a compiled program holds them; other products are one kernel."""
    shapes = ((8, 16, 32), (8, 32, 64), (8, 64, 32))  # eight experts
    tokens, weights, scores = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    def calls(
        equation: str, *args: Any, samples: tuple[bool, bool, bool], seconds: float, split: bool = False
    ) -> float:
        graph, op = _op(lambda x, y: jnp.einsum(equation, x, y), "dot_general", *args)
        model = ComposedCostModel(load_cluster("p3.16xlarge"), Backend(call_seconds=seconds))
        # Which arrays have samples; the numbers of their dims do not matter.
        batch = {v: 0 if has else None for v, has in zip((*op.operands, *op.results), samples, strict=True)}
        estimator = Estimator(
            replace(PRICER, cost_model=model),
            stage=0,
            phase="forward",
            runs=1,
            batch_dims=lambda graph: [batch.get(v) for v in range(len(graph.values))],
        )
        placement = replicated_placement(graph, op)
        if split:
            rule = rule_of_op(graph, op.id)
            placement = replace(placement, factors=tuple(("x",) if f == 0 else () for f in range(len(rule.sizes))))
        specs = tuple(replicated(graph.values[v].rank) for v in (*op.operands, *op.results))
        application = Application(graph, op, rule_of_op(graph, op.id), placement, specs[:2], specs[2:])
        estimator.apply(application, [Estimator.NOTHING] * 2)
        return estimator.calls

    forward, expert = "etw,ewm->etm", (True, False, True)
    assert calls(forward, tokens, weights, samples=expert, seconds=1e-5) == 8
    assert calls(forward, tokens, weights, samples=expert, seconds=1e-5, split=True) == 1
    assert calls(forward, tokens, weights, samples=expert, seconds=0.0) == 1
    # As of a gradient, which has no samples; and as of the scores of attention, where all have.
    assert calls("etw,etm->ewm", tokens, tokens, samples=(True, True, False), seconds=1e-5) == 8
    assert calls("etw,emw->etm", tokens, scores, samples=(True, True, True), seconds=1e-5) == 1


def test_what_one_device_does_costs_the_same_on_every_mesh() -> None:
    graph, op = _op(jnp.matmul, "dot_general", SQUARE, SQUARE)
    turned = LogicalMesh(axis_names=("a", "b"), shape=(2, 4))
    PRICER.price(graph, op, OpPlacement(factors=(("x",), (), ())))
    here = PRICER.elsewhere(PRICER.submesh, turned)
    for factors in ((("a",), (), ()), ((), ("b",), ()), (("a",), ("b",), ())):
        placement = OpPlacement(factors=factors)
        known = Pricer(cost_model=PRICER.cost_model, submesh=PRICER.submesh, mesh=turned).price(graph, op, placement)
        assert here.price(graph, op, placement) == known


def test_a_loop_of_unknown_length_costs_one_trip() -> None:
    seconds, flops = _replicated(
        lambda x: jax.lax.while_loop(lambda y: jnp.sum(y) < 1.0, lambda y: y @ y, x), "while", SQUARE
    )
    product = _replicated(jnp.matmul, "dot_general", SQUARE, SQUARE)
    assert 2 * N**3 <= flops <= 2 * N**3 + 2 * N**2  # and the sum of the condition
    assert seconds > product[0]


def test_branches_cost_what_they_cost_on_average() -> None:
    def choose(flag: Any, x: Any) -> Any:
        return jax.lax.cond(flag, lambda y: y @ y @ y, lambda y: y @ y, x)

    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    seconds, flops = _replicated(choose, "cond", flag, SQUARE)
    product = _replicated(jnp.matmul, "dot_general", SQUARE, SQUARE)
    assert flops == 1.5 * product[1]
    assert seconds == pytest.approx(1.5 * product[0])


def test_a_loop_inside_a_loop_counts_its_trips() -> None:
    def inner(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=5)[0]

    _, flops = _replicated(lambda x: jax.lax.while_loop(lambda y: y[0, 0] < 1.0, inner, x), "while", SQUARE)
    assert 5 * 2 * N**3 <= flops <= 5 * 2 * N**3 + 10


@pytest.mark.parametrize(("function", "reduces"), [(jnp.max, True), (jnp.sum, False)])
def test_only_reductions_that_cannot_stay_partial_are_combined_at_once(function: Any, reduces: bool) -> None:
    graph, op = _op(function, f"reduce_{function.__name__}", SQUARE)
    placement = OpPlacement(factors=(("x",), ()))
    combined = PRICER.collective_seconds("all_reduce", 4.0, ("x",)) if reduces else 0.0
    seconds = PRICER.price(graph, op, placement).seconds
    assert PRICER.op_seconds(graph, op, placement) == pytest.approx(seconds + combined)


def test_halos_are_priced_side_by_side_with_their_corners() -> None:
    image, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 32, 64, 3), (3, 5, 3, 8)))

    def convolve(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    graph, op = _op(convolve, "conv_general_dilated", image, kernel)
    rule = rule_of_op(graph, op.id)
    height, width = (dims[0] for dims in rule.operands[0][1:3])
    factors = tuple(("x",) if f == height else ("y",) if f == width else () for f in range(len(rule.sizes)))
    found = own_collectives(graph, op, OpPlacement(factors=factors), {"x": 2, "y": 4})
    # 3 taps along the height, 5 along the width; the columns sent second hold the rows received first.
    row, column = 4.0 * 2 * 1 * (64 / 4) * 3, 4.0 * 2 * (32 / 2 + 2) * 2 * 3
    assert found == [
        ("permute", ("x",), row),
        ("permute", ("x",), row),
        ("permute", ("y",), column),
        ("permute", ("y",), column),
    ]


def test_what_a_callback_returns_is_shared_by_one_all_reduce_per_result() -> None:
    results = jax.ShapeDtypeStruct((3,), jnp.bool_), jax.ShapeDtypeStruct((5,), jnp.float32)
    graph, op = _op(lambda x: io_callback(lambda _: None, results, x), "io_callback", SQUARE)
    placement = replicated_placement(graph, op)
    shared = sum(PRICER.collective_seconds("all_reduce", size, ("x",)) for size in (3.0, 20.0))
    seconds = PRICER.price(graph, op, placement).seconds
    assert PRICER.op_seconds(graph, op, placement) == pytest.approx(seconds + shared)


def _between(
    source: Spec, target: Spec, *, first: int, direct_bytes: float = 0, shared_processor: bool = False
) -> float:
    """Seconds for 1 GiB from the first four devices to four others, on hosts of eight."""
    ends = [
        Placement(
            submesh=Submesh(first_device=at, num_hosts=1, devices_per_host=4),
            mesh=LogicalMesh(axis_names=("x",), shape=(4,)),
            spec=spec,
        )
        for at, spec in ((0, source), (first, target))
    ]
    planned = plan_transfer(ArrayForm((1 << 14, 1 << 14), 4), *ends, devices_per_host=8, direct_bytes=direct_bytes)
    cluster = replace(load_cluster("p3.16xlarge", num_hosts=2), shared_processor=shared_processor)
    return transfer_seconds(planned, ComposedCostModel(cluster))


def test_transfers_take_what_the_busiest_device_or_host_does() -> None:
    model, whole, split = (
        ComposedCostModel(load_cluster("p3.16xlarge", num_hosts=2)),
        Spec(((), ())),
        Spec((("x",), ())),
    )
    assert _between(split, split, first=4) == model.transfer_seconds(2**28, crosses_hosts=False)
    assert _between(split, split, first=8) == model.transfer_seconds(2**30, crosses_hosts=True, num_links=4)
    assert _between(whole, whole, first=8, direct_bytes=2**40) == pytest.approx(
        4 * _between(split, split, first=8), rel=0.01
    )
    gathered = _between(whole, whole, first=8) - _between(split, split, first=8)
    pricer = Pricer(
        cost_model=model,
        submesh=Submesh(first_device=8, num_hosts=1, devices_per_host=4),
        mesh=LogicalMesh(axis_names=("x",), shape=(4,)),
    )
    assert gathered == pytest.approx(pricer.collective_seconds("all_gather", 2.0**30, ("x",)))
    assert _between(whole, whole, first=0) == 0.0


def test_on_a_shared_processor_pieces_are_copied_one_after_the_other() -> None:
    split = Spec((("x",), ()))
    alone, shared = (_between(split, split, first=4, shared_processor=shared) for shared in (False, True))
    assert shared == pytest.approx(4 * alone, rel=0.01)


def test_partial_sums_pay_for_their_resolution() -> None:
    summed = Spec(((), ()), ("x",))
    assert _between(summed, Spec((("x",), ())), first=8) > _between(Spec((("x",), ())), Spec((("x",), ())), first=8)
