"""A serving plan: the model and the workers of each operator, and what they cost by the hour.

    workers  = sum over used workers of their price                                                 `worker_cost`
    links    = sum over edges (u, v), workers a of u, b of v with tier(a) < tier(b), of
               price(a, b) traffic(u, v) share(a of u) share(b of v)                                `link_cost`

A plan is checked when it is made (`check_plan`): one operator per worker, no more load than a worker can handle, all
messages handled, none sent to a lower tier, and the accuracy that was asked for. No solver says what its plan costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpa_lite.errors import VerificationError
from alpa_lite.serving.workflow import ServingProblem, gib_per_hour
from alpa_lite.text import View, view

_TOLERANCE = 1e-6

Loads = Mapping[str, Mapping[str, float]]
"""Messages per second by operator and worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """Models, workers and loads that serve a workflow.

    Attributes:
        problem: what is served.
        solver: name of the solver that found it.
        min_accuracy: accuracy that was asked for.
        variants: the model of each operator.
        loads: messages per second by operator and worker.
    """

    problem: ServingProblem
    solver: str
    min_accuracy: float
    variants: Mapping[str, str]
    loads: Loads

    def __post_init__(self) -> None:
        """Raise `VerificationError` for a plan that does not serve the workflow."""
        check_plan(self)

    @property
    def accuracy(self) -> float:
        """The accuracy of the workflow."""
        return self.problem.accuracy(self.variants)

    @property
    def worker_dollars_per_hour(self) -> float:
        """The price of the workers."""
        return worker_cost(self.problem, self.loads)

    @property
    def link_dollars_per_hour(self) -> float:
        """The price of the traffic between tiers."""
        return link_cost(self.problem, self.variants, self.loads)

    @property
    def dollars_per_hour(self) -> float:
        """The price of workers and traffic."""
        return self.worker_dollars_per_hour + self.link_dollars_per_hour

    def share(self, operator: str, worker: str) -> float:
        """Return the share of an operator's messages that a worker handles."""
        return self.loads[operator][worker] / self.problem.rate(operator)

    def to_json(self) -> dict[str, object]:
        """Return the plan as JSON data."""
        return {
            "solver": self.solver,
            "min_accuracy": self.min_accuracy,
            "accuracy": self.accuracy,
            "dollars_per_hour": self.dollars_per_hour,
            "worker_dollars_per_hour": self.worker_dollars_per_hour,
            "link_dollars_per_hour": self.link_dollars_per_hour,
            "operators": [
                {
                    "operator": name,
                    "variant": self.variants[name],
                    "workers": [
                        {"worker": worker, "messages_per_second": load, "share": self.share(name, worker)}
                        for worker, load in self.loads[name].items()
                    ],
                }
                for name in self.problem.order
            ],
        }

    def __str__(self) -> str:
        """Return the plan as a table."""
        return view(View.SERVING_TEXT, self)

    def __repr__(self) -> str:
        """Return the plan in one line."""
        return f"<ServingPlan {self.problem.name} by {self.solver}: ${self.dollars_per_hour:.4f}/h>"

    def _repr_html_(self) -> str:
        """Draw the plan in a notebook."""
        return view(View.SERVING_HTML, self)


def worker_cost(problem: ServingProblem, loads: Loads) -> float:
    """Return the dollars per hour of all workers that have a load."""
    return sum(problem.worker(worker).dollars_per_hour for given in loads.values() for worker in given)


def link_cost(problem: ServingProblem, variants: Mapping[str, str], loads: Loads) -> float:
    """Return the dollars per hour of the traffic between tiers."""
    total = 0.0
    for edge in problem.edges:
        rate = problem.rate(edge.receiver)
        traffic = gib_per_hour(rate, edge.message_kib(variants.get(edge.sender, ""), variants[edge.receiver]))
        # A source is one place, which sends everything.
        senders = loads.get(edge.sender, {edge.sender: 1.0})
        sent = sum(senders.values())
        total += sum(
            problem.link_price(sender, worker) * traffic * (out / sent) * (load / rate)
            for sender, out in senders.items()
            for worker, load in loads[edge.receiver].items()
        )
    return total


def check_plan(plan: ServingPlan) -> None:
    """Raise `VerificationError` unless a plan serves its workflow."""
    problem, loads = plan.problem, plan.loads
    used = [worker for given in loads.values() for worker in given]
    if len(used) > len(set(used)):
        raise VerificationError(f"{plan.solver}: a worker serves two operators of {problem.name}.")
    for name in problem.order:
        variant, rate = problem.operator(name).variant(plan.variants[name]), problem.rate(name)
        for worker, load in loads[name].items():
            if not 0 < load <= variant.throughput(worker) * (1 + _TOLERANCE):
                raise VerificationError(
                    f"{plan.solver}: {worker} gets {load:.6g} messages per second of {name}, of at most "
                    f"{variant.throughput(worker):.6g}."
                )
        if abs(sum(loads[name].values()) - rate) > _TOLERANCE * rate:
            raise VerificationError(f"{plan.solver}: the workers of {name} do not handle {rate:.6g} messages a second.")
        lowest = min(problem.worker(worker).tier for worker in loads[name])
        for sender in problem.input_operators(name):
            if any(problem.worker(worker).tier > lowest for worker in loads[sender]):
                raise VerificationError(f"{plan.solver}: {sender} sends messages back to a lower tier, for {name}.")
    if plan.accuracy < plan.min_accuracy:
        raise VerificationError(f"{plan.solver}: the accuracy is {plan.accuracy}, below {plan.min_accuracy}.")
