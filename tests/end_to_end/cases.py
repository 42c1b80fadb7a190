"""Models, planners, clusters and comparisons that the end-to-end tests share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa_lite as al
from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.cli.models.encoders import BERT, Translator
from alpa_lite.cli.models.sequential_networks import CNN, MLP, alexnet, vgg16
from alpa_lite.cli.models.skip_networks import UNet
from alpa_lite.cli.models.train import TrainState, init_state
from alpa_lite.planners import FSDP, Auto, DataParallel, Hybrid, Megatron, Pipeline, Planner, Zero
from alpa_lite.schedule import GPipe, ZeroBubbleH1
from cost_models.cluster import Cluster

TOLERANCE = 1e-5
"""Relative L2 error of a float32 array up to which two results count as re-associations of each other."""

NUM_SAMPLES = 32


@functools.cache
def eager_cluster() -> Cluster:
    """Eight devices that compute slowly on a fast link, so that even tiny models are worth splitting."""
    host = al.cluster("p3.16xlarge")
    device = dataclasses.replace(
        host.device,
        peak_flops={"float32": 1e9},
        memory_bandwidth=1e8,
        launch_seconds=1e-9,
        dispatch_seconds=1e-9,
        # Tiny products would be mostly padding in the blocks of a real device.
        num_units=1,
        tiles=((1, 1),),
        fill_depth=0.0,
    )
    link = dataclasses.replace(host.intra_host, latency_seconds=1e-7, ramp_seconds=0.0)
    return dataclasses.replace(host, name="slow devices, fast link", device=device, intra_host=link)


PLANNERS: dict[str, Planner] = {
    "auto": Auto(num_layers=2, manual=()),
    "data_parallel": DataParallel(),
    "megatron": Megatron(),
    "zero_2": Zero(stage=2),
    "fsdp": FSDP(),
    "pipeline_2": Pipeline(pipeline=2),
    "pipeline_4": Pipeline(pipeline=4),
    "by_operators": Auto(pipeline=4, num_layers=4, layers="operators"),
    "gpipe_2": Pipeline(pipeline=2, schedule=GPipe()),
    "zero_bubble_4": Hybrid(pipeline=4, schedule=ZeroBubbleH1()),
    "hybrid": Hybrid(pipeline=2, data=2, tensor=2),
}

Batch = dict[str, jax.Array]


def _gpt(**changes: Any) -> GPT:
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "hidden": 8,
        "seq_len": 4,
        "dropout": 0.2,
    }
    return GPT(**{**sizes, **changes})


MODELS: dict[str, Any] = {
    "mlp": MLP(in_features=16, hidden=32, out_features=8, num_layers=4),
    "gpt": _gpt(),
    "gpt_untied": _gpt(tied=False),
    "gpt_scan": _gpt(scan_layers=True),
    "gpt_remat": _gpt(remat=True),
    "cnn": CNN(image_size=8, channels=8),
}

PUBLISHED: dict[str, Any] = {
    "bert": BERT(vocab_size=32, num_layers=2, hidden=16, num_heads=2, inner=32, seq_len=8, num_masked=2),
    "alexnet": alexnet(image_size=64, width=8, dense=32, num_classes=8),
    "vgg16": vgg16(image_size=32, width=4, dense=32, num_classes=8),
    "unet": UNet(image_size=44, channels=4, depth=2),
    "translator": Translator(source_vocab=16, target_vocab=16, num_layers=2, hidden=16, source_len=5, target_len=6),
}
"""The forms of published models, small."""


def make_batch(model: Any, number: int, size: int = NUM_SAMPLES) -> Batch:
    """Batch number `number` of random data for a model."""
    if model in PUBLISHED.values():
        return {name: jnp.asarray(x) for name, x in draw_batch(model, size, number).items()}
    rng = np.random.default_rng(number)
    if isinstance(model, GPT):
        shape = (size, model.seq_len)
        return {name: jnp.asarray(rng.integers(0, model.vocab_size, shape)) for name in ("tokens", "targets")}
    if isinstance(model, CNN):
        shape = (size, model.image_size, model.image_size, 3)
        labels = rng.integers(0, model.num_classes, size)
        return {"images": jnp.asarray(rng.normal(size=shape), jnp.float32), "labels": jnp.asarray(labels)}
    return {
        "inputs": jnp.asarray(rng.normal(size=(size, model.in_features)), jnp.float32),
        "targets": jnp.asarray(rng.normal(size=(size, model.out_features)), jnp.float32),
    }


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, the reduction of its loss and an optimizer."""

    model: str
    reduction: str = "mean"
    optimizer: str = "momentum"
    num_steps: int = 5

    @property
    def architecture(self) -> Any:
        """The model itself."""
        return {**MODELS, **PUBLISHED}[self.model]

    @property
    def transform(self) -> optax.GradientTransformation:
        """The optimizer; a sum over the batch gets a smaller rate than a mean."""
        kind, _, clip = self.optimizer.partition("+")
        rate = 0.05 if self.reduction == "mean" else 5e-4
        base = optax.adamw(1e-3) if kind == "adamw" else optax.sgd(rate, momentum=0.9)
        return optax.chain(optax.clip_by_global_norm(0.3), base) if clip else base

    def step(self) -> Callable[..., Any]:
        """A train step that returns the loss and every gradient beside the new state."""
        loss_fn = functools.partial(self.architecture.loss_fn, reduction=self.reduction)
        transform = self.transform

        def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, dict[str, Any]]:
            loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, key)
            updates, opt_state = transform.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            new = TrainState(params=params, opt_state=opt_state, step=state.step + 1)
            return new, {"loss": loss, "grads": grads}

        return train_step

    def start(self) -> TrainState:
        """The state before the first step."""
        return init_state(jax.tree.map(jnp.array, _first_weights(self.model)), self.transform)

    def run(self, step: Callable[..., Any], num_steps: int | None = None) -> Any:
        """State and metrics after a number of steps, each on its own batch and key."""
        state, metrics = self.start(), None
        for i in range(num_steps or self.num_steps):
            state, metrics = step(state, make_batch(self.architecture, i), jax.random.key(i))
        return state, metrics


