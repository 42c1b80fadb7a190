"""Serving plans as text: models and workers of each operator, and the costs of other solvers."""

from __future__ import annotations

from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.serving import ServingComparison, ServingPlan
from alpa_lite.text import show_number, show_percent


def show_dollars(amount: float) -> str:
    """Return dollars to a hundredth of a cent, as prices of cloud machines are given."""
    return f"${amount:.4f}"


def serving_headline(plan: ServingPlan) -> str:
    """Return the costs and the accuracy of a plan in one line."""
    return (
        f"{plan.problem.name} by {plan.solver}: {show_dollars(plan.dollars_per_hour)} per hour = "
        f"{show_dollars(plan.worker_dollars_per_hour)} for workers + {show_dollars(plan.link_dollars_per_hour)} for "
        f"links, accuracy {show_number(plan.accuracy)}"
    )


def operators_table(plan: ServingPlan) -> Table:
    """Return the models and workers of each operator, with the split of the load."""
    problem = plan.problem
    rows = tuple(
        (
            name if number == 0 else "",
            plan.variants[name] if number == 0 else "",
            worker,
            str(problem.worker(worker).tier),
            f"{load:.4g}",
            show_percent(plan.share(name, worker)),
            show_dollars(problem.worker(worker).dollars_per_hour),
        )
        for name in problem.order
        for number, (worker, load) in enumerate(plan.loads[name].items())
    )
    columns = ("operator", "model", "worker", "tier", "messages/s", "share", "$/h")
    return Table(
        title="Operators", columns=columns, rows=rows, numeric=frozenset({"tier", "messages/s", "share", "$/h"})
    )


def solvers_table(comparison: ServingComparison) -> Table:
    """Return the costs of all solvers, and what the plan saves against each."""
    plan = comparison.plan
    rows = [
        (
            each.solver,
            show_dollars(each.dollars_per_hour),
            show_dollars(each.worker_dollars_per_hour),
            show_dollars(each.link_dollars_per_hour),
            show_number(each.accuracy),
            "" if each is plan else show_percent(comparison.saving(each)),
        )
        for each in (plan, *comparison.others)
    ]
    rows += [(solver, "no plan", "", "", "", "") for solver in comparison.refusals]
    return Table(
        title="Solvers",
        columns=("solver", "$/h", "workers", "links", "accuracy", "saved"),
        rows=tuple(rows),
        numeric=frozenset({"$/h", "workers", "links", "accuracy", "saved"}),
        note=f"saved: the share of that plan's cost that {plan.solver} saves",
    )


def serving_text(plan: ServingPlan) -> str:
    """Return a plan as text."""
    return render([serving_headline(plan), ""], [operators_table(plan)])


def comparison_of_serving(comparison: ServingComparison) -> str:
    """Return a plan and the costs of other solvers as text."""
    tables = [operators_table(comparison.plan), solvers_table(comparison)]
    return render([serving_headline(comparison.plan), ""], tables)
