"""The geometry of windows, against a list of what every window reads."""

from __future__ import annotations

import jax
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.rules.convolution import Window
from tests.rules.row import floats, row

WINDOWS = st.builds(
    Window,
    size=st.integers(1, 5),
    stride=st.integers(1, 4),
    low=st.integers(-3, 6),
    base_dilation=st.integers(1, 3),
    dilation=st.integers(1, 3),
)


def inputs_of(window: Window, w: int) -> list[int]:
    """Numbers of the inputs that window `w` reads, those beyond the array included (negative, or too large)."""
    places = [w * window.stride - window.low + tap * window.dilation for tap in range(window.size)]
    return [place // window.base_dilation for place in places if place % window.base_dilation == 0]


@given(WINDOWS, st.sampled_from((1, 2, 4)), st.integers(1, 4))
def test_a_halo_is_what_blocks_of_windows_read_beyond_their_inputs(window: Window, blocks: int, scale: int) -> None:
    length, num_windows = blocks * scale * window.stride, blocks * scale * window.base_dilation
    halo = window.halo(length, num_windows)
    assert halo is not None
    for block in range(blocks):
        first, stop = block * length // blocks, (block + 1) * length // blocks
        own = range(block * num_windows // blocks, (block + 1) * num_windows // blocks)
        read = [i for w in own for i in inputs_of(window, w)]
        assert all(first - halo[0] <= i < stop + halo[1] for i in read)
    # No row too many, but for taps that fall between dilated inputs.
    if window.base_dilation == 1:
        read = [i for w in range(num_windows) for i in inputs_of(window, w)]
        assert halo == (max(0, -min(read)), max(0, max(read) - length + 1))


@given(WINDOWS, st.integers(1, 6), st.integers(0, 4), st.integers(0, 4))
def test_padding_lets_a_block_have_its_windows_where_they_were(
    window: Window, scale: int, more: int, first: int
) -> None:
    length, num_windows = scale * window.stride, scale * window.base_dilation
    low, high = window.padding(first + length + more, num_windows, first)
    grown = Window(
        size=window.size,
        stride=window.stride,
        low=low,
        high=high,
        base_dilation=window.base_dilation,
        dilation=window.dilation,
    )
    for w in range(num_windows):
        assert inputs_of(grown, w) == [i + first for i in inputs_of(window, w)]
    # The last window ends where the padding does.
    padded = low + (first + length + more - 1) * window.base_dilation + 1 + high
    assert padded == (num_windows - 1) * window.stride + window.reach


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6), st.integers(1, 6))
def test_windows_of_other_blocks_reach_into_a_block(size: int, stride: int, low: int, count: int) -> None:
    window = Window(size=size, stride=stride, low=low)
    before, after = window.reaching()
    own = range(count * stride)
    reach_in = [w for w in range(-20, count + 20) if set(inputs_of(window, w)) & set(own)]
    others = [w for w in reach_in if w not in range(count)]
    assert all(-before <= w < count + after for w in others)
    if reach_in and min(reach_in) < 0:
        assert before == -min(reach_in)
    if reach_in and max(reach_in) >= count:
        assert after == max(reach_in) - count + 1


def test_windows_that_skip_inputs_have_no_halo_on_equal_blocks() -> None:
    assert Window(size=3).halo(8, 6) is None
    assert Window(size=3, low=1, high=1).halo(8, 8) == (1, 1)
    assert Window(size=2, stride=2).halo(8, 4) == (0, 0)


def test_a_dim_is_cut_in_no_smaller_blocks_than_its_halo() -> None:
    """A kernel of 17 rows reads 8 on either side: 32 rows are cut in 4 blocks, and not in 8."""
    convolve = lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME")  # noqa: E731
    rule = row("conv_general_dilated", convolve, floats(1, 2, 32, 4), floats(2, 2, 17, 1)).case.rule
    height = rule.operands[0][2][0]
    assert rule.splits_into(height, 4) and not rule.splits_into(height, 8)
    assert rule.splits_into(rule.operands[0][3][0], 4)  # a single column reads none
