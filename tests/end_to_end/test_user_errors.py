"""What users give wrong is answered by one sentence of alpa_lite: what was given, what was needed, what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite import errors
from alpa_lite.plan.plan import FORMAT
from alpa_lite.planners import Auto, DataParallel, Hybrid, Megatron, Pipeline, Planner, Zero
from cost_models.checks import CostModelError
from cost_models.cluster import with_memory
from tests.end_to_end.cases import MODELS, eager_cluster, make_batch
from tests.end_to_end.programs import PARAMS, X, Y, descend, forward, squared


def _step(p: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(squared)(p, x, y)
    return descend(p, grads), loss


def _other_step(p: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: 2.0 * squared(p, x, y))(p)
    return descend(p, grads), loss


def _plan(fun: Callable[..., Any] = _step, args: Any = (PARAMS, X, Y), **options: Any) -> al.Plan:
    return al.plan(fun, *args, **{"cluster": eager_cluster(), "planner": Hybrid(pipeline=2), **options})


def _small_memory(memory_bytes: float) -> Any:
    cluster = eager_cluster()
    return with_memory(cluster, memory_bytes)


@contextlib.contextmanager
def _raises(kind: type[Exception], *fragments: str) -> Iterator[None]:
    """Expect one error whose message is made of sentences and holds every fragment."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, message
    assert message.rstrip()[-1] in ".)", message


# --- micro-batches and the batch --------------------------------------------------------------------------------------


def test_micro_batches_that_do_not_divide_the_batch() -> None:
    with _raises(errors.BatchError, "num_microbatches=3", "16 samples", "[1, 2, 4, 8, 16]"):
        _plan(num_microbatches=3)


@pytest.mark.parametrize("number", [0, -2, 1.5, True, "many", None])
def test_a_number_of_micro_batches_that_is_none(number: Any) -> None:
    with _raises(errors.PlanError, f"num_microbatches={number!r}", '"auto"'):
        al.parallelize(_step, num_microbatches=number)


def _two_sizes(p: Any, x: Any, y: Any) -> Any:
    return descend(p, p), (forward(p, x) ** 2).sum() - (forward(p, y) ** 2).sum()


def test_a_batch_of_which_there_may_be_two() -> None:
    with _raises(errors.BatchError, "x [16, 8]", "batch_argnums=('x',) or batch_argnums=('y',)"):
        _plan(_two_sizes, (PARAMS, X, X[:4]), num_microbatches=4)
    for named in ("x", "y"):
        options: Any = {"planner": Hybrid(pipeline=2, tensor=4), "num_microbatches": 4, "batch_argnums": (named,)}
        assert _plan(_two_sizes, (PARAMS, X, X[:4]), **options).num_microbatches == 4


def test_a_batch_that_data_parallelism_needs_and_cannot_find() -> None:
    with _raises(errors.PlanError, "splits the batch over 8 devices", "batch_argnums"):
        _plan(_two_sizes, (PARAMS, X, X[:4]), planner=DataParallel())


def test_micro_batches_that_fail_tell_which_batch_was_assumed() -> None:
    def step(p: Any, table: Any, x: Any, labels: Any) -> Any:
        return _step(p, x * (table * p["w1"][0, 0])[labels][:, None], x[:, :4])

    given = (PARAMS, jnp.ones(16), X, jnp.zeros(16, jnp.int32))
    with _raises(errors.NonAdditiveError, "dim 0 of table, x, labels (assumed; name others with batch_argnums)"):
        _plan(step, given, num_microbatches=4)
    assert _plan(step, given, num_microbatches=4, batch_argnums=("x", "labels")).num_microbatches == 4


def test_a_step_without_any_data() -> None:
    with _raises(errors.BatchError, "comes back among the outputs", "batch_argnums"):
        _plan(lambda p: descend(p, p), (PARAMS,), num_microbatches=2)


@pytest.mark.parametrize("name", ["inputs", ("x", "inputs")])
def test_a_batch_argument_that_does_not_exist(name: Any) -> None:
    with _raises(errors.BatchError, "inputs", "no argument of that name"):
        _plan(lambda p, *, x, y: _step(p, x, y), (PARAMS,), x=X, y=Y, batch_argnums=name)


