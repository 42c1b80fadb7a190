"""Every form of call that `jax.jit` and the libraries of modules have: names of arguments, methods, modules that hold
functions (Equinox) and modules that update themselves (Flax NNX).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import alpa_lite as al
from alpa_lite.errors import PlanError, TraceError
from tests.end_to_end.cases import eager_cluster

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = RNG.normal(size=(16, 1)).astype(np.float32)
PLANNERS = {
    "data": (al.planners.DataParallel(), 1),
    "FSDP": (al.planners.FSDP(), 1),
    "pipeline": (al.planners.Pipeline(pipeline=2), 2),
}


def _parallel(fun: Any, name: str = "data", **options: Any) -> Any:
    planner, num_microbatches = PLANNERS[name]
    return al.parallelize(
        fun, cluster=eager_cluster(), planner=planner, num_microbatches=num_microbatches, cache=False, **options
    )


def _step(w: Any, x: Any, scale: Any = 1.0, kind: str = "square") -> Any:
    def loss(w: Any) -> Any:
        error = scale * jnp.tanh(x @ w)
        return jnp.mean(error**2 if kind == "square" else jnp.abs(error))

    value, grads = jax.value_and_grad(loss)(w)
    return w - 0.1 * grads, value


W = RNG.normal(size=(4, 4)).astype(np.float32)


def _assert_close(got: Any, want: Any) -> None:
    left, right = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# --- names of arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [{"static_argnames": "kind"}, {"static_argnums": 3}, {"static_argnames": ["kind"]}])
def test_static_arguments_by_name_and_by_position_are_the_same(named: dict[str, Any], devices: Any) -> None:
    step, want = _parallel(_step, **named), jax.jit(_step, **named)
    for kind in ("square", "absolute"):
        _assert_close(step(W, X, 2.0, kind), want(W, X, 2.0, kind))
        _assert_close(step(W, X, 2.0, kind=kind), want(W, X, 2.0, kind=kind))
    _assert_close(step(W, X), want(W, X))


def test_an_unknown_name_is_told_with_those_that_there_are(devices: Any) -> None:
    for option in ("static_argnames", "donate_argnames"):
        with pytest.raises(PlanError, match=rf"{option}='sort' .* _step has the parameters w, x, scale, kind"):
            _parallel(_step, **{option: "sort"})


def test_donated_by_name(devices: Any) -> None:
    step = _parallel(_step, donate_argnames="w", static_argnames="kind")
    w, _ = step(jnp.asarray(W), jnp.asarray(X))
    again, _ = step(w, x=jnp.asarray(X))
    assert w.is_deleted() and not again.is_deleted()
    step(w=again, x=jnp.asarray(X))
    assert again.is_deleted()


# --- methods and callables --------------------------------------------------------------------------------------------


class Trainer:
    """An object with a decorated step, as trainers have one."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    @functools.partial(al.parallelize, planner=al.planners.DataParallel(), num_microbatches=1, donate_argnums=1)
    def step(self, w: Any, x: Any) -> Any:
        """One step of gradient descent."""
        value, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - self.rate * grads, value


def test_a_method_keeps_self(devices: Any) -> None:
    trainers = [Trainer(0.1), Trainer(0.5)]
    for trainer in trainers:
        w = jnp.asarray(W)
        _, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(X @ w) ** 2))(w)
        got, _ = trainer.step(w, X)
        _assert_close(got, W - trainer.rate * grads)
        assert w.is_deleted()
    assert trainers[0].step is trainers[0].step and trainers[0].step is not trainers[1].step
    assert trainers[0].step.last_plan is not None


class Module(eqx.Module):
    """A module whose method is a step: its arrays are arguments, not constants."""

    w: jax.Array

    @functools.partial(al.parallelize, planner=al.planners.DataParallel(), num_microbatches=1, batch_argnums="x")
    def loss(self, x: Any) -> Any:
        """A sum over samples."""
        return jnp.sum(jnp.tanh(x @ self.w) ** 2)


def test_a_method_of_a_pytree_takes_it_as_argument(devices: Any) -> None:
    for scale in (1.0, 2.0):
        module = Module(jnp.asarray(W) * scale)
        _assert_close(module.loss(X), np.sum(np.tanh(X @ (W * scale)) ** 2))
    assert len(Module.loss._compiled) == 1


def test_partial_functions_and_callables(devices: Any) -> None:
    @dataclasses.dataclass(frozen=True)
    class Step:
        scale: float

        def __call__(self, w: Any, x: Any) -> Any:
            return _step(w, x, self.scale)

    for fun in (functools.partial(_step, kind="absolute"), Step(3.0), functools.partial(_step, scale=2.0)):
        _assert_close(_parallel(fun)(W, X), jax.jit(fun)(W, X))


# --- modules ----------------------------------------------------------------------------------------------------------


def _equinox_model() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [
        eqx.nn.Linear(4, 8, key=keys[0]),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Dropout(0.5, inference=True),
        eqx.nn.MLP(8, 1, 16, 2, key=keys[1]),
    ]
    return eqx.nn.Sequential(layers)


def _equinox_step(model: Any, state: Any, x: Any, y: Any) -> Any:
    loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(m)(x) - y) ** 2))(model)
    updates, state = optax.adam(1e-2).update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["plain", "filter_jit"])
