"""Collectives of a step as the plan names them, as they are handed to XLA, and as XLA compiled them.

Programs are read as HLO text: computations by name, loops times their trips, branches as if equally likely, combined
collectives taken apart. A collective is its kind, the bytes of its buffer per device, and the devices of one group; 0
devices for a permute, whose pairs form no groups.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import jax

import alpa_lite as al

Collective = tuple[str, int, int]
"""Kind, bytes of the buffer per device, devices in a group; a permute has no groups."""
Counts = dict[Collective, float]
"""How often each collective runs; what does not run is absent."""

_COLLECTIVE = re.compile(
    r" = (?P<type>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\]")
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+)[^=]*\{$")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{\s*"?n"?:\s*"?(\d+)')


@dataclass(frozen=True)
class _Module:
    """Lines of each computation, and the name of the first to run."""

    computations: dict[str, list[str]]
    entry: str


def _parse(text: str) -> _Module:
    computations: dict[str, list[str]] = {}
    entry, current = "", list[str]()
    for raw in text.splitlines():
        line = re.sub(r"/\*.*?\*/", "", raw.strip())
        header = _HEADER.match(line)
        if header and " = " not in line:
            current = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        else:
            current.append(line)
    return _Module(computations, entry)


def total(numbers: Iterable[tuple[Collective, float]]) -> Counts:
    """Numbers of collectives, added up."""
    found: dict[Collective, float] = defaultdict(float)
    for collective, number in numbers:
        found[collective] += number
    return {collective: number for collective, number in found.items() if number}


def beyond(some: Counts, others: Counts) -> Counts:
    """What there is more of in `some` than in `others`."""
    return {c: n - others.get(c, 0) for c, n in some.items() if n > others.get(c, 0)}


def collectives_in(text: str) -> Counts:
    """How often each collective of an HLO module runs."""
    module = _parse(text)

    @cache
    def count(name: str) -> Counts:
        lines = module.computations.get(name, ())
        own = [(collective, 1.0) for line in lines for collective in _collectives_of(line)]
        callees = [callee for line in lines for callee in _calls(module, line)]
        called = [(c, n * times) for callee, times in callees for c, n in count(callee).items()]
        return total(own + called)

    return count(module.entry)


def _calls(module: _Module, line: str) -> list[tuple[str, float]]:
    """The computations that a line runs, and how often."""
    if " while(" in line:
        names = re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", line)
        assert names is not None, line
        return [(names[2], _trips(module, line, names[1])), (names[1], 1)]
    if " conditional(" in line:
        listed = re.search(r"branch_computations=\{([^}]*)\}", line)
        both = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
        names_of = [n.strip().lstrip("%") for n in listed[1].split(",")] if listed else both
        return [(name, 1 / len(names_of)) for name in names_of]
    called = re.search(r" call\(.*to_apply=%?([\w.\-]+)", line)
    return [(called[1], 1)] if called else []


def _trips(module: _Module, line: str, condition: str) -> int:
    known = _TRIPS.search(line)
    if known:
        return int(known[1])
    limits = {n for text in module.computations[condition] for n in re.findall(r"s32\[\]\S* constant\((\d+)\)", text)}
    return int(limits.pop()) if len(limits) == 1 else 1


def _collectives_of(line: str) -> list[Collective]:
    match = _COLLECTIVE.search(line)
    if match is None:
        return []
    kind = match["kind"].replace("-", "_")
    parts = [_bytes_of(dtype, dims) for dtype, dims in _SHAPE.findall(match["type"])]
    if kind == "collective_permute":
        return [("permute", size, 0) for size in parts[:1]]
    devices = _group_size(match["rest"])
    if kind == "all_to_all" and len(parts) > 1:
        parts = [sum(parts)]
    return [(kind, size * (devices if kind == "reduce_scatter" else 1), devices) for size in parts]


def _bytes_of(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    item = 1 if bits is None else int(bits[0]) // 8
    return item * prod(int(n) for n in dims.split(",") if n)


def _group_size(attributes: str) -> int:
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return len(listed[1].split(","))
    by_axes = re.search(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}", attributes)  # since JAX 0.11
    if by_axes:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", by_axes[1]))
        return prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", by_axes[2]))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)
    assert counted, attributes
    return int(counted[1])


def planned(plan: al.Plan) -> Counts:
    """Collectives of one step by the plan."""
    uses = plan.prediction.collectives
    return total(((u.kind, round(u.bytes), 0 if u.kind == "permute" else u.num_devices), u.count) for u in uses)


def per_step(compiled: Any, text_of: Callable[[Any], str]) -> Counts:
    """Collectives of one step over all executables, as they stand in their HLO text."""
    executor = compiled.executor
    runs = Counter(i.task for i in executor.program.instructions if i.kind == "RUN")
    found = enumerate(collectives_in(text_of(executable)) for executable in executor.executables)
    return total((c, n * runs[task]) for task, counts in found for c, n in counts.items())


def handed_over(compiled: Any) -> Counts:
    """Collectives of one step as they are handed to XLA."""
    return per_step(compiled, lambda e: jax.jit(e.function).lower(*e.avals).as_text("hlo"))


def emitted(compiled: Any) -> Counts:
    """Collectives of one step in the compiled executables."""
    return per_step(compiled, lambda e: e.compiled.as_text())
