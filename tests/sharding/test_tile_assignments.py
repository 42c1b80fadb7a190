"""XLA's and Shardy's shardings as text, against those that JAX writes for its own specs."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from alpa_lite.errors import PlanError
from alpa_lite.sharding.specs import Spec
from alpa_lite.sharding.tile_assignments import (
    WHOLE,
    Tiling,
    axes_of,
    hlo_tiling,
    shardy_mesh,
    shardy_tiling,
    spec_on,
)


@st.composite
def _meshes_and_specs(draw: Any) -> tuple[dict[str, int], list[list[list[str]]]]:
    """A mesh of up to four axes, and for some arrays the axes of each dim."""
    axes = {name: draw(st.integers(1, 4)) for name in "abcd"[: draw(st.integers(1, 4))]}
    arrays = []
    for _ in range(draw(st.integers(1, 3))):
        dims: list[list[str]] = [[] for _ in range(draw(st.integers(1, 3)))]
        for name in draw(st.permutations(list(axes))):
            place = draw(st.integers(-1, len(dims) - 1))
            if place >= 0:
                dims[place].append(name)
        arrays.append(dims)
    return axes, arrays


def _texts(axes: dict[str, int], dims: list[list[str]]) -> tuple[str, str]:
    """The sharding of JAX in the words of HLO and of Shardy."""
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    sharding = NamedSharding(mesh, PartitionSpec(*(tuple(dim) or None for dim in dims)))
    shardy = ", ".join("{" + ", ".join(f'"{axis}"' for axis in dim) + "}" for dim in dims)
    return str(sharding._to_xla_hlo_sharding(len(dims))), f"#sdy.sharding<@mesh, [{shardy}]>"


@settings(deadline=None, max_examples=300)
@given(_meshes_and_specs())
def test_what_jax_writes_is_read_as_it_was_meant(case: tuple[dict[str, int], list[list[list[str]]]]) -> None:
    axes, arrays = case
    total, tilings = prod(axes.values()), []
    for dims in arrays:
        hlo, shardy = _texts(axes, dims)
        tiling = hlo_tiling(hlo, total)
        # Axes of one device split nothing, and leave no trace.
        wanted = Spec(tuple(tuple(axis for axis in dim if axes[axis] > 1) for dim in dims))
        assert spec_on(tiling, axes, len(dims)) == wanted
        assert spec_on(shardy_tiling(shardy, {"mesh": axes}), axes, len(dims)) == wanted
        tilings.append(tiling)
    sizes = axes_of(tilings, total)
    assert sizes is not None and prod(sizes) == total
    assert len(sizes) <= sum(size > 1 for size in axes.values()), "the mesh has axes that no array needs"
    found = {f"found {n}": size for n, size in enumerate(sizes)}
    for tiling, dims in zip(tilings, arrays, strict=True):
        spec = spec_on(tiling, found, len(dims))
        assert spec is not None
        assert [prod(found[a] for a in dim) for dim in spec.dims] == [prod(axes[a] for a in dim) for dim in dims]


def test_forms_of_tile_assignments() -> None:
    assert hlo_tiling("{replicated}", 8) == WHOLE == hlo_tiling("{maximal device=0}", 1)
    rows = Tiling(ways=(2, 1), blocks=((0, 0, 1, 1), (0, 0, 0, 0)))
    assert hlo_tiling("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", 4) == rows
    assert hlo_tiling("{devices=[2,1,2]0,1,2,3 last_tile_dims={replicated}}", 4) == rows
    assert hlo_tiling('{devices=[2,1,2]<=[4] last_tile_dim_replicate metadata={op_name="x"}}', 4) == rows
    assert hlo_tiling("{devices=[2,2]<=[2,2]T(1,0)}", 4).blocks == ((0, 1, 0, 1), (0, 0, 1, 1))
    # Replicas come first here: devices 0 and 2 hold the same block.
    assert hlo_tiling("{devices=[2,2]0,2,1,3 last_tile_dim_replicate}", 4).blocks == ((0, 1, 0, 1),)


def test_parts_of_axes_in_shardy() -> None:
    mesh = shardy_mesh('<["x"=4, "y"=2]>')
    assert mesh == {"x": 4, "y": 2}
    major = shardy_tiling('#sdy.sharding<@m, [{"x":(1)2}, {}], replicated={"y"}>', {"m": mesh})
    minor = shardy_tiling('#sdy.sharding<mesh<["x"=4, "y"=2]>, [{"x":(2)2, "y"}, {?}]>', {})
    assert major.ways == (2, 1) and minor.ways == (4, 1)
    assert spec_on(major, mesh, 2) is None
    assert axes_of([major, minor], 8) == (2, 4)
    assert str(spec_on(minor, {"a": 2, "b": 4}, 2)) == "[b, -]"


def test_what_no_mesh_has() -> None:
    thirds = hlo_tiling("{devices=[3,4]<=[12] last_tile_dim_replicate}", 12)
    quarters = hlo_tiling("{devices=[4,3]<=[12] last_tile_dim_replicate}", 12)
    # 12 = 3 × 4 for one array and 4 × 3 for the other: neither stride divides the other.
    assert axes_of([thirds, quarters], 12) is None
    mixed = hlo_tiling("{devices=[4]0,2,3,1}", 4)
    sizes = axes_of([mixed], 4)
    assert sizes is not None and spec_on(mixed, dict(zip("ab", sizes, strict=False)), 1) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{manual}", "no division of an array among 8 devices"),
        ("{maximal device=3}", "no division of an array"),
        ("{devices=[4]<=[4]}", "names 4 devices, but the program is for 8"),
        ("{devices=[8]0,1,2,3,4,5,6,6}", "does not name each of its 8 devices once"),
        ("{devices=[4,2]<=[8] last_tile_dims={manual}}", "has devices that are manual"),
    ],
)
def test_a_sharding_that_no_plan_has_is_refused(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        hlo_tiling(text, 8)


def test_forms_of_shardy_that_are_refused() -> None:
    with pytest.raises(PlanError, match="an order of their own"):
        shardy_mesh('<["x"=2], device_ids=[1, 0]>')
    assert shardy_mesh('<["x"=2], device_ids=[0, 1]>') == {"x": 2}
    for text in ('#sdy.sharding<@other, [{"x"}]>', '#sdy.sharding<@m, [{}], unreduced={"x"}>', "{replicated}"):
        with pytest.raises(PlanError, match="cannot be read"):
            shardy_tiling(text, {"m": {"x": 2}})
