"""An inference workflow on tiered infrastructure, as data: `ServingProblem`.

JellyBean (Wu, Lentz, Zhuo, Lu; PVLDB 16(3), arXiv 2205.04713) serves a graph of operators, each with several models to
choose from, on workers whose tiers go from the edge (0) to the cloud. Messages flow from a tier to the same or a higher
one, never back.

    rate(v)        = min over inputs u of  rate(u) ratio(u, v)                messages per second  `ServingProblem.rate`
    throughput     = 1000 / latency in milliseconds                           of a worker     `ModelVariant.throughput`
    traffic        = messages per second x KiB x 3600 / 1024^2                GiB per hour         `gib_per_hour`
    accuracy       of the whole workflow: looked up where it was measured,
                   else composed of the samples of its operators        `ServingProblem.accuracy`
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import networkx as nx

from alpa_lite.errors import ServingProblemError

DEFAULT_VARIANT = "default"
"""The variant under which a message size holds for every variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracySample:
    """One measurement of a model: the accuracies of its inputs, and what its output then had.

    Attributes:
        inputs: accuracies of the operators that it reads, in the order of the edges; empty if it reads sources only.
        output: accuracy of its output; larger is better, in any unit.
    """

    inputs: tuple[float, ...] = ()
    output: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVariant:
    """A model that an operator may run.

    Attributes:
        name: its name, unique in its operator.
        cost: what the choice of models counts it as, in any unit that all operators share.
        samples: measured accuracies, at least one.
        latency_ms: milliseconds per message by worker; a worker that is left out cannot run it.
    """

    name: str
    cost: float
    samples: tuple[AccuracySample, ...]
    latency_ms: Mapping[str, float]

    @property
    def best_output(self) -> float:
        """The largest accuracy that was measured."""
        return max(sample.output for sample in self.samples)

    def throughput(self, worker: str) -> float:
        """Return the messages per second of a worker; 0 if it cannot run this model."""
        return 1000.0 / self.latency_ms[worker] if worker in self.latency_ms else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOperator:
    """A step of the workflow with its models.

    Attributes:
        name: its name, unique among operators and sources.
        variants: the models to choose from, at least one.
        weight: factor of the models' costs.
    """

    name: str
    variants: tuple[ModelVariant, ...]
    weight: float = 1.0

    def variant(self, name: str) -> ModelVariant:
        """Return the model of this name."""
        return next(variant for variant in self.variants if variant.name == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSource:
    """Where messages come from, below the lowest tier.

    Attributes:
        name: its name.
        messages_per_second: the rate at which it sends.
    """

    name: str
    messages_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowEdge:
    """Messages from a source or an operator to an operator.

    Attributes:
        sender: the source or operator that sends.
        receiver: the operator that receives.
        kib: KiB per message by the variants of sender and receiver; `DEFAULT_VARIANT` stands for any.
        ratio: messages that the receiver handles per message of the sender.
    """

    sender: str
    receiver: str
    kib: Mapping[tuple[str, str], float]
    ratio: float = 1.0

    def message_kib(self, sender_variant: str, receiver_variant: str) -> float:
        """Return the KiB of a message; the receiver's variant counts before the sender's."""
        default = DEFAULT_VARIANT
        keys = ((sender_variant, receiver_variant), (default, receiver_variant), (sender_variant, default))
        return next((self.kib[key] for key in keys if key in self.kib), self.kib.get((default, default), 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredWorker:
    """A machine that serves at most one operator.

    Attributes:
        name: its name.
        dollars_per_hour: its price while it is used.
        tier: 0 at the edge, higher towards the cloud.
    """

    name: str
    dollars_per_hour: float
    tier: int


def gib_per_hour(messages_per_second: float, kib: float) -> float:
    """Return the traffic of messages of a size."""
    return messages_per_second * kib * 3600.0 / 1024.0 / 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingProblem:
    """A workflow, its models, and the workers that may run them.

    Attributes:
        name: shown in tables and drawings.
        sources: where messages come from.
        operators: the steps, exactly one of which nothing reads: the sink, whose accuracy counts.
        edges: who sends to whom; without a cycle.
        workers: machines by price and tier.
        link_dollars_per_gib: prices of traffic by sender (a source or a worker) and worker, from a lower tier to a
            higher one; links that are left out are free.
        accuracies: accuracy of the whole workflow by the variants of all operators in their order, as it was measured.
        min_accuracy: accuracy that is asked for where nothing else is given.
    """

    name: str
    sources: tuple[MessageSource, ...]
    operators: tuple[ServingOperator, ...]
    edges: tuple[WorkflowEdge, ...]
    workers: tuple[TieredWorker, ...]
    link_dollars_per_gib: Mapping[tuple[str, str], float] = field(default_factory=lambda: {})
    accuracies: Mapping[tuple[str, ...], float] = field(default_factory=lambda: {})
    min_accuracy: float | None = None

    def __post_init__(self) -> None:
        """Raise `ServingProblemError` unless the parts fit together."""
        _check(self)

    # --- the workflow -----------------------------------------------------------------------------------------------

    def operator(self, name: str) -> ServingOperator:
        """Return the operator of this name."""
        return next(each for each in self.operators if each.name == name)

    def inputs(self, name: str) -> tuple[WorkflowEdge, ...]:
        """Return the edges into an operator."""
        return tuple(edge for edge in self.edges if edge.receiver == name)

    def input_operators(self, name: str) -> tuple[str, ...]:
        """Return the operators that one reads, without sources: those that its accuracy samples name."""
        return tuple(edge.sender for edge in self.inputs(name) if not self.is_source(edge.sender))

    def is_source(self, name: str) -> bool:
        """Return whether this is the name of a source."""
        return any(source.name == name for source in self.sources)

    @property
    def graph(self) -> nx.DiGraph[str]:
        """The workflow as a graph of names, in the order of the edges."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_edges_from((edge.sender, edge.receiver) for edge in self.edges)
        return graph

    @property
    def order(self) -> tuple[str, ...]:
        """The operators in an order in which each comes after its inputs."""
        return tuple(name for name in nx.topological_sort(self.graph) if not self.is_source(name))

    @property
    def sink(self) -> str:
        """The operator that nothing reads."""
        senders = {edge.sender for edge in self.edges}
        return next(each.name for each in self.operators if each.name not in senders)

    def rate(self, name: str) -> float:
        """Return the messages per second that a source sends or an operator has to handle."""
        for source in self.sources:
            if source.name == name:
                return source.messages_per_second
        return min(self.rate(edge.sender) * edge.ratio for edge in self.inputs(name))

    # --- the infrastructure -----------------------------------------------------------------------------------------

    @property
    def num_tiers(self) -> int:
        """The number of tiers, up to the highest that a worker is in."""
        return 1 + max(worker.tier for worker in self.workers)

    def worker(self, name: str) -> TieredWorker:
        """Return the worker of this name."""
        return next(each for each in self.workers if each.name == name)

    def link_price(self, sender: str, worker: str) -> float:
        """Return the dollars per GiB from a source or a worker to a worker."""
        return self.link_dollars_per_gib.get((sender, worker), 0.0)

    # --- accuracy ---------------------------------------------------------------------------------------------------

    def variant_names(self, variants: Mapping[str, str]) -> tuple[str, ...]:
        """Return the variants of all operators in their order, as `accuracies` has them."""
        return tuple(variants[each.name] for each in self.operators)

    def accuracy(self, variants: Mapping[str, str]) -> float:
        """Return the accuracy of the workflow with these variants; minus infinity where no sample covers its inputs.

        Where it was not measured as a whole, an operator has the best output among samples whose inputs are all
        reached, since better inputs do not make it worse.
        """
        if self.accuracies:
            return self.accuracies.get(self.variant_names(variants), -math.inf)
        found: dict[str, float] = {}
        for name in self.order:
            given = [found[each] for each in self.input_operators(name)]
            found[name] = max(
                (
                    sample.output
                    for sample in self.operator(name).variant(variants[name]).samples
                    if all(has >= needed for has, needed in zip(given, sample.inputs, strict=True))
                ),
                default=-math.inf,
            )
        return found[self.sink]

    def with_variants(self, variants: Mapping[str, str]) -> ServingProblem:
        """Return the problem in which each operator has one model."""
        operators = tuple(replace(each, variants=(each.variant(variants[each.name]),)) for each in self.operators)
        names = self.variant_names(variants)
        accuracies = {names: self.accuracies[names]} if names in self.accuracies else {}
        return replace(self, operators=operators, accuracies=accuracies)

    def all_variants(self) -> Iterator[dict[str, str]]:
        """Yield every choice of models."""
        names = [each.name for each in self.operators]
        for chosen in product(*([variant.name for variant in each.variants] for each in self.operators)):
            yield dict(zip(names, chosen, strict=True))


def within_tiers(problem: ServingProblem, tiers: Collection[int]) -> ServingProblem:
    """Return a problem in which workers of other tiers run nothing."""
    kept = {worker.name for worker in problem.workers if worker.tier in tiers}
    operators = tuple(
        replace(
            operator,
            variants=tuple(
                replace(variant, latency_ms={w: ms for w, ms in variant.latency_ms.items() if w in kept})
                for variant in operator.variants
            ),
        )
        for operator in problem.operators
    )
    return replace(problem, operators=operators)


# --- checks ---------------------------------------------------------------------------------------------------------


def _check(problem: ServingProblem) -> None:
    if not problem.sources or not problem.operators or not problem.workers:
        raise ServingProblemError(f"{problem.name}: at least one source, one operator and one worker are needed.")
    _check_unique(problem, "source or operator", [each.name for each in (*problem.sources, *problem.operators)])
    _check_unique(problem, "worker", [worker.name for worker in problem.workers])
    _check_numbers(problem)
    _check_graph(problem)
    for operator in problem.operators:
        _check_operator(problem, operator)
    _check_links(problem)
    names = [{variant.name for variant in each.variants} for each in problem.operators]
    for chosen in problem.accuracies:
        if len(chosen) != len(names) or any(name not in known for name, known in zip(chosen, names, strict=True)):
            raise ServingProblemError(
                f"{problem.name}: an accuracy is given for the variants {', '.join(chosen)}, which are not one of each "
                f"operator ({', '.join(each.name for each in problem.operators)})."
            )


def _check_unique(problem: ServingProblem, kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ServingProblemError(f"{problem.name}: there are two of the name {name!r}; each {kind} needs its own.")
        seen.add(name)


def _check_numbers(problem: ServingProblem) -> None:
    positive = {f"messages_per_second of {each.name}": each.messages_per_second for each in problem.sources}
    positive |= {f"ratio of {edge.sender} to {edge.receiver}": edge.ratio for edge in problem.edges}
    for operator in problem.operators:
        for variant in operator.variants:
            positive |= {f"latency_ms of {variant.name} on {w}": ms for w, ms in variant.latency_ms.items()}
    least = {f"dollars_per_hour of {worker.name}": worker.dollars_per_hour for worker in problem.workers}
    least |= {f"tier of {worker.name}": float(worker.tier) for worker in problem.workers}
    least |= {f"dollars_per_gib from {a} to {b}": each for (a, b), each in problem.link_dollars_per_gib.items()}
    least |= {f"kib of {edge.sender} to {edge.receiver}": kib for edge in problem.edges for kib in edge.kib.values()}
    for name, value in (*positive.items(), *least.items()):
        # Put in this way so that it refuses NaN too.
        if not (0 < value if name in positive else 0 <= value) or not value < math.inf:
            needed = "above 0" if name in positive else "of at least 0"
            raise ServingProblemError(f"{problem.name}: {name} is {value}; a finite number {needed} is needed.")


def _check_graph(problem: ServingProblem) -> None:
    operators = {each.name for each in problem.operators}
    for edge in problem.edges:
        if edge.receiver not in operators or not (edge.sender in operators or problem.is_source(edge.sender)):
            raise ServingProblemError(
                f"{problem.name}: the edge from {edge.sender!r} to {edge.receiver!r} has to go from a source or an "
                "operator to an operator."
            )
    if not nx.is_directed_acyclic_graph(problem.graph):
        raise ServingProblemError(f"{problem.name}: the edges go in a circle, but messages flow one way.")
    if len({(edge.sender, edge.receiver) for edge in problem.edges}) < len(problem.edges):
        raise ServingProblemError(f"{problem.name}: two edges join the same two; give their sizes in one.")
    without = sorted(operators - {edge.receiver for edge in problem.edges})
    if without:
        raise ServingProblemError(f"{problem.name}: {', '.join(without)} has no input; add an edge from a source.")
    sinks = sorted(operators - {edge.sender for edge in problem.edges})
    if len(sinks) != 1:
        raise ServingProblemError(
            f"{problem.name}: exactly one operator may send to no other, as its accuracy is that of the workflow; here "
            f"it is {' and '.join(sinks)}."
        )


def _check_operator(problem: ServingProblem, operator: ServingOperator) -> None:
    if not operator.variants:
        raise ServingProblemError(f"{problem.name}: {operator.name} has no variants; give at least one model.")
    _check_unique(problem, "variant", [variant.name for variant in operator.variants])
    inputs, workers = problem.input_operators(operator.name), {worker.name for worker in problem.workers}
    for variant in operator.variants:
        if not variant.samples or any(len(sample.inputs) != len(inputs) for sample in variant.samples):
            raise ServingProblemError(
                f"{problem.name}: {operator.name} with {variant.name} needs accuracy samples with "
                f"{len(inputs)} input accuracies each, of {', '.join(inputs) or 'no operator'}."
            )
        if unknown := sorted(set(variant.latency_ms) - workers):
            raise ServingProblemError(
                f"{problem.name}: {operator.name} with {variant.name} has a latency on {unknown[0]!r}, which is no "
                "worker."
            )


def _check_links(problem: ServingProblem) -> None:
    tiers = {source.name: -1 for source in problem.sources} | {each.name: each.tier for each in problem.workers}
    workers = {each.name for each in problem.workers}
    for sender, worker in problem.link_dollars_per_gib:
        if sender not in tiers or worker not in workers:
            raise ServingProblemError(
                f"{problem.name}: the link from {sender!r} to {worker!r} has to go from a source or a worker to a "
                "worker."
            )
        # Sources stand beside the workers of tier 0, which are as near to them as can be.
        if tiers[worker] <= max(tiers[sender], 0):
            raise ServingProblemError(
                f"{problem.name}: the link from {sender} to {worker} has a price, but only traffic to a higher tier "
                "has one: within a tier it is free, and back it is not allowed."
            )
