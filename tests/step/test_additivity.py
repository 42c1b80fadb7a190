"""The proof of whole steps: each claim is compared with numbers, whatever the step does."""

from __future__ import annotations

import jax
import pytest

from alpa_lite.errors import NonAdditiveError
from alpa_lite.microbatch import split_step
from alpa_lite.trace import trace
from tests.end_to_end.programs import PROGRAMS
from tests.step.claims import check_claims


@pytest.mark.parametrize("count", [2, 8, 16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_claims_hold(name: str, count: int) -> None:
    program = PROGRAMS[name]
    traced = trace(program.step, program.args, batch_argnums=program.batch_argnums)
    if name == "two_rows_per_sample" and count == 16:
        count = 4
    checked = check_claims(traced, jax.tree.leaves(program.args), count)
    assert bool(checked.proof.refusals) == (program.refused and name != "printed_per_sample")
    assert checked.kinds or program.refused


def test_effects_on_samples_are_refused() -> None:
    program = PROGRAMS["printed_per_sample"]
    with pytest.raises(NonAdditiveError, match="would be called once per micro-batch"):
        split_step(trace(program.step, program.args), 2)
