"""Steps on the border between sums over samples and other steps: accepted and equal, or refused, never wrong."""

from __future__ import annotations

import pytest

from tests.fuzz import attacks_border, attacks_mixed, attacks_sums
from tests.fuzz.attacks import ATTACKS, MICROBATCHES, B, Expectation
from tests.fuzz.oracle import Setup, setups

assert all((attacks_border, attacks_mixed, attacks_sums))  # they register

CASES = [(name, m) for name in ATTACKS for m in MICROBATCHES]


def setup_of(case: int) -> Setup:
    """The setup of a case: in turn, so that each attack meets all of them."""
    _, num_microbatches = CASES[case]
    fitting = setups(B // num_microbatches)
    return fitting[(case + case // len(MICROBATCHES)) % len(fitting)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "name", "num_microbatches"),
    [(i, *case) for i, case in enumerate(CASES)],
    ids=[f"{name}-{m}" for name, m in CASES],
)
def test_attack(case: int, name: str, num_microbatches: int) -> None:
    attack = ATTACKS[name]
    outcome = attack.run(setup_of(case), num_microbatches)
    expected = attack.expected(num_microbatches)
    assert expected.allows(outcome), f"expected {expected.value}, but it is {outcome.kind}: {outcome.detail}"


def test_there_are_attacks_of_each_kind() -> None:
    kinds = [attack.expectation for attack in ATTACKS.values()]
    assert all(kinds.count(kind) >= 30 for kind in Expectation)
