"""Colours."""

import pytest

from alpa_lite.inspection.page.elements import KINDS, STAGES, colour_rules, stage_class


def luminance(colour):
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("pair", [*STAGES, *(KINDS[kind] for kind in ("forward", "backward", "update"))])
def test_white_numbers_can_be_read(pair):
    """WCAG's 3 to 1, for graphics and large text."""
    for colour in pair:
        assert 1.05 / (luminance(colour) + 0.05) >= 3.0


def test_neighbours_differ():
    for (one, _), (next_one, _) in zip(STAGES, [*STAGES[1:], STAGES[0]], strict=True):
        steps = [abs(int(one[i : i + 2], 16) - int(next_one[i : i + 2], 16)) for i in (1, 3, 5)]
        assert sum(steps) > 60


def test_every_class_has_its_rule():
    rules = colour_rules()
    assert all(f".{stage_class(stage)} " in rules for stage in range(25))
    assert stage_class(len(STAGES)) == stage_class(0)
