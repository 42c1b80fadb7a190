"""AxoNN: the collectives of its formulas, the plans that it degenerates to, and the grids that its search prefers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alpa_lite as al
from alpa_lite.planners import FSDP, AxoNN, DataParallel, Megatron, Planner, PlanRequest, axonn
from alpa_lite.planners.axonn import Grid, GridCollective, MatrixLayer, MatrixLayers, exchanges, modelled_seconds
from cost_models.cluster import with_memory
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import emitted, handed_over, planned
from tests.end_to_end.transformers import WIDE, Training, plan

BATCH, WIDTH, INNER = 32, 16, 64
LAYERS = 2 * [(WIDTH, INNER), (INNER, WIDTH)]
"""Rows and columns of the weights of `_blocks`."""


def _blocks(weights: Any, x: Any) -> Any:
    def loss(weights: Any, x: Any) -> Any:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    return jax.grad(loss, (0, 1))(weights, x)


def _draw(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape) * 0.2, jnp.float32)


ARGUMENTS = [_draw(*sizes) for sizes in LAYERS], _draw(BATCH, WIDTH)


def _by_hand(grid: Grid, gathers: int) -> Counter[tuple[str, str, float]]:
    """Collectives of the blocks: kind, axis and bytes of the buffer (Singh et al. 2024, section on the algorithm)."""
    found = Counter[tuple[str, str, float]]()
    axes, (samples, exchanged) = ("x", "y"), (BATCH / grid.data / grid.z, ("y", "x"))
    for number, (k, n) in enumerate(LAYERS):
        of_k, of_n = axes if number % 2 == 0 else exchanged
        k, n = k / getattr(grid, of_k), n / getattr(grid, of_n)
        found["all_gather", "z", 4 * k * n] += gathers
        found["all_reduce", of_k, 4 * samples * n] += 1
        found["all_reduce", of_n, 4 * samples * k] += 1
        found["reduce_scatter", "z", 4 * k * n] += 1
        found["all_reduce", "data", 4 * k * n / grid.z] += 1
    return Counter({use: count for use, count in found.items() if getattr(grid, use[1]) > 1})


@pytest.mark.parametrize(
    "grid",
    [Grid(1, 2, 2, 2), Grid(2, 1, 2, 2), Grid(2, 2, 2, 1), Grid(1, 2, 1, 4), Grid(1, 1, 4, 2), Grid(1, 8, 1, 1)],
    ids=str,
)
def test_a_layer_has_the_collectives_of_the_formulas(grid: Grid, devices: Any) -> None:
    """An all_gather, two all_reduces and a reduce_scatter per layer, of these bytes, planned, priced and emitted."""
    planner = AxoNN(gx=grid.x, gy=grid.y, gz=grid.z, gdata=grid.data)
    options = dict(cluster=eager_cluster(), num_microbatches=1, batch_argnums=1)
    compiled = al.parallelize(_blocks, planner=planner, **options).compiled(*ARGUMENTS)
    sent = Counter[tuple[str, str, float]]()
    for use in compiled.plan.prediction.collectives:
        sent[str(use.kind), use.axis, use.bytes] += round(use.count)
    assert sent == _by_hand(grid, gathers=1)
    modelled = Counter[tuple[str, str, float]]()
    for each in exchanges(planner, _layers(_blocks, ARGUMENTS), grid):
        modelled[each.kind, each.axis, each.bytes] += each.times
    assert modelled == sent
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    assert_same(compiled(*ARGUMENTS), jax.jit(_blocks)(*ARGUMENTS))


def _layers(step: Any, arguments: Any) -> MatrixLayers:
    return MatrixLayers.of(al.parallelize(step, batch_argnums=len(arguments) - 1).trace(*arguments).step(1).step)


@pytest.mark.parametrize("resharded", [False, True])
def test_over_z_alone_it_is_fsdp(resharded: bool) -> None:
    training = Training(model=WIDE, batch_size=64)
    ours = plan(training, AxoNN(gx=1, gy=1, gdata=1, reshard_after_forward=resharded))
    theirs = plan(training, FSDP(reshard_after_forward=resharded))
    assert planned(ours) == planned(theirs)
    assert ours.prediction.step_seconds == pytest.approx(theirs.prediction.step_seconds)


def test_over_data_alone_it_is_data_parallel() -> None:
    training = Training(model=WIDE, batch_size=64)
    assert planned(plan(training, AxoNN(gx=1, gy=1, gz=1))) == planned(plan(training, DataParallel()))


@pytest.mark.parametrize(("degrees", "large"), [({"gy": 8}, 1.0), ({"gx": 8}, 4.0)], ids=["y", "x"])
def test_over_one_axis_of_weights_there_are_megatrons_sums(degrees: dict[str, int], large: float) -> None:
    """Of each block one sum per pass: over y of its result, over x of its hidden units, which are more."""
    counts = {}
    for planner in (AxoNN(**{"gx": 1, "gy": 1, "gz": 1, "gdata": 1, **degrees}), Megatron(sequence_parallel=False)):
        found = al.plan(_blocks, *ARGUMENTS, cluster=eager_cluster(), planner=planner, num_microbatches=1)
        counts[type(planner).__name__] = planned(found)
    (ours,), (theirs,) = counts["AxoNN"].items(), counts["Megatron"].items()
    assert ours[1] == theirs[1] == len(LAYERS)
    assert ours[0] == (theirs[0][0], large * theirs[0][1], 8)


def test_the_residual_stream_is_over_x_and_what_lies_between_over_y() -> None:
    found = plan(Training(model=WIDE, batch_size=64), AxoNN(gx=2, gy=2, gz=2))
    (stage,) = found.stages
    sizes = {WIDE.hidden: "x", WIDE.inner: "y", WIDE.num_heads: "y"}
    for name, spec in stage.specs.items():
        dims = stage.shapes[name].dims
        if "/params/" in name and "embedding" not in name and len(dims) > 1:
            split = {axis: dims[dim] for dim, axes in enumerate(spec.dims) for axis in axes if axis != "z"}
            assert split and all(sizes[size] == axis for axis, size in split.items()), (name, spec)
            assert "z" in spec.axes
    assert not found.notes


def test_microbatches_gather_anew_and_sum_over_data_once() -> None:
    planner = AxoNN(gx=2, gy=2, gz=2)
    by_number = {
        m: al.plan(_blocks, *ARGUMENTS, cluster=eager_cluster(), planner=planner, num_microbatches=m, batch_argnums=1)
        for m in (1, 2)
    }
    one, two = (Counter(u.kind for u in found.prediction.collectives for _ in range(round(u.count))) for found in
                by_number.values())  # fmt: skip
    assert two == {kind: 2 * count for kind, count in one.items()}


def _scanned(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(ws)
    return ws - 0.1 * grads, value


def _gated(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        gate, up = jnp.split(x @ ws[0], 2, axis=1)
        return jnp.mean((jnp.cumsum(jax.nn.silu(gate) * up, axis=1) @ ws[1]) ** 2)

    value, grads = jax.value_and_grad(loss)(ws)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


@pytest.mark.parametrize(
    ("step", "weights", "note"),
    [
        (_scanned, _draw(3, 16, 16), "have two dims on x, as no exchange of x and y reaches all layers"),
        (_gated, [_draw(16, 64), _draw(32, 6)], ""),
        (_gated, [_draw(16, 62), _draw(31, 6)], "those of shape [31, 6] at "),
    ],
    ids=["one weight of all layers", "halves and running sums", "odd"],
)
def test_what_cannot_be_split_so_still_runs_and_is_noted(step: Any, weights: Any, note: str, devices: Any) -> None:
    x = _draw(32, 16)
    options = dict(cluster=eager_cluster(), planner=AxoNN(gx=2, gy=2, gz=2), num_microbatches=1)
    compiled = al.parallelize(step, **options).compiled(weights, x)
    assert (note in compiled.plan.notes[0]) if note else not compiled.plan.notes
    assert handed_over(compiled) == planned(compiled.plan)
    assert_same(compiled(weights, x), jax.jit(step)(weights, x))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_layers_exchange_the_axes_wherever_they_can(edges: list[tuple[int, int]]) -> None:
    layers = [MatrixLayer(None, 0, k, n, 1) for k, n in edges]  # type: ignore[arg-type]
    axis_of = axonn._colours(layers)
    graph = nx.Graph(edges)
    assert set(axis_of) == set(graph) and axis_of[edges[0][0]] == "x"
    for part in nx.connected_components(graph):
        exchanged = all(axis_of[k] != axis_of[n] for k, n in edges if k in part)
        assert exchanged == nx.is_bipartite(graph.subgraph(part))


@pytest.mark.slow
def test_the_search_is_nearly_as_good_as_planning_every_grid() -> None:
    training = Training(model=WIDE, batch_size=64)
    found, everything = (plan(training, AxoNN(most_plans=number)) for number in (5, 100))
    seconds = dict(everything.alternatives) | {everything.name: everything.prediction.step_seconds}
    # 8 = 2 · 2 · 2: three factors of 2 on four axes.
    assert len(seconds) == 20 and everything.prediction.step_seconds == min(seconds.values())
    assert len(found.alternatives) == 4
    assert found.prediction.step_seconds <= 1.05 * everything.prediction.step_seconds
    assert found.prediction.step_seconds == min(seconds[name] for name, _ in [*found.alternatives, (found.name, 0.0)])


@dataclass(frozen=True, kw_only=True)
class _Modelled(Planner):
    """Records what the model says about the grid of a planner, and plans it."""

    planner: AxoNN
    seconds: list[float] = field(default_factory=list[float])

    @property
    def name(self) -> str:
        return self.planner.name

    def plan(self, request: PlanRequest) -> al.Plan:
        layers, (grid,) = MatrixLayers.of(request.step_at(1, 0)), self.planner._grids(8)
        self.seconds.append(modelled_seconds(self.planner, request, layers, grid))
        # Of a model whose devices take no time to compute, the collectives remain.
        device = request.cluster.device
        flops = dict.fromkeys(device.peaks, 1e30)
        device = replace(device, peak_flops=flops, memory_bandwidth=1e30, launch_seconds=0.0)
        fast = replace(request, cluster=replace(request.cluster, device=device))
        self.seconds.append(modelled_seconds(self.planner, fast, layers, grid))
        return self.planner.plan(request)


def test_the_model_prices_the_collectives_as_the_plan_does() -> None:
    planner = _Modelled(planner=AxoNN(gx=2, gy=2, gz=2))
    found = al.plan(_blocks, *ARGUMENTS, cluster=eager_cluster(), planner=planner, num_microbatches=1)
    modelled, of_collectives = planner.seconds
    sent = sum(use.seconds * use.count for use in found.prediction.collectives)
    assert of_collectives == pytest.approx(sent) and modelled > of_collectives


def test_grids_that_do_not_fit_are_refused_and_the_next_is_planned() -> None:
    cluster = eager_cluster()
    least = al.plan(_blocks, *ARGUMENTS, cluster=cluster, planner=AxoNN(gx=2, gy=2, gz=2), num_microbatches=1)
    tight = with_memory(cluster, max(least.prediction.peak_bytes))
    found = al.plan(_blocks, *ARGUMENTS, cluster=tight, planner=AxoNN(most_plans=100), num_microbatches=1)
    assert max(found.prediction.peak_bytes) <= max(least.prediction.peak_bytes)
    assert any("does not fit" in why for _, why in found.refusals)


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (AxoNN(gx=3), r"The degrees 3 of AxoNN \(x3\) do not make up 8 devices. Choose gx, gy, gz and gdata"),
        (AxoNN(gx=2, gy=2, gz=1, gdata=1), "The degrees 1 × 1 × 2 × 2 of AxoNN"),
        (AxoNN(gz=8, gx=1, gy=1, gdata=1), "but it has 4 samples"),
    ],
)
def test_degrees_that_cannot_be_are_refused(planner: AxoNN, message: str) -> None:
    arguments = ARGUMENTS[0], _draw(4, WIDTH)
    with pytest.raises(al.errors.PlanError, match=message):
        al.plan(_blocks, *arguments, cluster=eager_cluster(), planner=planner, num_microbatches=1)


def test_a_step_without_weights_is_refused() -> None:
    with pytest.raises(al.errors.PlanError, match=r"the step has none\. Use al.planners.DataParallel"):
        al.plan(lambda x: jnp.tanh(x).sum(), _draw(32, 8), cluster=eager_cluster(), planner=AxoNN())


def test_an_exchange_counts_each_trip_of_a_loop() -> None:
    ws = jnp.stack([_draw(16, 16)] * 3)
    layers = _layers(_scanned, (ws, _draw(32, 16)))
    found = exchanges(AxoNN(), layers, Grid(1, 8, 1, 1))
    assert found == [
        GridCollective("all_gather", "z", 4.0 * 16 * 16, 3),
        GridCollective("reduce_scatter", "z", 4.0 * 16 * 16, 3),
    ]
