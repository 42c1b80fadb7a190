"""Every manual planner on small models of several kinds: `python -m tests.end_to_end.manual_plans [model ...]`.

Prints one row per planner and model: predicted milliseconds, the largest relative error of any output against `jax.jit`
on one device, whether the collectives handed to XLA are those of the plan, how many of these XLA kept, or why the
planner does not apply.
"""

from __future__ import annotations

import tests.conftest  # noqa: F401  # sets up the virtual devices before JAX is imported

# isort: split
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from alpa_lite import planners as p
from alpa_lite.cli.models.transformer_layers import Experts
from alpa_lite.schedule import GPipe, Interleaved1F1B
from tests.end_to_end.cases import MODELS, Training, eager_cluster, make_batch, relative_error
from tests.end_to_end.collectives import beyond, emitted, handed_over, planned
from tests.end_to_end.transformers import TINY, with_architecture
from tests.end_to_end.transformers import Training as TransformerTraining

PLANNERS: dict[str, tuple[p.Planner, int]] = {
    "DataParallel()": (p.DataParallel(), 1),
    "DataParallel(bucket_bytes=2**12)": (p.DataParallel(bucket_bytes=2**12), 1),
    "Zero(stage=1)": (p.Zero(stage=1), 1),
    "Zero(stage=2), 2 micro-batches": (p.Zero(stage=2), 2),
    "FSDP()": (p.FSDP(), 1),
    "FSDP(replicas=2)": (p.FSDP(replicas=2), 1),
    "FSDP(reshard_after_forward=False)": (p.FSDP(reshard_after_forward=False), 1),
    "Megatron(tensor=4)": (p.Megatron(tensor=4), 1),
    "Megatron(tensor=4, vocab_parallel=True)": (p.Megatron(tensor=4, vocab_parallel=True), 1),
    "Megatron(tensor=2, pipeline=2)": (p.Megatron(tensor=2, pipeline=2), 2),
    "MeshTensorFlow(batch:rows)": (p.MeshTensorFlow(layout="batch:rows", mesh={"rows": 8}), 1),
    "MeshTensorFlow(batch:rows;heads,d_ff:cols)": (
        p.MeshTensorFlow(layout="batch:rows;heads:cols;d_ff:cols", mesh={"rows": 2, "cols": 4}),
        1,
    ),
    "MeshTensorFlow(auto)": (p.MeshTensorFlow(layout="auto", mesh={"rows": 2, "cols": 4}), 1),
    "AxoNN()": (p.AxoNN(), 1),
    "AxoNN(gx=2, gy=2, gz=2)": (p.AxoNN(gx=2, gy=2, gz=2), 1),
    "AxoNN(gx=2, gy=2, gdata=2), 2 micro-batches": (p.AxoNN(gx=2, gy=2, gdata=2), 2),
    "OneWeirdTrick()": (p.OneWeirdTrick(), 1),
    "ConvolutionParallel(sample=2, height=2, filter=2)": (p.ConvolutionParallel(sample=2, height=2, filter=2), 1),
    "GShard(expert=4)": (p.GShard(expert=4), 1),
    "Pipeline(schedule=GPipe())": (p.Pipeline(pipeline=2, schedule=GPipe()), 2),
    "Pipeline(schedule=Interleaved1F1B())": (p.Pipeline(pipeline=2, schedule=Interleaved1F1B(num_chunks=2)), 2),
    "TorchGPipe()": (p.TorchGPipe(pipeline=2), 2),
    "DeepSpeed3D(pipeline=2, tensor=2)": (p.DeepSpeed3D(pipeline=2, tensor=2), 2),
    "ColocRL()": (p.ColocRL(steps=20), 1),
    "FlexFlow()": (p.FlexFlow(budget=100), 1),
    "GridSearch()": (p.GridSearch(), 2),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step and its arguments."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]


def _of_training(model: str) -> Case:
    training = Training(model=model)
    return Case(step=training.step(), arguments=(training.start(), make_batch(MODELS[model], 0), jax.random.key(0)))


def _of_transformer(**changes: Any) -> Case:
    training = TransformerTraining(
        model=replace(with_architecture(TINY, num_kv_heads=None), num_layers=4, **changes), batch_size=16
    )
    return Case(step=training.step, arguments=training.arguments())


CASES: dict[str, Callable[[], Case]] = {
    "MLP": lambda: _of_training("mlp"),
    "GPT, written out": lambda: _of_training("gpt"),
    "transformer, scanned": lambda: _of_transformer(),
    "mixture of experts": lambda: _of_transformer(experts=Experts(num_experts=4, top_k=2, group_size=8)),
    "CNN": lambda: _of_training("cnn"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one planner on one model; `refused`: the sentence if it does not apply."""

    planner: str
    model: str
    refused: str = ""
    milliseconds: float = 0.0
    error: float = 0.0
    as_planned: bool = False
    added: float = 0.0
    collectives: float = 0.0
    kept: float = 0.0

    def __str__(self) -> str:
        """A line of the table."""
        if self.refused:
            return f"| {self.planner} | {self.model} | – | – | – | {self.refused} |"
        agreed = "yes" if self.as_planned else "NO"
        merged = "" if self.kept == self.collectives else f"XLA merged {self.collectives - self.kept:g}"
        numbers = f"{self.milliseconds:.3g} | {self.error:.0e} | {agreed}, {self.collectives:g}"
        return f"| {self.planner} | {self.model} | {numbers} | {merged} |"


@cache
def _reference(model: str) -> Any:
    case = CASES[model]()
    return jax.tree.leaves(jax.jit(case.step)(*case.arguments))


def row(planner: str, model: str) -> Row:
    """Plan, run and compare."""
    case, (chosen, num_microbatches) = CASES[model](), PLANNERS[planner]
    options = dict(cluster=eager_cluster(), planner=chosen, num_microbatches=num_microbatches)
    try:
        compiled = al.parallelize(case.step, **options).compiled(*case.arguments)
    except al.errors.PlanError as error:
        return Row(planner=planner, model=model, refused=str(error))
    got, want = jax.tree.leaves(compiled(*case.arguments)), _reference(model)
    numbers = [(a, b) for a, b in zip(got, want, strict=True) if jnp.issubdtype(b.dtype, jnp.number)]
    plan, given, made = planned(compiled.plan), handed_over(compiled), emitted(compiled)
    return Row(
        planner=planner,
        model=model,
        milliseconds=1e3 * compiled.plan.prediction.step_seconds,
        error=max(relative_error(np.asarray(a), np.asarray(b)) for a, b in numbers),
        as_planned=given == plan,
        added=sum(beyond(made, plan).values()),
        collectives=sum(plan.values()),
        kept=sum(made.values()),
    )


def main(models: list[str]) -> None:
    """Print the table."""
    print("| planner | model | predicted ms | relative error | as planned, collectives | |")
    print("|---|---|---:|---:|---|---|")
    for planner in PLANNERS:
        for model in models or CASES:
            print(row(planner, model), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
