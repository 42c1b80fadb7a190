"""Steps on the border between sums over samples and other steps: accepted and equal, or refused, never wrong."""

from __future__ import annotations

import pytest

from tests.fuzz import attacks_border, attacks_mixed, attacks_sums
from tests.fuzz.attacks import ATTACKS, MICROBATCHES, B, Expectation
from tests.fuzz.oracle import Outcome, setups

assert all((attacks_border, attacks_mixed, attacks_sums))  # they register

CASES = [(name, m) for name in ATTACKS for m in MICROBATCHES]


def outcome_of(case: int) -> Outcome:
    """What becomes of a case under one setup: in turn, so that each attack meets all of them.

    Where a planner cannot plan the step (it has too few layers for a pipeline), the next one takes its place.
    """
    name, num_microbatches = CASES[case]
    fitting = setups(B // num_microbatches)
    first = case + case // len(MICROBATCHES)
    for turn in range(len(fitting)):
        outcome = ATTACKS[name].run(fitting[(first + turn) % len(fitting)], num_microbatches)
        if outcome.kind != "unplanned":
            break
    return outcome


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{name}-{m}" for name, m in CASES])
def test_attack(case: int) -> None:
    name, num_microbatches = CASES[case]
    expected = ATTACKS[name].expected(num_microbatches)
    outcome = outcome_of(case)
    assert expected.allows(outcome), f"expected {expected.value}, but it is {outcome.kind}: {outcome.detail}"


def test_there_are_attacks_of_each_kind() -> None:
    kinds = [attack.expectation for attack in ATTACKS.values()]
    assert all(kinds.count(kind) >= 30 for kind in Expectation)
