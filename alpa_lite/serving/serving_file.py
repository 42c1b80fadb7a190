"""Read and write serving problems as JSON files; docs/serving.md documents the format.

read_serving_problem     a file, or the name of a problem that ships with the package
write_serving_problem    a file that `read_serving_problem` reads
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from alpa_lite.errors import ServingProblemError
from alpa_lite.serving.workflow import (
    DEFAULT_VARIANT,
    AccuracySample,
    MessageSource,
    ModelVariant,
    ServingOperator,
    ServingProblem,
    TieredWorker,
    WorkflowEdge,
)
from cost_models.checks import parse_json

FORMAT = "alpa-lite/serving-problem"
VERSION = 1
_MOST_VALUES = 1_000_000
_MOST_BYTES = 64 << 20

Entry = Mapping[str, Any]
"""An object of the file. Its values have any type until `_Reader` has checked them."""


def known_serving_problems() -> tuple[str, ...]:
    """Return the names of the problems that ship with the package."""
    folder = files("alpa_lite.serving") / "problems"
    return tuple(sorted(each.name.removesuffix(".json") for each in folder.iterdir() if each.name.endswith(".json")))


def read_serving_problem(place: str | Path) -> ServingProblem:
    """Return the problem of a JSON file, or one that ships with the package by its name.

    Raises:
        ServingProblemError: the file is missing or holds no such problem. The message begins with its name.
    """
    name = str(place)
    shipped = known_serving_problems()
    path = files("alpa_lite.serving") / "problems" / f"{name}.json" if name in shipped else Path(place)
    try:
        text = path.read_bytes()
    except OSError as error:
        meant = get_close_matches(name, shipped, n=1)
        raise ServingProblemError(
            f"{name} cannot be read: {error.strerror or error}. Give a JSON file or one of {', '.join(shipped)}."
            + (f" Did you mean {meant[0]!r}?" if meant else "")
        ) from error
    try:
        data = parse_json(text, max_values=_MOST_VALUES, max_bytes=_MOST_BYTES)
    except ValueError as error:
        raise ServingProblemError(f"{name} is no serving problem: {error}.") from error
    return serving_problem_of(data, name)


def write_serving_problem(problem: ServingProblem, path: str | Path) -> None:
    """Write a problem as a JSON file."""
    Path(path).write_text(json.dumps(serving_problem_data(problem), indent=1) + "\n", encoding="utf-8")


def serving_problem_data(problem: ServingProblem) -> dict[str, object]:
    """Return a problem as JSON data."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": problem.name,
        "min_accuracy": problem.min_accuracy,
        "sources": [{"name": each.name, "messages_per_second": each.messages_per_second} for each in problem.sources],
        "operators": [
            {"name": each.name, "weight": each.weight, "variants": list(map(_variant_data, each.variants))}
            for each in problem.operators
        ],
        "edges": [
            {
                "sender": edge.sender,
                "receiver": edge.receiver,
                "ratio": edge.ratio,
                "messages": [
                    {"sender_variant": sender, "receiver_variant": receiver, "kib": kib}
                    for (sender, receiver), kib in edge.kib.items()
                ],
            }
            for edge in problem.edges
        ],
        "workers": [
            {"name": each.name, "dollars_per_hour": each.dollars_per_hour, "tier": each.tier}
            for each in problem.workers
        ],
        "links": _link_data(problem.link_dollars_per_gib),
        "accuracies": [
            {"variants": dict(zip((each.name for each in problem.operators), names, strict=True)), "accuracy": accuracy}
            for names, accuracy in problem.accuracies.items()
        ],
    }


def _variant_data(variant: ModelVariant) -> dict[str, object]:
    return {
        "name": variant.name,
        "cost": variant.cost,
        "samples": [{"inputs": list(each.inputs), "output": each.output} for each in variant.samples],
        "latency_ms": dict(variant.latency_ms),
    }


def _link_data(links: Mapping[tuple[str, str], float]) -> list[dict[str, object]]:
    """Return links in groups, each from all of some senders to all of some receivers at one price."""
    receivers: dict[tuple[str, float], list[str]] = {}
    for (sender, receiver), price in links.items():
        receivers.setdefault((sender, price), []).append(receiver)
    senders: dict[tuple[tuple[str, ...], float], list[str]] = {}
    for (sender, price), reached in receivers.items():
        senders.setdefault((tuple(reached), price), []).append(sender)
    return [
        {"senders": group, "receivers": list(reached), "dollars_per_gib": price}
        for (reached, price), group in senders.items()
    ]


def serving_problem_of(data: object, name: str) -> ServingProblem:
    """Return the problem of JSON data; errors name `name`. Raises `ServingProblemError`."""
    read = _Reader(name)
    top = read.entry(data, "the file")
    if top.get("format") != FORMAT or top.get("version") != VERSION:
        raise ServingProblemError(
            f'{name} is no serving problem: it needs "format": "{FORMAT}" and "version": {VERSION}.'
        )
    operators = tuple(read.operator(each) for each in read.entries(top, "operators", "the file"))
    least = top.get("min_accuracy")
    return ServingProblem(
        name=read.text(top, "name", "the file"),
        sources=tuple(
            MessageSource(
                name=read.text(each, "name", "a source"),
                messages_per_second=read.number(each, "messages_per_second", "a source"),
            )
            for each in read.entries(top, "sources", "the file")
        ),
        operators=operators,
        edges=tuple(map(read.edge, read.entries(top, "edges", "the file"))),
        workers=tuple(map(read.worker, read.entries(top, "workers", "the file"))),
        link_dollars_per_gib=dict(read.links(top)),
        accuracies=dict(read.accuracy(each, operators) for each in read.entries(top, "accuracies", "the file", [])),
        min_accuracy=None if least is None else read.number(top, "min_accuracy", "the file"),
    )


