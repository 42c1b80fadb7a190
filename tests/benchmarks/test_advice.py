"""The table of advice on the page is that of the results, and recipes are settings that can be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import alpa_lite as al
from alpa_lite.planners.trainer_configuration import settings_of
from benchmarks.advice import RECIPES, RESULTS, Recipe, advice_table

PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def test_the_table_is_that_of_the_results() -> None:
    assert "\n".join(advice_table()) in PAGE.read_text(encoding="utf-8"), "put what advice_table() returns there"
    rows = json.loads(RESULTS.read_text())
    assert [(row["model"], row["cluster"]) for row in rows] == [(each.model, each.cluster) for each in RECIPES]


@pytest.mark.parametrize("recipe", RECIPES, ids=[f"{each.model}-{each.cluster}" for each in RECIPES])
def test_recipes_use_all_devices_for_their_batch(recipe: Recipe) -> None:
    cluster = al.cluster(recipe.cluster)
    found = settings_of(recipe.trainer, recipe.settings, cluster)
    assert found.batch_size == recipe.batch_size
    assert cluster.num_devices % (found.pipeline * found.tensor * found.context) == 0
