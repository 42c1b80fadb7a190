"""Convolutions with both of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from tests.rules.row import Row, floats, row


def _convolutions() -> list[Row]:
    image, kernel = floats(4, 4, 8, 8), floats(8, 4, 3, 3)
    point, patch = floats(8, 4, 1, 1), floats(8, 4, 2, 2)

    def conv(stride: int = 1, padding: Any = "SAME", **kw: Any) -> Callable[..., Any]:
        return lambda a, b: lax.conv_general_dilated(a, b, (stride, stride), padding, **kw)

    def to_input(f: Callable[..., Any], x: Any, w: Any) -> Callable[..., Any]:
        return lambda weight, ct: jax.linear_transpose(lambda a: f(a, weight), x)(ct)[0]

    def to_kernel(f: Callable[..., Any], x: Any, w: Any) -> Callable[..., Any]:
        return lambda image, ct: jax.linear_transpose(lambda b: f(image, b), w)(ct)[0]

    variants = {
        "": (conv(), image, kernel),
        "strided": (conv(2), image, kernel),
        "valid": (conv(1, "VALID"), image, kernel),
        "point": (conv(), image, point),
        "point strided": (conv(2, "VALID"), image, point),
        "patches": (conv(2, "VALID"), image, patch),
        "depthwise": (conv(feature_group_count=4), image, floats(4, 1, 3, 3)),
        "grouped": (conv(feature_group_count=4), floats(4, 8, 4, 4), floats(8, 2, 3, 3)),
        "batch groups": (conv(batch_group_count=4), floats(8, 4, 4, 4), floats(8, 4, 3, 3)),
        "dilated": (conv(2, "SAME", rhs_dilation=(2, 1)), floats(2, 2, 16, 16), floats(2, 2, 3, 5)),
        "channels last": (conv(dimension_numbers=("NHWC", "HWIO", "NHWC")), floats(4, 8, 8, 4), floats(3, 3, 4, 8)),
    }
    rows: list[Row] = []
    for name, (f, x, w) in variants.items():
        out = floats(*jax.eval_shape(f, x, w).shape)
        label = f"conv_general_dilated {name}".strip()
        rows.append(row(label, f, x, w, oracle="convolution"))
        rows.append(row(f"{label} to input", to_input(f, x, w), w, out, oracle="convolution"))
        rows.append(row(f"{label} to kernel", to_kernel(f, x, w), x, out, oracle="convolution"))
    return rows


ROWS = (*_convolutions(),)
