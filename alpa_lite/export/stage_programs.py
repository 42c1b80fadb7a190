"""A plan as StableHLO: the program of each task of its stages, with the shardings of the plan.

What is written is what runs: the text is that of `LoweredFunction.as_text`, below comments on the stages. Equal tasks
are written once, with all their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from alpa_lite import _jax
from alpa_lite.errors import PlanError
from alpa_lite.export.degrees import programs_of
from alpa_lite.lower.plan_fits import as_planned
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.program_builder import build_program
from alpa_lite.runtime.execute.compile import LoweredStep, joined_texts, lowered_tasks
from alpa_lite.step.split import TracedStep
from alpa_lite.text import show_count, show_numbers


def stablehlo(plan: Plan, platform: str | None = None) -> str:
    """Return the StableHLO of all tasks of a plan; `platform` is "cpu", "cuda" or "tpu", by default this process's.

    Raises `PlanError` for a plan from a file, and for kernels that JAX lowers only where their devices are.
    """
    lowered = lowered_step(plan, step_of(plan))
    with for_platform(plan, platform) as target:
        # Held in a list, since programs are told apart by identity.
        tasks = lowered_tasks(lowered, target)
    return "\n".join([*comment_lines(plan), joined_texts((task.name, text) for task, text in tasks)])


def step_of(plan: Plan) -> TracedStep:
    """Return the step of a plan, with the recomputation that it chose. Raises `PlanError` for a plan from a file."""
    programs = programs_of(plan).updated_every(plan.update_every)
    return as_planned(programs.with_equations(plan.num_microbatches, plan.loop_parts), plan)


def lowered_step(plan: Plan, step: TracedStep) -> LoweredStep:
    """Return the instructions of a plan and what they were made of."""
    program = build_program(plan, step.step)
    return LoweredStep(program=program, plan=plan, step=step.step, equations=step.equations)


@contextmanager
def for_platform(plan: Plan, platform: str | None) -> Iterator[str]:
    """Lower inside the `with` block for a platform, whose name is returned; default: that of this process.

    Raises `PlanError` where JAX cannot lower for this platform.
    """
    target = platform or _jax.lowering_platform(jax.devices()[0])
    with _jax.no_mesh():
        try:
            yield target
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise PlanError(
                f"{plan.name} cannot be lowered for {target} on this machine: {str(error).rstrip('.')}. Kernels such "
                "as those of cuDNN are lowered where their devices are: export the plan there."
            ) from error


def comment_lines(plan: Plan) -> list[str]:
    """Return lines of comment on a plan and its stages."""
    lines = [f"// {plan.function} by {plan.name}, {show_count(plan.num_microbatches, 'micro-batch')}"]
    return lines + [
        f"// stage {number}: {stage.mesh_shape} on devices {show_numbers(stage.submesh.devices)}"
        for number, stage in enumerate(plan.stages)
    ]
