"""Read from the text of a compiled program which of its instructions run which ops of the step.

XLA keeps for each instruction the scopes in which it was traced (`op_name`), and the local machine traces op 7 in the
scope `op7`, and the first body of a loop in `body0` (`lower.local_machine`); what adds to sums over micro-batches has a
scope of its own.

    op path      the numbers of these scopes, from the outside                                   `_path`
    ops          of an instruction: its own path, and those of the computations that it calls     `hlo_kernels`
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from alpa_lite.errors import ExecutionError
from alpa_lite.lower.emission import SUMS_SCOPE
from alpa_lite.program.ir import OpPath


@dataclass(frozen=True, slots=True, kw_only=True)
class HloKernel:
    """An instruction of a compiled program.

    opcode    such as `fusion` or `all-reduce`
    ops       the paths of the ops that it runs, its own first; empty for what XLA has added
    product   whether it, or a computation that it calls, multiplies matrices or convolves
    sums      whether it adds to sums over micro-batches
    calls     the names of all instructions in the computations that it calls
    """

    opcode: str
    ops: tuple[OpPath, ...]
    product: bool
    sums: bool
    calls: frozenset[str]


@dataclass(slots=True)
class _HloLine:
    """An instruction as its line says: `computations` are the names of those that it calls."""

    opcode: str
    path: OpPath
    sums: bool
    computations: tuple[str, ...]


@dataclass(slots=True)
class _HloComputation:
    """The instructions of a computation by name."""

    lines: dict[str, _HloLine] = field(default_factory=dict[str, _HloLine])


_HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_PRODUCTS = frozenset(("dot", "convolution"))
_SCOPE = re.compile(r"(?:op|body)(\d+)$")


def hlo_kernels(text: str) -> Mapping[str, HloKernel]:
    """Return the instructions of a compiled program by name, from its text (`jax.stages.Compiled.as_text`).

    Raises:
        ExecutionError: the text has no instructions in the form that is known.
    """
    computations: dict[str, _HloComputation] = {}
    current = _HloComputation()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head[1], _HloComputation())
        elif (found := _LINE.match(line)) and (opcode := _OPCODE.match(_after_type(found[2]))):
            name = _OP_NAME.search(line)
            called = (re.findall(r"[\w.\-]+", group) for group in _CALLED.findall(line))
            current.lines[found[1]] = _HloLine(
                opcode=opcode[1],
                path=_path(name[1]) if name else (),
                sums=name is not None and SUMS_SCOPE in name[1].split("/"),
                computations=tuple(each for names in called for each in names),
            )
    if not any(each.lines for each in computations.values()):
        raise ExecutionError(
            "The text of a compiled program has no instructions that alpa_lite can read, which it needs to tell which "
            f"ops its kernels run. It begins with {text[:80]!r}. Use compiled.measure(), which needs no kernels."
        )
    return {name: _kernel(line, computations) for each in computations.values() for name, line in each.lines.items()}


def _after_type(text: str) -> str:
    """Return what follows the type of an instruction's result, which may be a tuple of types."""
    if not text.startswith("("):
        return text.partition(" ")[2]
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[place + 1 :]
    return ""


def _path(op_name: str) -> OpPath:
    """Return the op path in the name of an instruction; () for what belongs to no op."""
    scopes = [scope[1] for part in op_name.split("/") if (scope := _SCOPE.match(part))]
    # What a body runs outside of its ops belongs to the loop.
    return tuple(map(int, scopes[: len(scopes) - (len(scopes) + 1) % 2]))


def _kernel(line: _HloLine, computations: Mapping[str, _HloComputation]) -> HloKernel:
    inner = [*_inside(line, computations)]
    paths = [line.path, *(each.path for _, each in inner)]
    return HloKernel(
        opcode=line.opcode,
        ops=tuple(dict.fromkeys(path for path in paths if path)),
        product=not _PRODUCTS.isdisjoint((line.opcode, *(each.opcode for _, each in inner))),
        sums=line.sums or any(each.sums for _, each in inner),
        calls=frozenset(name for name, _ in inner),
    )


def _inside(line: _HloLine, computations: Mapping[str, _HloComputation]) -> Iterator[tuple[str, _HloLine]]:
    """Yield all instructions of the computations that an instruction calls, and of those that these call."""
    for name in line.computations:
        # `calls=` may name what is not in the text, such as a function of a library.
        for inner, each in computations.get(name, _HloComputation()).lines.items():
            yield inner, each
            yield from _inside(each, computations)