@functools.cache
def _first_weights(model: str) -> Any:
    """On the host, for steps may give up the arrays that they are given."""
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, jax.jit(Training(model=model).architecture.init)(jax.random.key(0)))


@functools.cache
def reference(training: Training) -> Any:
    """What `jax.jit` makes of a training."""
    return jax.tree.map(np.asarray, training.run(jax.jit(training.step())))


def relative_error(got: Any, want: Any) -> float:
    """‖got - want‖ / ‖want‖ in double precision; infinity when one of them is not finite where the other is."""
    a, b = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    error, norm = np.linalg.norm(np.nan_to_num(a - b)), np.linalg.norm(np.nan_to_num(b))
    return float(error / norm) if norm > 0 else float(error)


def assert_same(got: Any, want: Any, tolerance: float = TOLERANCE) -> None:
    """Equal structure, shapes and dtypes; floats up to `tolerance` relative L2 error per leaf, all else exactly."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if jnp.issubdtype(a.dtype, jnp.inexact):
            error = relative_error(a, b)
            assert error <= tolerance, f"{where}: relative error {error:.1e}"
        else:
            assert np.array_equal(np.asarray(a), np.asarray(b)), where


def run_both(fun: Callable[..., Any], args: Sequence[Any], **options: Any) -> tuple[Any, Any]:
    """What a function gives in parallel and under `jax.jit`; options as for `al.parallelize`."""
    options = {"cluster": eager_cluster(), "planner": PLANNERS["hybrid"], "num_microbatches": 1, **options}
    want = jax.jit(fun, static_argnums=options.get("static_argnums", ()))(*args)
    return al.parallelize(fun, **options)(*args), want


def parallel(program: Any, planner: str, num_microbatches: int = 1) -> Any:
    """The step of a program with `step` and `batch_argnums`, parallelised."""
    return al.parallelize(
        program.step,
        cluster=eager_cluster(),
        planner=PLANNERS[planner],
        num_microbatches=num_microbatches,
        batch_argnums=program.batch_argnums,
    )
