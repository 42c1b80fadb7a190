"""What a layer keeps under each policy."""

from __future__ import annotations

import pytest

from alpa_lite.program.ir import Op
from alpa_lite.program.phases import Phase
from alpa_lite.step.recomputation import Remat, keeps_results
from tests.step.rematerialisation.steps import traced_model


def _kept(policy: Remat) -> list[Op]:
    step = traced_model("gpt").step
    forward = (op for op in step.graph.ops if step.phases[op.id] is Phase.FORWARD)
    return [op for op in forward if keeps_results(policy, step.graph, op, step.batch_dims)]


def test_selective_keeps_products_with_weights_and_not_those_of_attention() -> None:
    names = [op.primitive for op in _kept(Remat.SELECTIVE)]
    # Per block: queries with keys and values, projection, two of the MLP; and the head. Scores and context are not.
    assert names.count("dot_general") == 2 * 4 + 1
    assert set(names) <= {"dot_general", "gather"}


@pytest.mark.parametrize("policy", [Remat.NONE, Remat.FULL])
def test_the_others_keep_all_or_nothing(policy: Remat) -> None:
    step = traced_model("gpt").step
    num_forward = sum(phase is Phase.FORWARD for phase in step.phases)
    assert len(_kept(policy)) == (num_forward if policy is Remat.NONE else 0)
