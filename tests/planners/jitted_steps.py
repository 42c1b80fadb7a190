"""A step for the planners of jitted and compiled steps, and what their tests compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al

WIDTH, SAMPLES = 64, 32


def step(params: Any, batch: Any) -> Any:
    """Two products; `params["frozen"]` is returned as it came, and nobody reads `batch["z"]`."""

    def loss(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {"up": shaped(WIDTH, 4 * WIDTH), "down": shaped(4 * WIDTH, WIDTH), "frozen": shaped(3)}
BATCH = {name: shaped(SAMPLES, WIDTH) for name in "xyz"}
ARGS = (PARAMS, BATCH)
SPECS = ({"up": P(None, "model"), "down": P("model"), "frozen": P()}, P("data"))
AXES = {"data": 2, "model": 4}


def mesh_of(devices: Any = None, **axes: int) -> Any:
    """A mesh of devices, or an abstract one."""
    axes = axes or AXES
    if devices is None:
        return AbstractMesh(tuple(axes.values()), tuple(axes))
    return Mesh(np.array(devices[: prod(axes.values())]).reshape(*axes.values()), tuple(axes))


def on(mesh: Any, specs: Any) -> Any:
    """Shardings on a mesh in place of specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def plan_of(planner: Any, fun: Callable[..., Any] = step, args: Any = ARGS, **options: Any) -> al.Plan:
    return al.plan(fun, *args, planner=planner, **{"cluster": "dgx-1", "cache": False, **options})


def parts(plan: al.Plan) -> dict[str, tuple[int, ...]]:
    """The number of parts of each dim of each argument, by path."""
    (stage,) = plan.stages
    sizes = dict(stage.mesh_shape.axis_sizes)
    return {name: tuple(prod(sizes[a] for a in dim) for dim in spec.dims) for name, spec in stage.specs.items()}


def exported(plan: al.Plan) -> ModuleType:
    """The module of plain JAX that a plan is exported as."""
    made = ModuleType("exported")
    text = plan.export("jax", step=f"{__name__}:step")
    exec(compile(text, "exported.py", "exec"), made.__dict__)
    return made


def result_parts(plan: al.Plan) -> list[tuple[int, ...]]:
    """The number of parts of each dim of each result, without whole dims at the end."""
    module = exported(plan)

    def one(spec: P) -> tuple[int, ...]:
        named = [() if dim is None else (dim,) if isinstance(dim, str) else dim for dim in spec]
        return tuple(prod(module.AXES[axis] for axis in dim) for dim in named)

    return [one(spec) for spec in module.RESULTS]


def collectives(plan: al.Plan) -> Counter[tuple[str, float]]:
    """How often which collective sends so many bytes per step."""
    uses = plan.prediction.collectives
    return Counter((str(use.kind), use.bytes) for use in uses for _ in range(round(use.count)))
