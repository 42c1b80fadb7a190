"""Compiled steps in a job do what they do alone."""

from __future__ import annotations

import pytest

from tests.distributed.launched import answers, run


@pytest.mark.long
def test_every_use_gives_what_jit_gives() -> None:
    found = answers(run(2, 2, "-m", "tests.distributed.uses"))
    assert found[0] == found[1] and len(found[0]) == 9
