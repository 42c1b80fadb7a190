"""Grid axes are split where nothing depends on the place along them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from alpa_lite.trace.kernels.grid_split import GridAxis, Rolled, grid_axes
from alpa_lite.trace.kernels.kernel_work import kernel_work

Map = Callable[..., tuple[Any, ...]]
ROWS: Map = lambda i, j: (i, j)  # noqa: E731


def double(x_ref: Any, o_ref: Any, *_: Any) -> None:
    o_ref[...] = 2 * x_ref[...]


def params(
    kernel: Callable[..., None] = double,
    *,
    read: Map = ROWS,
    write: Map = ROWS,
    shape: tuple[int, ...] = (16, 16),
    block: tuple[int | None, ...] = (2, 4),
    **options: Any,
) -> Any:
    """The parameters of a call on a grid of 8 × 4 steps; its result is [16, 16], in blocks of [2, 4]."""
    call = pl.pallas_call(
        kernel,
        grid=(8, 4),
        in_specs=[pl.BlockSpec(block, read)],
        out_specs=pl.BlockSpec((2, 4), write),
        out_shape=jax.ShapeDtypeStruct((16, 16), jnp.float32),
        **options,
    )
    return jax.make_jaxpr(call)(jax.ShapeDtypeStruct(shape, jnp.float32)).jaxpr.eqns[0].params


def axes(params: Any) -> dict[int, GridAxis]:
    return {axis.axis: axis for axis in grid_axes(params, frozenset()) if axis.proven}


def test_an_axis_is_split_with_the_dims_that_its_index_maps_walk_over():
    found = axes(params())
    assert found == {
        0: GridAxis(axis=0, granule=1, size=8, operands=(0,), results=(0,)),
        1: GridAxis(axis=1, granule=1, size=4, operands=(1,), results=(1,)),
    }


def test_an_operand_without_the_axis_stays_whole():
    found = axes(params(read=lambda i, j: (0, j)))
    assert found[0].operands == (None,) and found[0].results == (0,)


@pytest.mark.parametrize("divide", [lambda i: i // 2, lambda i: lax.div(i, 2)], ids=["//", "lax.div"])
def test_steps_that_share_a_block_stay_together(divide):
    found = axes(params(read=lambda i, j: (divide(i), j), shape=(8, 16)))
    assert (found[0].granule, found[0].size) == (2, 4)


def test_steps_that_repeat_stay_apart_from_their_repetitions():
    """Blocks are read again and again: the operand has no dim that the axis walks over."""
    found = axes(params(read=lambda i, j: (i % 2, j), shape=(4, 16)))
    assert (found[0].granule, found[0].operands) == (2, (None,))


def test_a_dim_is_split_with_the_major_one_of_two_axes():
    found = axes(params(read=lambda i, j: (i * 4 + j, 0), shape=(64, 4)))
    assert found[0].operands == (0,)
    assert 1 not in found


@pytest.mark.parametrize(
    ("read", "shape"),
    [
        (lambda i, j: (7 - i, j), (16, 16)),
        (lambda i, j: (jnp.minimum(i + 1, 7), j), (16, 16)),
        (lambda i, j: (i, i), (16, 32)),
        (lambda i, j: (i + j, j), (22, 16)),
        (lambda i, j: (i * i, j), (128, 16)),
        (lambda i, j: (jnp.where(i > 3, i, 0), j), (16, 16)),
        (lambda i, j: (i, j), (20, 16)),
    ],
    ids=["reversed", "shifted", "diagonal", "overlapping", "squares", "chosen", "rows left over"],
)
def test_other_walks_over_an_operand_are_refused(read, shape):
    assert 0 not in axes(params(read=read, shape=shape))


def test_a_result_that_several_steps_write_is_not_split():
    assert set(axes(params(write=lambda i, j: (i, 0)))) == {0}


def stores_step(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] + pl.program_id(0)


def branches_on_step(x_ref: Any, o_ref: Any) -> None:
    @pl.when(pl.program_id(0) > 2)
    def _() -> None:
        o_ref[...] = x_ref[...]


def loops_by_step(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = lax.fori_loop(0, pl.program_id(0), lambda _, x: x + 1, x_ref[...])


def compares_places(x_ref: Any, o_ref: Any) -> None:
    rows = pl.program_id(0) * 2 + lax.broadcasted_iota(jnp.int32, (2, 4), 0)
    columns = pl.program_id(1) * 4 + lax.broadcasted_iota(jnp.int32, (2, 4), 1)
    o_ref[...] = jnp.where(rows >= columns, x_ref[...], 0)


@pytest.mark.parametrize(
    ("kernel", "left"),
    [(stores_step, {1}), (branches_on_step, {1}), (loops_by_step, {1}), (compares_places, set())],
)
def test_a_kernel_that_reads_its_step_is_not_split_along_it(kernel, left):
    assert set(axes(params(kernel))) == left


def test_places_may_be_compared_along_one_axis():
    def kernel(x_ref: Any, o_ref: Any) -> None:
        same = pl.program_id(0) * 2 + 1 > pl.program_id(0) * 2 + lax.broadcasted_iota(jnp.int32, (2, 4), 0)
        o_ref[...] = jnp.where(same, x_ref[...], 0)

    assert set(axes(params(kernel))) == {0, 1}


SCRATCH = [pltpu.VMEM((2, 4), jnp.float32)]


def running_sum(start_when: Callable[[], Any]) -> Callable[..., None]:
    def kernel(x_ref: Any, o_ref: Any, sum_ref: Any) -> None:
        @pl.when(start_when())
        def _() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += x_ref[...]
        o_ref[...] = sum_ref[...]

    return kernel


def test_scratch_memory_must_be_written_first_in_every_row():
    """Started in column 0: no row reads the sum of another, columns do."""
    kernel = running_sum(lambda: pl.program_id(1) == 0)
    assert set(axes(params(kernel, scratch_shapes=SCRATCH))) == {0}


def test_scratch_memory_that_an_outer_axis_starts_passes_between_inner_steps():
    """Started in row 0, in every column: later rows then add to the sum of the last column."""
    kernel = running_sum(lambda: pl.program_id(0) == 0)
    assert not axes(params(kernel, scratch_shapes=SCRATCH))


def test_a_part_of_scratch_memory_is_not_enough():
    def kernel(x_ref: Any, o_ref: Any, sum_ref: Any) -> None:
        sum_ref[0, :] = x_ref[0, :]
        o_ref[...] = sum_ref[...]

    assert not axes(params(kernel, scratch_shapes=SCRATCH))


def test_what_a_kernel_declares_parallel_is_believed():
    kernel = running_sum(lambda: pl.program_id(0) == 0)
    declared = pltpu.CompilerParams(dimension_semantics=("arbitrary", "parallel"))
    assert set(axes(params(kernel, scratch_shapes=SCRATCH, compiler_params=declared))) == {1}


def test_an_overwritten_operand_must_be_split_like_its_result():
    assert set(axes(params(input_output_aliases={0: 0}))) == {0, 1}
    assert set(axes(params(input_output_aliases={0: 0}, read=lambda i, j: (i, 0)))) == {0}


def test_a_whole_operand_that_the_kernel_indexes_is_rotated():
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 2, 2), :]

    found = axes(params(kernel, read=lambda i, j: (0, j), block=(16, 4)))
    assert found[0].rolled == (Rolled(operand=0, dim=0, rows=2),)
    assert not found[1].rolled

    def beyond(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[pl.ds(pl.program_id(0) * 2, 3), :][:2]

    assert set(axes(params(beyond, read=lambda i, j: (0, j), block=(16, 4)))) == {1}


def test_a_batch_of_calls_is_split_whatever_the_kernel_does():
    call = pl.pallas_call(stores_step, grid=(8,), out_shape=jax.ShapeDtypeStruct((8,), jnp.float32))
    batch = jax.make_jaxpr(jax.vmap(call))(jax.ShapeDtypeStruct((4, 8), jnp.float32)).jaxpr.eqns[0].params
    assert axes(batch)[0].operands == (0,)


@pytest.mark.parametrize("told", [None, 1e9])
def test_work_is_what_the_kernel_tells_or_does(told):
    def kernel(x_ref: Any, o_ref: Any) -> None:
        square = x_ref[...] @ x_ref[...].T
        o_ref[...] = lax.fori_loop(0, 1 + pl.program_id(0), lambda _, x: x + square @ x_ref[...], x_ref[...])

    estimate = None if told is None else pl.CostEstimate(flops=int(told), transcendentals=0, bytes_accessed=0)
    work = kernel_work(params(kernel, cost_estimate=estimate))
    # In each of 32 steps [2, 4] x [4, 2], and 4.5 times on average [2, 2] x [2, 4].
    assert work.flops == (told or 32 * (2 * 2 * 4 * 2 + 4.5 * 2 * 2 * 2 * 4))
    assert work.has_products
