"""Check that each stage of an asynchronous pipeline can update its state without waiting for other stages."""

from alpa_lite.errors import PlanError
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.slices import Slicer


class UnequalUpdatesError(PlanError):
    """Stages would update an array that all of them hold differently often."""


def check_own_updates(slicer: Slicer, plan: Plan) -> None:
    """Raise `PlanError` if the update of a stage reads what other stages compute, or updates state that they read."""
    step, graph = slicer.step, slicer.graph
    instead = "or use a synchronous schedule, such as al.schedule.OneFOneB()."
    if not step.aliases:
        raise PlanError(
            f"{plan.schedule} updates the state several times per step, but {plan.function!r} returns none of its "
            f"arguments updated. Return the new state in the structure of the old one, {instead}"
        )
    if slicer.served:
        # Servers have all of the state.
        return
    for op, stage in enumerate(slicer.stage_of_op):
        if stage is None or step.phases[op].in_loop:
            continue
        for v in graph.ops[op].operands:
            origin = slicer.place_of_value(v)
            if origin is not None and origin.stage != stage:
                raise PlanError(
                    f"Under {plan.schedule} stages update their weights without waiting for each other, but "
                    f"{graph.ops[op].source or graph.ops[op].primitive} in the update of stage {stage} reads "
                    f"what stage {origin.stage} computes. Leave out what combines the gradients of several stages "
                    f"(clipping by their global norm, weights that stages share), {instead}"
                )
    for out, replaced in step.aliases.items():
        made_on = slicer.stages_renewing(out) if slicer.is_repeated(out) else {slicer.stage_of_value(out)}
        if len({plan.updates_of(stage) for stage in made_on}) > 1:
            often = ", ".join(f"stage {stage} {plan.updates_of(stage)} times" for stage in sorted(made_on))
            raise UnequalUpdatesError(
                f"Under {plan.schedule} each stage computes {graph.values[replaced].name} for itself in its updates, "
                f"and replicas make these differently frequent: {often}. Give all stages equally many replicas, keep "
                f"one such array for each stage's weights, {instead}"
            )
        if others := sorted(slicer.stages_reading[replaced] - made_on):
            raise PlanError(
                f"Under {plan.schedule} each stage reads the weights that it updates, but "
                f"{graph.values[replaced].name} is updated on stage {min(made_on)} and read on stage {others[0]} too. "
                f"Use fewer stages, {instead}"
            )
