"""Choose the models of a workflow by JellyBean's beam search, from the sink backwards.

    start        no models, and the accuracy of the sink that is asked for
    extend       by a variant whose best output reaches what is required of its operator; each sample that reaches it
                 raises what is required of the inputs to the sample's own                            `_children`
    cost         sum over the operators chosen so far of  weight x cost                               `_cost`
    keep         the `beam` cheapest, of equal cost those that require least                          `select_models`

One choice may stay several times, with other requirements: as in the published optimizer, equal choices are not merged
and take places of the beam. Choices that the table of the whole workflow says are below the threshold are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from alpa_lite.serving.workflow import ServingProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """Models of all operators.

    Attributes:
        variants: variant by operator.
        cost: their cost in the units of the problem.
        accuracy: accuracy of the workflow.
    """

    variants: Mapping[str, str]
    cost: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Partial:
    """Models chosen so far, and the accuracy required of the operators that they read."""

    variants: Mapping[str, str]
    required: Mapping[str, float]


def select_models(problem: ServingProblem, min_accuracy: float, *, beam: int = 10) -> tuple[ModelChoice, ...]:
    """Return the choices of the beam that reach an accuracy, cheapest first; none if no choice reaches it."""
    candidates = [_Partial(variants={}, required={problem.sink: min_accuracy})]
    for name in reversed(problem.order):
        children = [child for candidate in candidates for child in _children(problem, candidate, name)]
        # All candidates have chosen the same operators, and so require something of the same ones.
        names = list(children[0].required) if children else []
        children.sort(key=lambda child: (_cost(problem, child.variants), *(child.required[each] for each in names)))
        candidates = children[:beam]
    choices = [
        ModelChoice(
            variants=each.variants, cost=_cost(problem, each.variants), accuracy=problem.accuracy(each.variants)
        )
        for each in candidates
    ]
    return tuple(choice for choice in choices if choice.accuracy >= min_accuracy)


def _children(problem: ServingProblem, candidate: _Partial, name: str) -> Iterator[_Partial]:
    """Yield a candidate with each model of an operator, once for each sample that is good enough."""
    required, inputs = candidate.required.get(name, -math.inf), problem.input_operators(name)
    rest = {each: accuracy for each, accuracy in candidate.required.items() if each != name}
    for variant in problem.operator(name).variants:
        if variant.best_output < required:
            continue
        child = _Partial(variants={**candidate.variants, name: variant.name}, required=rest)
        if not inputs:
            yield child
            continue
        good = [sample for sample in variant.samples if sample.output >= required]
        for sample in sorted(good, key=lambda sample: (sample.output, sample.inputs)):
            needs = zip(inputs, sample.inputs, strict=True)
            yield replace(
                child, required={**rest, **{each: max(rest.get(each, -math.inf), needed) for each, needed in needs}}
            )


def _cost(problem: ServingProblem, variants: Mapping[str, str]) -> float:
    return sum(
        problem.operator(name).weight * problem.operator(name).variant(variant).cost
        for name, variant in variants.items()
    )
