"""Drawn calls give the same numbers on blocks as on whole arrays, however mesh axes are given to their factors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from alpa_lite.rules import known_primitives
from tests.lower.blocks import assert_blocks_agree
from tests.lower.draws import examples
from tests.lower.pick import CALLS

#: Rules of primitives that other releases of JAX have.
ELSEWHERE = {"expand_dims", "random_gamma_grad", "log2", "one_minus_square", "polynomial"}
#: Rules of ops that plans insert: `tests.end_to_end.test_offload` runs them.
INSERTED = {"to_device", "to_host"}
EXAMPLES, MANY = 4, 100


def check(primitive: str, devices: list[Any], count: int) -> None:
    """Draw and check examples of a primitive."""

    @settings(max_examples=count, report_multiple_bugs=False)
    @given(st.data())
    def agree(data: st.DataObject) -> None:
        example = data.draw(examples(primitive))
        if example.placements:
            mesh = Mesh(np.array(devices).reshape(example.mesh), tuple("xyz"[: len(example.mesh)]))
            assert_blocks_agree(example.case, example.placements, mesh)

    agree()


def test_every_rule_has_a_draw():
    assert set(known_primitives()) - set(CALLS) == ELSEWHERE | INSERTED


@pytest.mark.parametrize("primitive", sorted(CALLS))
def test_drawn_calls_agree_on_blocks(primitive, devices):
    check(primitive, devices, EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize("primitive", sorted(CALLS))
def test_many_drawn_calls_agree_on_blocks(primitive, devices):
    check(primitive, devices, MANY)