@pytest.mark.parametrize("name", PLANNERS)
def test_an_equinox_module_is_passed_whole(name: str, wrap: Any, devices: Any) -> None:
    parallel = _parallel(wrap(_equinox_step), name)

    def run(step: Any) -> Any:
        model = _equinox_model()
        state = optax.adam(1e-2).init(eqx.filter(model, eqx.is_array))
        for _ in range(3):
            model, state, loss = step(model, state, X, Y)
        return model, state, loss

    got, want = run(parallel), run(eqx.filter_jit(_equinox_step))
    _assert_close(eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert got[0].layers[2].inference is True and got[0].layers[1].fn is jax.nn.relu
    assert len(parallel._compiled) == 1


def test_other_constants_of_a_module_compile_anew(devices: Any) -> None:
    step = _parallel(lambda model, x: jnp.sum(jax.vmap(model)(x)), batch_argnums=1)
    model = eqx.nn.Sequential([eqx.nn.Linear(4, 2, key=jax.random.key(0)), eqx.nn.Lambda(jnp.sin)])
    other = eqx.tree_at(lambda m: m.layers[1].fn, model, jnp.cos)
    for each in (model, other, model):
        _assert_close(step(each, X), jnp.sum(jax.vmap(each)(X)))
    assert len(step._compiled) == 2
    with pytest.raises(PlanError, match="compiled for other static arguments or constants"):
        step.compiled(model, X)(other, X)


class Network(nnx.Module):
    """A network with a shared layer, a counter, statistics and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.middle = nnx.Linear(8, 8, rngs=rngs)
        self.shared = self.middle
        self.out = nnx.Linear(8, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        """Return one number per sample."""
        self.calls[...] += 1
        return self.out(self.shared(jnp.tanh(self.middle(jnp.tanh(self.first(x))))))


def _nnx_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def _nnx_objects() -> Any:
    model = Network(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["plain", "nnx.jit"])
@pytest.mark.parametrize("name", ["data", "FSDP"])
def test_nnx_modules_are_updated_in_place(name: str, wrap: Any, devices: Any) -> None:
    parallel = _parallel(wrap(_nnx_step), name)

    def run(step: Any) -> Any:
        model, optimizer = _nnx_objects()
        losses = [float(step(model, optimizer, X, Y)) for _ in range(3)]
        return losses, nnx.state(model), nnx.state(optimizer)

    _assert_close(run(parallel), run(nnx.jit(_nnx_step)))
    assert len(parallel._compiled) == 1


def test_nnx_modules_in_a_pipeline(devices: Any) -> None:
    class Plain(Network):
        def __call__(self, x: Any) -> Any:
            return self.out(self.shared(jnp.tanh(self.middle(jnp.tanh(self.first(x))))))

    def run(step: Any) -> Any:
        model = Plain(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        return [float(step(model, optimizer, X, Y)) for _ in range(3)], nnx.state(model)

    _assert_close(run(_parallel(_nnx_step, "pipeline")), run(nnx.jit(_nnx_step)))


def test_an_nnx_model_that_is_only_read_stays_as_it_is(devices: Any) -> None:
    model, _ = _nnx_objects()
    model.calls = nnx.static(0) if hasattr(nnx, "static") else 0

    def evaluate(model: Any, x: Any) -> Any:
        return jnp.tanh(model.first(x))

    before = nnx.state(model)
    step = _parallel(evaluate, donate_argnums=0)
    for _ in range(2):  # the module is donated, but not replaced: its arrays stay
        _assert_close(step(model, X), evaluate(model, X))
    _assert_close(nnx.state(model), before)


def test_variables_made_by_a_step_are_told(devices: Any) -> None:
    model, _ = _nnx_objects()

    def step(model: Any, x: Any) -> Any:
        model.last = nnx.Variable(jnp.mean(x))
        return jnp.mean(model.first(x))

    with pytest.raises(TraceError, match=r"step adds variables to model, or removes some.*Make all variables before"):
        _parallel(step)(model, X)


# --- what comes of a call ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_lowered_and_compiled_steps_describe_themselves_as_those_of_jit_do(name: str, devices: Any) -> None:
    lowered = _parallel(_step, name).lower(jax.ShapeDtypeStruct(W.shape, W.dtype), X)
    text = lowered.as_text()
    assert text.startswith("// ") and "stablehlo.tanh" in text and "module @" in text
    assert lowered.as_text(platform="cuda")  # no device of the platform is needed
    assert lowered.cost_analysis()["flops"] > 2 * W.size
    compiled = lowered.compile()
    assert "HloModule" in compiled.as_text()
    assert compiled.cost_analysis()["flops"] > 0
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes >= W.nbytes / 8 and memory.temp_size_in_bytes >= 0
    _assert_close(compiled(W, X), jax.jit(_step)(W, X))


def test_the_costs_of_a_whole_step_do_not_depend_on_its_micro_batches(devices: Any) -> None:
    options = {"cluster": eager_cluster(), "planner": al.planners.DataParallel(), "cache": False}
    found = [
        al.parallelize(_step, num_microbatches=m, **options).lower(W, X).compile().cost_analysis()["flops"]
        for m in (1, 2)
    ]
    assert found[1] == pytest.approx(found[0], rel=0.2)


def test_a_cleared_cache_compiles_anew(devices: Any) -> None:
    step = _parallel(_step)
    step(W, X)
    step.clear_cache()
    assert not step._compiled
    _assert_close(step(W, X), jax.jit(_step)(W, X))


def test_kernels_that_need_their_devices_are_lowered_with_a_sentence() -> None:
    def attend(w: Any, x: Any) -> Any:
        heads = (x @ w).reshape(8, 128, 4, 64).astype(jnp.bfloat16)
        return jax.nn.dot_product_attention(heads, heads, heads, implementation="cudnn")

    arguments = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((8, 128, 256), jnp.float32)
    planner = al.planners.DataParallel()
    lowered = al.parallelize(attend, cluster="dgx-h100", planner=planner, batch_argnums="x").lower(*arguments)
    with pytest.raises(al.errors.PlanError, match=r"attend cannot be lowered for cuda on this machine.*cuDNN"):
        lowered.as_text(platform="cuda")
