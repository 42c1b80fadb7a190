"""Surveys: which layers are solved where, and that what is guessed from them makes sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.cli.models.sequential_networks import CNN
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.inter_op.survey import DEAR, Beyond, Profile, Survey, in_flight_within
from alpa_lite.plan.progress import Progress
from alpa_lite.step.clustering import make_layers
from cost_models.cluster import Cluster
from cost_models.composed import ComposedCostModel
from tests.inter_op.test_stage_costs import chain_step

BATCH = 131072


def _surveyed(cluster: Cluster, numbers: Sequence[int]) -> tuple[Survey, list[list[str]]]:
    """A survey of a chain of equal layers at numbers of micro-batches, and what was solved for each of these."""
    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 8
    traced = al.parallelize(chain_step).trace(weights, jax.ShapeDtypeStruct((BATCH, 2048), jnp.float32))
    solved: list[list[str]] = []
    survey = None
    for number in numbers:
        said: list[str] = []
        step = traced.step(number).step
        layers = make_layers(step, 4)
        model = ComposedCostModel(cluster)
        costs = StageCosts(step=step, layers=layers, cost_model=model, progress=Progress(said.append))
        survey = survey or Survey(Space.of(cluster), Profile.of(costs), costs.structure_of_layers())
        survey.add(costs)
        solved.append(said)
    assert survey is not None
    return survey, solved


def _largest_part(survey: Survey) -> int:
    """The submesh of the most devices but all, on which some layers stand for others."""
    space = survey.space
    return max(range(len(space.kinds)), key=lambda k: (space.devices[k] < space.cluster.num_devices, space.devices[k]))


def test_guesses_are_times_at_any_size() -> None:
    """What takes a device less with more samples, by the tolerance of a solver, does not fall below nothing."""
    survey, _ = _surveyed(al.cluster("p3.16xlarge"), (16, 64))
    small, large = sorted(survey._taken)
    survey._taken[large] = {
        layer: replace(taken, loop_seconds=0.98 * taken.loop_seconds, alone_seconds=0.98 * taken.alone_seconds)
        for layer, taken in survey._taken[small].items()
    }
    for number in (1, 2, 4, 16, 32, 64):
        size = BATCH // number
        for beyond in get_args(Beyond):
            seconds, updates = survey.guess(size, beyond=beyond)
            known = seconds[np.isfinite(seconds)]
            assert known.size and (known > 0).all()
            assert (updates[np.isfinite(seconds)] >= 0).all() and np.isinf(updates[np.isinf(seconds)]).all()


def test_updates_are_guessed_where_a_layer_shares_a_weight_with_another() -> None:
    """The last layer makes most of the gradient of a large weight, but the first one, which has it, updates it."""
    model, number, batch = GPT(vocab_size=8192, num_layers=2, num_heads=4, hidden=256, seq_len=64), 8, 64
    optimizer = make_optimizer()
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    traced = al.parallelize(make_train_step(model.loss_fn, optimizer)).trace(state, model.batch_shapes(batch))
    cluster = replace(al.cluster("g5.48xlarge"), devices_per_host=1, num_hosts=4)
    step = traced.step(number).step
    costs = StageCosts(step=step, layers=make_layers(step, 8), cost_model=ComposedCostModel(cluster))
    survey = Survey(Space.of(cluster), Profile.of(costs), costs.structure_of_layers())
    survey.add(costs)
    _, guessed = survey.guess(batch / number)
    kind = _largest_part(survey)
    places = [survey._place(layer, kind, 0) for layer in range(8)]
    solved = [costs.solution(place, limit_bytes=np.inf).cost.update_seconds for place in places]
    assert 0.7 * sum(solved) < guessed[:, kind, 0].sum() < 1.4 * sum(solved)


def test_updates_of_small_layers_take_what_they_take_on_one_device() -> None:
    """The second layer makes 20 times the gradients of the first one, which stands for it: neither takes long."""
    model, batch = CNN(image_size=64, channels=32, num_blocks=4), 96
    optimizer = make_optimizer()
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    traced = al.parallelize(make_train_step(model.loss_fn, optimizer)).trace(state, model.batch_shapes(batch))
    cluster = replace(al.cluster("p4d.24xlarge"), devices_per_host=6)
    of_numbers = [
        StageCosts(step=step, layers=make_layers(step, 6), cost_model=ComposedCostModel(cluster))
        for step in (traced.step(number).step for number in (8, 1))
    ]
    survey = Survey(Space.of(cluster), Profile.of(of_numbers[0]), of_numbers[0].structure_of_layers())
    for costs in of_numbers:
        survey.add(costs)
    _, guessed = survey.guess(batch)
    kind = _largest_part(survey)
    for layer in range(6):
        solved = of_numbers[1].solution(survey._place(layer, kind, 0), limit_bytes=np.inf).cost.update_seconds
        # Of the second layer the latency of the first one is taken.
        assert solved <= 1.01 * guessed[layer, kind, 0] <= 1.02 * solved + 70e-6, layer


def test_on_all_devices_layers_without_a_good_representative_are_surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other stage is there in a plan without a pipeline: what stands for a layer must not hide such a plan."""
    monkeypatch.setattr("alpa_lite.inter_op.survey.WELL", 1.0)
    model, batch, number = CNN(image_size=64, channels=32, num_blocks=4), 96, 8
    optimizer = make_optimizer()
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    traced = al.parallelize(make_train_step(model.loss_fn, optimizer)).trace(state, model.batch_shapes(batch))
    cluster = replace(al.cluster("p4d.24xlarge"), devices_per_host=6)
    step = traced.step(number).step
    costs = StageCosts(step=step, layers=make_layers(step, 6), cost_model=ComposedCostModel(cluster))
    survey = Survey(Space.of(cluster), Profile.of(costs), costs.structure_of_layers())
    survey.add(costs)
    assert {*survey._stands} < {*survey._equal}
    seconds, updates = survey.guess(batch / number)
    whole = int(np.argmax(survey.space.devices))
    for layer in range(6):
        for shape in np.flatnonzero(survey._seen[survey._equal[layer]][whole]).tolist():
            solved = costs.solution(survey._place(layer, whole, shape), limit_bytes=np.inf).cost
            guessed = seconds[layer, whole, shape], updates[layer, whole, shape]
            assert guessed == pytest.approx((solved.loop_seconds, solved.update_seconds), rel=1e-9), (layer, shape)


