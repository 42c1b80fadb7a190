"""Specs and the price of moving from one to another (alpa-projects/alpa, playground/auto_sharding_solver:
test_sharding_spec.py), on meshes (2, 3) and (4, 1); tolerance 1 %.

Alpa prices every gather by the whole array. Here a gather of parts that stay split counts what it puts together.
"""

from __future__ import annotations

import pytest

from alpa_lite.intra_op.strategies import FREE_CHOICE
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.plan.pricing import Pricer
from alpa_lite.program.ir import Value
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec, local_shape, num_shards
from tests.golden.alpha_beta import AlphaBeta

SHAPE = (12, 12)
BYTES = 4 * 12 * 12
WHOLE, ROWS, TILES = Spec(((), ())), Spec((("0",), ())), Spec((("0",), ("1",)))
TILES_OF_ROWS = Spec((("0", "1"), ()))


def seconds(model: AlphaBeta, source: Spec, target: Spec) -> float:
    """The price of a move on a mesh with both dims, also those of one device."""
    mesh = LogicalMesh(axis_names=("0", "1"), shape=model.shape)
    submesh = Submesh(first_device=0, num_hosts=model.shape[0], devices_per_host=model.shape[1])
    catalogue = Catalogue(Pricer(cost_model=model, submesh=submesh, mesh=mesh), FREE_CHOICE)
    return catalogue.move_seconds(Value(id=0, shape=SHAPE, dtype="float32"), source, target)


@pytest.mark.parametrize(
    ("spec", "tile", "tiles"),
    [
        (TILES, (6, 4), 6),
        (Spec((("1",), ("0",))), (4, 6), 6),
        (ROWS, (6, 12), 2),
        (Spec((("1",), ())), (4, 12), 3),
        (Spec(((), ("1",))), (12, 4), 3),
        (Spec(((), ("0",))), (12, 6), 2),
        (TILES_OF_ROWS, (2, 12), 6),
        (WHOLE, (12, 12), 1),
    ],
    ids=str,
)
def test_tiles(spec: Spec, tile: tuple[int, int], tiles: int) -> None:
    sizes = {"0": 2, "1": 3}
    assert local_shape(spec, SHAPE, sizes) == tile and num_shards(spec, sizes) == tiles


@pytest.mark.parametrize("spec", [WHOLE, ROWS, TILES, TILES_OF_ROWS], ids=str)
def test_staying_is_free(spec: Spec) -> None:
    assert seconds(AlphaBeta(shape=(2, 3)), spec, spec) == 0.0


def test_cutting_is_free() -> None:
    model = AlphaBeta(shape=(2, 3))
    assert seconds(model, ROWS, TILES) == seconds(model, WHOLE, TILES) == seconds(model, WHOLE, ROWS) == 0.0


def test_a_gather_puts_a_part_together() -> None:
    """Tiles of (2, 3) become rows over dim 1: the part of the array that two devices of dim 0 share out."""
    model = AlphaBeta(shape=(2, 3))
    assert seconds(model, TILES, ROWS) == pytest.approx(model.all_gather(BYTES / 2, 1), rel=1e-9)
    assert seconds(model, TILES, ROWS) <= model.all_gather(BYTES, 1)
    assert seconds(model, ROWS, WHOLE) == pytest.approx(model.all_gather(BYTES, 0), rel=1e-9)


def test_gathers_add_up_over_dims() -> None:
    """The smaller gather goes first: over dim 0 or over dim 1, whichever leaves less to send."""
    model = AlphaBeta(shape=(2, 3))
    first_rows = model.all_gather(BYTES / 2, 1) + model.all_gather(BYTES, 0)
    first_columns = model.all_gather(BYTES / 3, 0) + model.all_gather(BYTES, 1)
    assert seconds(model, TILES, WHOLE) == pytest.approx(min(first_rows, first_columns), rel=1e-2)
    assert seconds(model, TILES, WHOLE) <= model.all_gather(BYTES, 0) + model.all_gather(BYTES, 1)


def test_a_dim_of_one_device_costs_nothing() -> None:
    assert seconds(AlphaBeta(shape=(4, 1)), TILES, ROWS) == 0.0
