"""Drawn convolutions, in all roles that differentiation gives them."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from tests.lower.pick import Pick, call, drawn
from tests.rules.row import Row


@drawn("conv_general_dilated")
def conv_general_dilated(pick: Pick, name: str) -> Row:
    """Any dimension numbers, strides, dilations, padding and groups; both gradients of it."""
    pick.special, pick.adds = False, True
    rank = pick.one_of((1, 2, 1, 0))
    groups = pick.one_of((1, 1, 2, 4))
    of_batch = pick.flag()
    n, c, o = (pick.dim((4, 2, 8, 1, 3)) for _ in range(3))
    n, o, c = (n * groups if of_batch else n), o * groups, (c if of_batch else c * groups)
    spatial = [_spatial(pick) for _ in range(rank)]
    kernel_c = c if of_batch else c // groups
    lhs = {"N": n, "C": c, **{str(i): s["input"] for i, s in enumerate(spatial)}}
    rhs = {"O": o, "I": kernel_c, **{str(i): s["size"] for i, s in enumerate(spatial)}}
    specs = ["".join(pick.order(list(names))) for names in (lhs, rhs, lhs)]
    # Strides and the like stand in the order that the kernel's dims have.
    spatial = [spatial[int(role)] for role in specs[1] if role.isdigit()]
    x = pick.array([lhs[role] for role in specs[0]], pick.one_of(("float32", "float32", "bfloat16")))
    w = pick.array([rhs[role] for role in specs[1]], str(x.dtype))

    def run(a: Any, b: Any) -> Any:
        return lax.conv_general_dilated(
            a,
            b,
            [s["stride"] for s in spatial],
            [s["padding"] for s in spatial],
            [s["base"] for s in spatial],
            [s["dilation"] for s in spatial],
            (specs[0], specs[1], specs[2]),
            feature_group_count=1 if of_batch else groups,
            batch_group_count=groups if of_batch else 1,
        )

    form = pick.one_of(["forward", "to input", "to kernel"])
    if form == "forward":
        return call(name, run, x, w, oracle="convolution")
    cotangent = pick.array(jax.eval_shape(run, x, w).shape, str(x.dtype))
    if form == "to input":
        return call(
            name, lambda b, t: jax.linear_transpose(lambda a: run(a, b), x)(t)[0], w, cotangent, oracle="convolution"
        )
    return call(
        name, lambda a, t: jax.linear_transpose(lambda b: run(a, b), w)(t)[0], x, cotangent, oracle="convolution"
    )


def _spatial(pick: Pick) -> dict[str, Any]:
    """One spatial dim: patches, windows that step over all inputs but overlap, or anything."""
    size = pick.one_of((1, 2, 3, 4))
    length = pick.one_of((8, 16, 4, 12, 6, 7))
    form = pick.one_of(("halo", "patches", "any"))
    if form == "halo":
        length, (stride, base) = pick.one_of((8, 16, 32)), pick.one_of(((1, 1), (2, 1), (1, 2), (4, 1), (1, 1)))
        dilation, low = pick.one_of((1, 1, 2)), pick.integer(-1, 3)
        reach, windows = (size - 1) * dilation + 1, length * base // stride
        high = (windows - 1) * stride + reach - low - ((length - 1) * base + 1)
        return dict(input=length, size=size, stride=stride, padding=(low, high), base=base, dilation=dilation)
    if form == "patches":
        stride = pick.one_of([s for s in (1, 2, 4) if s >= size] or [4])
        return dict(input=length, size=min(size, length), stride=stride, padding=(0, 0), base=1, dilation=1)
    dilation = pick.one_of((1, 1, 2))
    reach = (size - 1) * dilation + 1
    low, high = pick.integer(0, 2), pick.integer(-1, 2)
    low = max(low, reach - length - high)
    base = pick.one_of((1, 1, 2))
    return dict(
        input=length, size=size, stride=pick.one_of((1, 2, 3)), padding=(low, high), base=base, dilation=dilation
    )