@pytest.mark.parametrize("option", ["static_argnums", "donate_argnums", "batch_argnums"])
def test_an_argument_number_that_does_not_exist(option: str) -> None:
    with _raises(errors.TraceError, "Argument number 7", "3 positional"):
        al.parallelize(_step, **{option: 7}).trace(PARAMS, X, Y)
    with _raises(errors.TraceError, "Argument number 7", "3 positional"):
        al.parallelize(_step, **{option: 7})(PARAMS, X, Y)


def test_a_batch_too_small_for_the_data_axis() -> None:
    with _raises(errors.PlanError, "over 8 devices", "4 samples", "batch 16 in 4 micro-batches"):
        _plan(planner=DataParallel(), num_microbatches=4)


def test_a_step_that_looks_at_its_batch_size() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        return _step(p, x * 2 if x.shape[0] == 16 else x, y)

    with _raises(errors.TraceError, "changes with its batch size", "num_microbatches=1"):
        _plan(step, num_microbatches=4)


def test_a_step_written_for_one_batch_size() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        return _step(p, x + jnp.ones((16, 8)), y)

    with _raises(errors.TraceError, "traced at 8 samples instead of 16", "num_microbatches=1"):
        _plan(step, num_microbatches=4)


# --- arguments --------------------------------------------------------------------------------------------------------


def test_an_argument_that_is_no_array() -> None:
    with _raises(errors.TraceError, "kind is a str", "static_argnums"):
        _plan(lambda p, x, y, kind: _step(p, x, y), (PARAMS, X, Y, "fast"))


def test_arguments_of_another_structure_than_compiled(devices: Any) -> None:
    compiled = al.parallelize(_step, cluster=eager_cluster(), planner=DataParallel()).compiled(PARAMS, X, Y)
    with _raises(errors.PlanError, "_step was compiled for other arguments", "compile again"):
        compiled({**PARAMS, "more": X}, X, Y)


def test_arguments_of_another_shape_than_compiled(devices: Any) -> None:
    compiled = al.parallelize(_step, cluster=eager_cluster(), planner=DataParallel()).compiled(PARAMS, X, Y)
    with _raises(errors.PlanError, "x", "[8, 8]", "[16, 8]", "compile again"):
        compiled(PARAMS, X[:8], Y[:8])


def test_the_users_own_exception_comes_through_as_it_is() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        raise KeyError("my own mistake")

    with pytest.raises(KeyError, match="my own mistake"):
        _plan(step)


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    _plan().save(path)
    return path


def test_a_plan_for_another_function(saved: Path) -> None:
    with _raises(errors.MismatchError, "'_step'", "other code or other argument shapes", "al.plan"):
        _plan(_other_step, planner=al.Plan.load(saved))


def test_a_plan_for_other_shapes(saved: Path) -> None:
    with _raises(errors.MismatchError, "other argument shapes", "al.plan"):
        _plan(args=(PARAMS, X[:8], Y[:8]), planner=al.Plan.load(saved))


def test_a_plan_for_another_cluster(saved: Path) -> None:
    smaller = dataclasses.replace(eager_cluster(), devices_per_host=4, name="half a host")
    with _raises(errors.MismatchError, "8 devices", "half a host", "4"):
        _plan(planner=al.Plan.load(saved), cluster=smaller)


def test_a_plan_for_another_number_of_micro_batches(saved: Path) -> None:
    wanted = 2 if al.Plan.load(saved).num_microbatches != 2 else 4
    with _raises(errors.MismatchError, f"num_microbatches={wanted}", str(al.Plan.load(saved).num_microbatches)):
        _plan(planner=al.Plan.load(saved), num_microbatches=wanted)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "cannot be read"),
        ("[1, 2]", "no plan of format"),
        ('{"format": 99}', "no plan of format"),
        (f'{{"format": {FORMAT}, "name": "x"}}', "lacks"),
    ],
)
def test_a_file_that_is_no_plan(text: str, fragment: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with _raises(errors.PlanError, fragment):
        al.Plan.load(path)


def test_a_missing_plan_file(tmp_path: Path) -> None:
    with _raises(errors.PlanError, "nowhere.json", "plan.save"):
        al.Plan.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("key", ["stages", "cluster", "schedule", "prediction", "solver"])
def test_a_plan_file_with_a_spoiled_part(key: str, saved: Path) -> None:
    data = json.loads(saved.read_text())
    part = data[key][0] if key == "stages" else data[key]
    part["surprise"] = 1
    del data["checksum"]  # changed on purpose
    saved.write_text(json.dumps(data))
    with pytest.raises((errors.PlanError, CostModelError), match="surprise"):
        al.Plan.load(saved)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planner", "fragments"),
    [
        (DataParallel(), ["stage 0", "8 devices", "needs at least"]),
        (Pipeline(pipeline=2), ["stage 1", "4 devices", "1 micro-batch in flight"]),
        (Auto(num_layers=2, manual=()), ["layer", "of 2 layers", "needs at least"]),
        (Auto(num_layers=2), ["needs at least"]),
    ],
    ids=["data_parallel", "pipeline", "auto_alone", "auto"],
)
def test_devices_without_enough_memory(planner: Planner, fragments: list[str]) -> None:
    with _raises(errors.InfeasibleError, *fragments, "B per device", "V100 SXM2 16GB has 64 B"):
        _plan(planner=planner, cluster=_small_memory(64.0), num_microbatches=4 if "auto" in planner.name else "auto")