class _Reader:
    """Reads entries of a file, and says in a sentence what is missing or of the wrong kind."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, key: str, where: str, needed: str) -> ServingProblemError:
        return ServingProblemError(f"{self._name}: {key!r} of {where} is missing or no {needed}.")

    def entry(self, value: object, where: str) -> Entry:
        if not isinstance(value, dict):
            raise ServingProblemError(f"{self._name}: {where} has to be an object.")
        return cast("Entry", value)

    def entries(self, entry: Entry, key: str, where: str, default: Sequence[object] | None = None) -> list[Entry]:
        found = entry.get(key, default)
        if not isinstance(found, list):
            raise self._refuse(key, where, "list")
        return [self.entry(each, f"each of {key!r}") for each in cast("list[object]", found)]

    def text(self, entry: Entry, key: str, where: str, default: str | None = None) -> str:
        found = entry.get(key, default)
        if not isinstance(found, str) or not found:
            raise self._refuse(key, where, "text")
        return found

    def number(self, entry: Entry, key: str, where: str, default: float | None = None) -> float:
        found = entry.get(key, default)
        if not isinstance(found, (int, float)) or isinstance(found, bool):
            raise self._refuse(key, where, "number")
        return float(found)

    def texts(self, entry: Entry, key: str, where: str) -> list[str]:
        found = entry.get(key)
        if not isinstance(found, list) or not all(isinstance(each, str) for each in cast("list[object]", found)):
            raise self._refuse(key, where, "list of texts")
        return cast("list[str]", found)

    def operator(self, entry: Entry) -> ServingOperator:
        name = self.text(entry, "name", "an operator")
        return ServingOperator(
            name=name,
            weight=self.number(entry, "weight", name, 1.0),
            variants=tuple(self.variant(each, name) for each in self.entries(entry, "variants", name)),
        )

    def variant(self, entry: Entry, operator: str) -> ModelVariant:
        name = self.text(entry, "name", f"a variant of {operator}")
        latency = self.entry(entry.get("latency_ms"), f"'latency_ms' of {name}")
        return ModelVariant(
            name=name,
            cost=self.number(entry, "cost", name),
            samples=tuple(self.sample(each, name) for each in self.entries(entry, "samples", name)),
            latency_ms={worker: self.number(latency, worker, f"'latency_ms' of {name}") for worker in latency},
        )

    def sample(self, entry: Entry, variant: str) -> AccuracySample:
        inputs = entry.get("inputs", [])
        if not isinstance(inputs, list):
            raise self._refuse("inputs", f"a sample of {variant}", "list of numbers")
        listed = {str(number): value for number, value in enumerate(cast("list[object]", inputs))}
        return AccuracySample(
            inputs=tuple(self.number(listed, number, f"the inputs of a sample of {variant}") for number in listed),
            output=self.number(entry, "output", f"a sample of {variant}"),
        )

    def edge(self, entry: Entry) -> WorkflowEdge:
        sender, receiver = (self.text(entry, key, "an edge") for key in ("sender", "receiver"))
        where = f"the edge from {sender} to {receiver}"
        return WorkflowEdge(
            sender=sender,
            receiver=receiver,
            ratio=self.number(entry, "ratio", where, 1.0),
            kib={
                (
                    self.text(each, "sender_variant", where, DEFAULT_VARIANT),
                    self.text(each, "receiver_variant", where, DEFAULT_VARIANT),
                ): self.number(each, "kib", where)
                for each in self.entries(entry, "messages", where)
            },
        )

    def worker(self, entry: Entry) -> TieredWorker:
        name = self.text(entry, "name", "a worker")
        tier = entry.get("tier")
        if not isinstance(tier, int) or isinstance(tier, bool):
            raise self._refuse("tier", name, "whole number")
        return TieredWorker(name=name, dollars_per_hour=self.number(entry, "dollars_per_hour", name), tier=tier)

    def links(self, top: Entry) -> list[tuple[tuple[str, str], float]]:
        return [
            ((sender, receiver), self.number(each, "dollars_per_gib", "a link"))
            for each in self.entries(top, "links", "the file", [])
            for sender in self.texts(each, "senders", "a link")
            for receiver in self.texts(each, "receivers", "a link")
        ]

    def accuracy(self, entry: Entry, operators: Sequence[ServingOperator]) -> tuple[tuple[str, ...], float]:
        variants = self.entry(entry.get("variants"), "'variants' of an accuracy")
        names = tuple(self.text(variants, each.name, "the variants of an accuracy") for each in operators)
        return names, self.number(entry, "accuracy", "an accuracy")
