"""The result of comparing a parallel step with `jax.jit`, leaf by leaf, as data that prints itself as a table."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, fields

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from alpa_lite.plan.plan import Plan
from alpa_lite.text import View, one_line, show_count, view

MAX_STEPS = 32.0
"""Number of rounding steps by which a leaf may differ from `jax.jit`: long sums add up the rounding of their terms.

Correct plans of the programs in `tests/zoo` stay below a third of it.
"""

MAX_LOW_STEPS = 8.0
"""The same for float16, bfloat16 and below: one step is a large part of a number, and long sums are kept in float32."""

COLUMNS = ("output", "dtype", "shape", "error", "rounding steps", "limit", "")
NUMBERS = frozenset(COLUMNS[3:6])

_WIDTH = 120
_NAMED = 3
_ROWS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedLeaf:
    """One output of the step, as the plan and as `jax.jit` compute it.

    Attributes:
        name: its path among the outputs, `0/params/w`-like; empty where the step returns one array alone.
        shape: of the array.
        dtype: of the array.
        error: the largest difference, relative to the largest magnitude in the leaf. Of integers, booleans and keys the
            share of elements that differ. Infinite where one is finite and the other is not.
        rounding_steps: the difference in rounding steps. One step is what a change of all float inputs by one unit in
            the last place does to the leaf under `jax.jit`, and at least one unit in the last place of the leaf.
        allowed_steps: rounding steps that are fine: 32; 8 where the leaf is computed in float16, bfloat16 or below.
        limit: the largest `error` with which the leaf is fine, that many rounding steps; 0 where it must be equal.
        ok: whether it is.
        note: further information, for instance that `jax.jit` itself changes an integer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    error: float
    rounding_steps: float
    allowed_steps: float
    limit: float
    ok: bool
    note: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return JSON-compatible data; numbers that are not finite are null."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: _plain(value) for name, value in values.items()}

    @property
    def share(self) -> float:
        """The difference as a fraction of the allowed difference."""
        return self.rounding_steps / self.allowed_steps

    @property
    def sentence(self) -> str:
        """Return the leaf and its difference as part of a sentence."""
        what = f"{self.name or 'the output'} ({self.dtype}{list(self.shape)})"
        if not math.isfinite(self.error):
            return f"{what} is not finite in the same places"
        # Integers, booleans and keys, and leaves of zeros, which have no last place.
        if self.limit == 0:
            return f"{what} differs in {self.error:.2g} of its elements, and must be equal"
        return (
            f"{what} is off by {self.error:.2g} of its size, {_short(self.rounding_steps)} rounding steps, where "
            f"{self.allowed_steps:g} are allowed"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The comparison of a step under a plan with `jax.jit` of the same step.

    Attributes:
        function: name of the step.
        plan: the plan under which it ran.
        leaves: its outputs, in order.
        drawn: whether random arguments were used, because only shapes were given.
    """

    function: str
    plan: Plan
    leaves: tuple[CheckedLeaf, ...]
    drawn: bool = False

    @property
    def ok(self) -> bool:
        """True if all leaves are within their limits."""
        return all(leaf.ok for leaf in self.leaves)

    @property
    def worst(self) -> tuple[CheckedLeaf, ...]:
        """The leaves, failed ones first, by the fraction of the allowed rounding that they use."""
        # False sorts before True, so that leaves that failed come first.
        return tuple(sorted(self.leaves, key=lambda leaf: (leaf.ok, -leaf.share)))

    def to_dict(self) -> dict[str, object]:
        """Return JSON-compatible data."""
        return {
            "function": self.function,
            "plan": self.plan.name,
            "cluster": self.plan.cluster.name,
            "num_devices": self.plan.cluster.num_devices,
            "num_microbatches": self.plan.num_microbatches,
            "drawn": self.drawn,
            "ok": self.ok,
            "leaves": [leaf.to_dict() for leaf in self.leaves],
        }

    @property
    def verdict(self) -> str:
        """The result as a sentence."""
        plan = self.plan
        where = (
            f"{self.function} by the plan {plan.name!r} on {show_count(plan.cluster.num_devices, 'device')}, in "
            f"{show_count(plan.num_microbatches, 'micro-batch')},"
        )
        wrong = [leaf for leaf in self.worst if not leaf.ok]
        if not wrong:
            farthest = max((leaf.share for leaf in self.leaves), default=0.0)
            count = show_count(len(self.leaves), "output")
            return (
                f"{where} gives what jax.jit gives: {count}, off by at most {100 * farthest:.2g} % of what is allowed."
            )
        named = "; ".join(leaf.sentence for leaf in wrong[:_NAMED])
        rest = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        count = f"{len(wrong)} of {show_count(len(self.leaves), 'output')} {'differs' if len(wrong) == 1 else 'differ'}"
        return f"{where} does not give what jax.jit gives: {count}. {named[0].upper()}{named[1:]}{rest}."

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The rows of a table with `COLUMNS`, the worst leaves first; of many leaves the first ones."""
        return tuple(
            (
                leaf.name or "(output)",
                leaf.dtype,
                str(list(leaf.shape)),
                _short(leaf.error),
                _short(leaf.rounding_steps),
                _short(leaf.limit) if leaf.limit else "equal",
                "; ".join(filter(None, ("ok" if leaf.ok else "DIFFERS", leaf.note))),
            )
            for leaf in self.worst[:_ROWS]
        )

    @property
    def note(self) -> str:
        """What a reader of the table needs to know."""
        rest = len(self.leaves) - _ROWS
        notes = (
            f"… and {rest} more outputs, which differ less" if rest > 0 else "",
            "arguments were drawn for their shapes" if self.drawn else "",
            "one rounding step: what a change of the inputs in the last place does under jax.jit, or the last place of "
            "the output itself",
        )
        return "; ".join(filter(None, notes))

    def __rich__(self) -> Group:
        table = Table()
        for column in COLUMNS:
            numeric = column in NUMBERS
            table.add_column(column, justify="right" if numeric else "left", overflow="ellipsis" if numeric else "fold")
        for row in self.rows:
            table.add_row(*row)
        return Group(Text(self.verdict), table, Text(self.note))

    def __repr__(self) -> str:
        return one_line(self, self.verdict)

    def _repr_html_(self) -> str:
        return view(View.CHECK_HTML, self)

    def __str__(self) -> str:
        # Of a fixed width and without colours, so that logs are the same whatever terminal the program has.
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, markup=False, highlight=False)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _plain(value: object) -> object:
    # JSON has neither infinities nor NaN.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return list(value) if isinstance(value, tuple) else value


def _short(value: float) -> str:
    return "∞" if math.isinf(value) else "0" if value == 0 else f"{value:.2g}" if value < 1e4 else f"{value:.1e}"
