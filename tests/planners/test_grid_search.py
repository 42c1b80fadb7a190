"""All factorisations, the best of them, and what became of the others."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import optax
import pytest

import alpa_lite as al
from alpa_lite.cli.models.skip_networks import ResNet
from alpa_lite.cli.models.train import init_state, make_train_step
from alpa_lite.cli.models.transformer_layers import Experts
from alpa_lite.inspection.text.tables import alternatives_table
from alpa_lite.planners import Auto, GridSearch, Hybrid
from alpa_lite.planners.grid_search import factorisations, microbatch_sizes
from cost_models.cluster import with_memory
from tests.end_to_end.cases import MODELS, Training, eager_cluster, make_batch
from tests.end_to_end.transformers import WIDE


@pytest.mark.parametrize("count", [1, 6, 8, 64])
def test_factorisations_are_all_of_them(count: int) -> None:
    want = {d for d in product(range(1, count + 1), repeat=3) if math.prod(d) == count}
    assert {tuple(d) for d in factorisations(count)} == want and len(factorisations(count)) == len(want)
    assert all(d.pipeline <= 2 and d.tensor <= 4 for d in factorisations(count, max_pipeline=2, max_tensor=4))


def test_microbatches_grow_about_twofold() -> None:
    assert [*microbatch_sizes(96, 2, 16)] == [1, 2, 3, 6, 12]
    assert [*microbatch_sizes(10, 4, 16)] == []


def _traced() -> Any:
    training = Training(model="mlp")
    return al.parallelize(training.step()).trace(training.start(), make_batch(MODELS["mlp"], 0), jax.random.key(0))


def test_the_best_of_all_that_work_is_taken_and_the_others_are_listed() -> None:
    traced, cluster = _traced(), eager_cluster()
    found = traced.plan(cluster=cluster, planner=GridSearch(), num_microbatches=8).last_plan
    seconds, failed = [], 0
    for pipeline, data, model in product((1, 2, 4, 8), repeat=3):
        if pipeline * data * model == 8:
            planner = Hybrid(pipeline=pipeline, data=data, tensor=model)
            try:
                plan = traced.plan(cluster=cluster, planner=planner, num_microbatches=8).last_plan
                seconds.append(plan.prediction.step_seconds)
            except al.errors.PlanError:
                failed += 1
    assert failed > 0 and len(seconds) > 3
    assert found.prediction.step_seconds == pytest.approx(min(seconds))
    others = [s for _, s in found.alternatives]
    assert sorted(others[: len(seconds) - 1]) == pytest.approx(sorted(seconds)[1:])
    assert others[len(seconds) - 1 :] == [math.inf] * failed
    assert sum("does not work" in row for row in alternatives_table(found).rows) == failed


def test_the_others_can_be_saved_and_read(tmp_path: Any) -> None:
    found = _traced().plan(cluster=eager_cluster(), planner=GridSearch(max_tensor=2), num_microbatches=2).last_plan
    found.save(tmp_path / "plan.json")
    assert al.Plan.load(tmp_path / "plan.json") == found
    from alpa_lite.inspection.text.tables import plan_summary

    json.dumps(plan_summary(found), allow_nan=False)


def test_micro_batches_are_tried_where_they_are_left_open() -> None:
    found = _traced().plan(cluster=eager_cluster(), planner=GridSearch(max_tensor=1, max_pipeline=2)).last_plan
    names = [found.name, *(name for name, _ in found.alternatives)]
    assert any("micro-batches" in name for name in names)


def test_nothing_that_fits_is_an_error() -> None:
    cluster = eager_cluster()
    small = with_memory(cluster, 100.0)
    with pytest.raises(al.errors.InfeasibleError, match=r"Of \d+ grids none works"):
        _traced().plan(cluster=small, planner=GridSearch(), num_microbatches=1)


def _shapes_of(family: str) -> Any:
    """A small model of each of the three families of Alpa's evaluation (Zheng et al. 2022, section 8.1), as shapes."""
    if family == "Wide-ResNet":
        return ResNet(image_size=64, channels=64, stage_sizes=(2, 2), num_classes=256, norm_batch=8), 64
    experts = Experts(num_experts=8, group_size=256) if family == "MoE" else None
    sizes = {"vocab_size": 8192, "num_layers": 4, "hidden": 1024, "num_heads": 16, "inner": 4096, "seq_len": 256}
    return replace(WIDE, experts=experts, **sizes), 64


@pytest.mark.long
@pytest.mark.parametrize("family", ["GPT", "MoE", "Wide-ResNet"])
def test_the_search_is_never_behind_the_best_grid(family: str) -> None:
    model, samples = _shapes_of(family)
    step = make_train_step(model.loss_fn, optax.adam(1e-3))
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optax.adam(1e-3)))
    if family == "Wide-ResNet":
        images, labels = (samples, 64, 64, 3), (samples,)
        batch = {"images": jax.ShapeDtypeStruct(images, "float32"), "labels": jax.ShapeDtypeStruct(labels, "int32")}
    else:
        batch = model.batch_shapes(samples)
    traced = al.parallelize(step).trace(state, batch)
    auto, grid = (traced.plan(cluster="p3.16xlarge", planner=p).last_plan for p in (Auto(), GridSearch()))
    assert auto.prediction.step_seconds <= grid.prediction.step_seconds * (1 + 1e-9)