def test_memory_is_told_in_readable_numbers() -> None:
    model = MODELS["gpt"]
    wide = dataclasses.replace(model, hidden=1024, num_layers=2, vocab_size=4096, dropout=0.0)
    params = jax.eval_shape(wide.init, jax.random.key(0))
    with _raises(errors.InfeasibleError, "stage 0", "MiB per device", "has 50.0 MiB"):
        _plan(
            lambda p, b: descend(p, jax.grad(wide.loss_fn)(p, b)),
            (params, make_batch(wide, 0)),
            planner=DataParallel(),
            cluster=_small_memory(50 * 2.0**20),
        )


def test_what_fits_is_planned_within_the_memory() -> None:
    # The limit binds: replicated parameters do not fit, split ones do.
    params = {"w": np.zeros((256, 256), np.float32), "v": np.zeros((256, 4), np.float32)}

    def step(p: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] @ p["v"] - y) ** 2))(p)
        return descend(p, grads), loss

    args = params, np.zeros((16, 256), np.float32), np.zeros((16, 4), np.float32)
    free = _plan(step, args, planner=DataParallel(), num_microbatches=1)
    limit = 0.6 * max(free.prediction.peak_bytes)
    with _raises(errors.InfeasibleError, "stage 0"):
        _plan(step, args, planner=DataParallel(), cluster=_small_memory(limit), num_microbatches=1)
    tight = _plan(step, args, planner=Auto(num_layers=1), cluster=_small_memory(limit), num_microbatches=1)
    assert max(tight.prediction.peak_bytes) <= limit


# --- degrees, stages, devices -----------------------------------------------------------------------------------------


def test_more_stages_than_operations() -> None:
    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.sum(x * w))(w)
        return w - grad, loss

    with _raises(errors.PlanError, "8 pipeline stages were asked for", "only 2 operations", "at most 2"):
        _plan(step, (X[0], X), planner=Pipeline(pipeline=8))


@pytest.mark.parametrize("planner", [Hybrid(pipeline=3), Hybrid(data=3), Megatron(tensor=5), Pipeline(pipeline=16)])
def test_degrees_that_do_not_multiply_to_the_devices(planner: Planner) -> None:
    with _raises(errors.PlanError, "8", "Choose degrees whose product is 8"):
        _plan(planner=planner)


@pytest.mark.parametrize("stage", [0, 4])
def test_an_unknown_stage_of_zero(stage: int) -> None:
    with _raises(errors.PlanError, f"stage={stage}", "1, 2 and 3"):
        Zero(stage=stage)


def test_more_devices_than_there_are(devices: Any) -> None:
    step = al.parallelize(_step, cluster=al.cluster("p3.16xlarge", num_hosts=2), planner=DataParallel())
    with _raises(errors.ExecutionError, "16 devices", "JAX sees 8", "local_cluster"):
        step(PARAMS, X, Y)


def test_a_cluster_that_nobody_knows() -> None:
    with pytest.raises(CostModelError, match=r"p3\.16xlarge"):
        _plan(cluster="p3.16xlarg")


def test_initial_state_of_another_structure(devices: Any) -> None:
    compiled = al.parallelize(_step, cluster=eager_cluster(), planner=DataParallel()).compiled(PARAMS, X, Y)
    with _raises(errors.PlanError, "init_fn returns", "argument 0"):
        al.init_sharded(lambda: {"w1": X}, like=compiled)


def test_every_error_of_alpa_lite_can_be_caught_as_one() -> None:
    with pytest.raises(al.AlpaLiteError):
        _plan(num_microbatches=3)
    with pytest.raises(al.AlpaLiteError):
        _plan(planner=Hybrid(data=3))
