"""Distributed matrix products: numbers, what they send and hold against the formulas, and the one that a plan finds."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.planners import OnMesh
from benchmarks import matrix_products as products_module
from benchmarks.matrix_products import (
    Sizes,
    agarwal,
    cannon,
    count_sent,
    gathered,
    one_dimensional,
    products,
    row,
    summa,
)
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import collectives_in, emitted, planned

SIZES = Sizes(48, 96, 144)
CASES = {
    "1-D": one_dimensional(8),
    "2-D, gathered": gathered(2),
    "SUMMA": summa(2),
    "Cannon": cannon(2),
    "2.5-D": cannon(2, 2),
    "3-D": agarwal(2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_is_that_of_one_device_and_sends_and_holds_what_the_formula_says(name: str, devices: Any) -> None:
    for sizes in (SIZES, Sizes(96, 96, 96)):
        found = row(name, CASES[name], sizes)
        assert found.error is not None and found.held_bytes is not None and found.error < 1e-5
        assert found.sent_bytes == pytest.approx(found.formula_sent_bytes)
    # Of square matrices: XLA transposes blocks of others. Its account has a few scalars more.
    assert found.held_bytes <= found.formula_held_bytes + 512
    # A loop of one trip is written out, in which blocks that travel take the place of those that were read.
    if name != "Cannon":
        assert found.held_bytes == pytest.approx(found.formula_held_bytes, abs=512)


@pytest.mark.parametrize("num_devices", [8, 16, 32, 64, 81, 512])
def test_larger_grids_send_what_the_formulas_say(num_devices: int) -> None:
    """Counted on programs for devices that are not there."""
    sizes = Sizes(num_devices, 2 * num_devices, 3 * num_devices)
    for name, product in products(num_devices).items():
        assert product.num_devices == num_devices
        sent = sum(each.bytes for each in count_sent(product, sizes))
        assert sent == pytest.approx(4 * product.sends(sizes)), name


def test_of_as_many_devices_more_dims_of_the_grid_send_less() -> None:
    """The reason of 3-D products (Agarwal et al. 1995), and that copies trade memory for messages (2.5-D)."""
    sizes, found = Sizes(4096, 4096, 4096), products(64)
    sends = {name: product.sends(sizes) for name, product in found.items()}
    assert sends["3-D"] < sends["2.5-D, 4 copies"] < sends["Cannon"] < sends["1-D"]
    holds = {name: product.holds(sizes) for name, product in found.items()}
    assert holds["SUMMA"] < holds["Cannon"] < holds["3-D"] < holds["2-D, gathered"] < holds["1-D"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("2-D, gathered", {"all_gather": 2}),
        ("Cannon", {"permute": 4}),
        ("SUMMA", {"all_reduce": 4}),
        ("3-D", {"all_gather": 2, "reduce_scatter": 1}),
    ],
)
def test_the_compiled_program_has_the_collectives(name: str, kinds: dict[str, int], devices: Any) -> None:
    product = CASES[name]
    mesh = jax.make_mesh(tuple(product.grid.values()), tuple(product.grid), devices=devices[: product.num_devices])
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in (((48, 96), product.left), ((96, 144), product.right))
    ]
    text = jax.jit(product.on(mesh)).lower(*shapes).compile().as_text()
    found = Counter[str]()
    for (kind, *_), count in collectives_in(text).items():
        found[kind] += round(count)
    assert found == kinds == Counter(each.kind for each in count_sent(product, SIZES))


def test_both_passes_of_the_3d_product_gather_and_scatter_three_times() -> None:
    """6 (q-1)/q³ of a square matrix in all (the 3-D row of the ColossalAI documentation's table)."""
    product = agarwal(2)
    mesh = jax.sharding.AbstractMesh((2, 2, 2), tuple(product.grid))

    def both(a: Any, b: Any, c: Any) -> Any:
        result, back = jax.vjp(product.on(mesh), a, b)
        return result, back(c)

    jaxpr = jax.make_jaxpr(both)(*[jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3)
    sent = [*products_module._sent(jaxpr.jaxpr, product.grid)]
    assert Counter(each.kind for each in sent) == {"all_gather": 3, "reduce_scatter": 3}
    assert sum(each.bytes for each in sent) == pytest.approx(4 * 6 * (2 - 1) / 2**3 * 64 * 64)


def test_a_plan_finds_the_3d_product(devices: Any) -> None:
    """Its operands and its result split as Agarwal's, the integer program gathers both and scatters the sum."""
    product, (m, k, n) = agarwal(2), Sizes(256, 256, 256)
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((m, k), (k, n)))
    planner = OnMesh(
        axes=product.grid,
        pins={"a": tuple(product.left), "b": tuple(product.right)},
        outputs={"": tuple(product.result)},
    )

    def multiply(a: Any, b: Any) -> Any:
        return a @ b

    compiled = al.parallelize(multiply, cluster=eager_cluster(), planner=planner).compiled(a, b)
    block = 4 * 256 * 256 // 4
    assert planned(compiled.plan) == {("all_gather", block, 2): 2, ("reduce_scatter", block, 2): 1}
    assert emitted(compiled) == planned(compiled.plan)
    assert compiled(a, b).sharding.spec == P("i", ("j", "l"))
    assert_same(compiled(a, b), jax.jit(multiply)(a, b))


def test_copies_that_do_not_divide_the_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="3 copies share 4 steps, which they do not divide"):
        cannon(4, 3)


def test_the_kept_results_agree_with_the_formulas() -> None:
    """Run on 64 virtual devices: all that was counted, and XLA's account of the memory."""
    rows = json.loads(products_module.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert {each["num_devices"] for each in rows} == {8, 16, 32, 64}
    for each in rows:
        product, sizes = products(each["num_devices"])[each["name"]], Sizes(*each["sizes"])
        assert each["sent_bytes"] == pytest.approx(4 * product.sends(sizes)) and each["error"] < 1e-5
        assert each["held_bytes"] == pytest.approx(4 * product.holds(sizes), abs=1024), each["name"]
    assert "2.5-D, 4 copies" in products_module.chart()
