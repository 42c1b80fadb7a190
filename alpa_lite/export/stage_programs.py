"""A plan as StableHLO: the program of each task of its stages, with the shardings of the plan.

What is written is what runs: the text is that of `LoweredFunction.as_text`, below comments on the stages. Equal tasks
are written once, with all their names.
"""

from __future__ import annotations

import jax

from alpa_lite import _jax
from alpa_lite.errors import PlanError
from alpa_lite.export.degrees import programs_of
from alpa_lite.lower.plan_fits import as_planned
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.program_builder import build_program
from alpa_lite.runtime.execute.compile import LoweredStep, joined_texts, lowered_tasks
from alpa_lite.text import show_count, show_numbers


def stablehlo(plan: Plan, platform: str | None = None) -> str:
    """Return the StableHLO of all tasks of a plan; `platform` is "cpu", "cuda" or "tpu", by default this process's.

    Raises `PlanError` for a plan from a file, and for kernels that JAX lowers only where their devices are.
    """
    programs = programs_of(plan).updated_every(plan.update_every)
    step = as_planned(programs.with_equations(plan.num_microbatches, plan.loop_parts), plan)
    program = build_program(plan, step.step)
    lowered = LoweredStep(program=program, plan=plan, step=step.step, equations=step.equations)
    target = platform or _jax.lowering_platform(jax.devices()[0])
    with _jax.no_mesh():
        try:
            # Held in a list, since programs are told apart by identity.
            tasks = lowered_tasks(lowered, target)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise PlanError(
                f"{plan.name} cannot be lowered for {target} on this machine: {str(error).rstrip('.')}. Kernels such "
                "as those of cuDNN are lowered where their devices are: export the plan there."
            ) from error
    comments = [f"// {plan.function} by {plan.name}, {show_count(plan.num_microbatches, 'micro-batch')}"]
    comments += [
        f"// stage {number}: {stage.mesh_shape} on devices {show_numbers(stage.submesh.devices)}"
        for number, stage in enumerate(plan.stages)
    ]
    return "\n".join([*comments, joined_texts((task.name, text) for task, text in tasks)])
