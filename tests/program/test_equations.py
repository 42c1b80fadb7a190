"""Parameters of equations as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from alpa_lite.program.equations import plain_params


@dataclass(frozen=True)
class Settings:
    axis: int
    function: Callable[[int], int]


class Numbers(NamedTuple):
    size: int
    function: Callable[[int], int]


def test_what_has_no_plain_form_is_left_out_at_any_depth() -> None:
    params = {
        "settings": Settings(axis=1, function=abs),
        "numbers": Numbers(size=2, function=abs),
        "nested": (Numbers(size=3, function=abs), Settings(axis=4, function=abs)),
        "function": abs,
        "pair": (1, abs),
    }
    assert plain_params(params) == {
        "settings": {"axis": 1},
        "numbers": {"size": 2},
        "nested": ({"size": 3}, {"axis": 4}),
    }


def test_sequences_of_dims_are_tuples() -> None:
    params = {"numbers": Numbers(size=2, function=abs), "window": range(1, 3), "batch": [0], "nothing": range(0)}
    assert plain_params(params) == {"numbers": {"size": 2}, "window": (1, 2), "batch": (0,), "nothing": ()}
