"""What agrees with a layout that is given."""

from __future__ import annotations

import pytest

from alpa_lite.intra_op.op_choices import agrees
from alpa_lite.intra_op.stage import Wanted
from alpa_lite.sharding.specs import Spec


@pytest.mark.parametrize(
    ("spec", "wanted", "fits"),
    [
        (Spec((("x",), ())), (("x", 0),), True),
        (Spec((("x",), ())), (("x", 1),), False),
        (Spec((("x",), ())), (("x", None),), False),
        (Spec(((), ()), ("x",)), (("x", None),), True),
        (Spec(((), ()), ("x",)), (("x", 0),), False),
        (Spec((("y",), ("x",))), (("x", 1),), True),
        (Spec((("y", "x"), ())), (("x", 0), ("y", 0)), True),
        (Spec((("y",), ())), (("x", None), ("y", 1)), False),
        (Spec((("y",),)), (), True),
    ],
)
def test_an_axis_splits_the_dim_that_it_must_and_no_other(spec: Spec, wanted: Wanted, fits: bool) -> None:
    assert agrees(spec, wanted) == fits