def test_what_was_surveyed_is_kept_as_other_submeshes_are_surveyed() -> None:
    survey, _ = _surveyed(al.cluster("p3.16xlarge"), (16,))
    traced = al.parallelize(chain_step).trace(
        [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 8, jax.ShapeDtypeStruct((BATCH, 2048), jnp.float32)
    )
    step = traced.step(4).step
    costs = StageCosts(step=step, layers=make_layers(step, 4), cost_model=ComposedCostModel(al.cluster("p3.16xlarge")))
    kinds = range(len(survey.space.kinds))
    assert not any(survey.reaches(kind, BATCH // 4) for kind in kinds)
    for kind in kinds:
        survey.add(costs, kinds=[kind])
        assert [survey.reaches(k, BATCH // 4) for k in kinds] == [k <= kind for k in kinds]
    for layer in survey._stands:
        assert np.isfinite(survey._taken[BATCH // 4][layer].loop_seconds).any(axis=1).all()


def test_all_devices_are_surveyed_in_every_shape_however_badly_they_share_the_work() -> None:
    """A plan without a pipeline has no other stage, so that nothing else tells what it takes."""
    cluster = al.cluster("dgx-a100")
    link = replace(cluster.intra_host, bandwidth_bytes_per_second=1e8)
    survey, _ = _surveyed(replace(cluster, intra_host=link), (4,))
    taken = next(iter(survey._taken[survey.first_size].values()))
    seconds = (taken.loop_seconds + taken.update_seconds / 4).min(axis=1)
    devices = np.array(survey.space.devices)
    whole = int(devices.argmax())
    assert seconds[whole] * devices[whole] > DEAR * (seconds * devices).min()
    for shape, mesh in enumerate(survey.space.meshes[whole]):
        assert np.isfinite(taken.loop_seconds[whole, shape]), mesh


def test_shapes_with_whole_state_on_each_host_are_not_solved() -> None:
    survey, solved = _surveyed(al.cluster("dgx-a100", num_hosts=2), (4,))
    assert solved[0] and not any("replica" in text for text in solved[0])
    space, guess = survey.space, survey.guess(BATCH // 4)[0]
    both = space.kinds.index(max(space.kinds, key=lambda kind: kind.num_devices))
    meshes = space.meshes[both]
    stands = {meshes[c].shape: guess[:, both, s] for c, s in enumerate(space.stand_ins[both][: len(meshes)])}
    taken = {mesh.shape: guess[:, both, c] for c, mesh in enumerate(meshes)}
    assert space.stand_ins[both].tolist() != list(range(space.most_shapes))
    for c, mesh in enumerate(meshes):
        if "replica" in mesh.axis_names:
            replicas, data, *model = mesh.shape
            assert meshes[space.stand_ins[both, c]].shape == (replicas * data, *model)
            assert np.array_equal(taken[mesh.shape], stands[mesh.shape])


@pytest.mark.parametrize(("bandwidth", "again"), [(1e8, False), (1e12, True)])
def test_only_what_is_promising_is_looked_at_again(bandwidth: float, again: bool) -> None:
    """Both hosts of a slow network are not, but one of them is."""
    cluster = al.cluster("dgx-a100", num_hosts=2)
    link = replace(cluster.inter_host, bandwidth_bytes_per_second=bandwidth, latency_seconds=1e-7)
    _, (first, second) = _surveyed(replace(cluster, inter_host=link), (4, 8))
    assert any("x=16" in text for text in first) and any("x=8" in text for text in second)
    assert any("x=16" in text for text in second) == again


def test_a_layer_of_unknown_cost_leaves_ranges_without_it_as_they_are() -> None:
    """The difference of two infinite cumulative sums would be no number."""
    fixed = np.array([1.0, np.inf, 2.0, 3.0])[:, None]
    found = in_flight_within(np.array([5.0]), fixed, np.zeros((4, 1)), np.zeros((4, 1)), [1])[..., 0]
    assert found[np.triu_indices(4)].tolist() == [1, 0, 0, 0, 0, 0, 0, 1, 1, 1]
