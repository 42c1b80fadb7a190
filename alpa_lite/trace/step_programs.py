"""The programs of a train step at all batch sizes: traced, or extrapolated from those at other sizes.

Extrapolation (`extrapolation`) serves three purposes:

    micro-batch of one sample   JAX writes another program for dims of size 1: the transpose of a broadcast sums over
                                them, an index along them is squeezed. The program of larger batches is therefore
                                evaluated at size 1, and checked                                 (`_extrapolated`)
    full batch of one sample    The step keeps the user's own program. Its values are matched with those of the
                                extrapolated program, which shows the dims that hold the batch   (`batch_of_one`)
    search                      The planner needs the step at many sizes, of which two are traced. The chosen size is
                                traced as well                                                   (`at_two_sizes`)

Each program goes through the same passes: constants move into the loops that read them (`SinkFreeValues`); if scans
over layers are split into parts, so are the stacked arrays that they read (`SplitStacked`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from alpa_lite import _jax
from alpa_lite._jax import AnyJaxpr, ClosedJaxpr, JaxprEqn
from alpa_lite.errors import TraceError
from alpa_lite.program.ir import Graph
from alpa_lite.program.passes import PassDriver
from alpa_lite.program.phases import batch_dims, body_scopes, check_same_structure
from alpa_lite.trace.alignment import align
from alpa_lite.trace.extrapolation import at_size, extrapolate
from alpa_lite.trace.from_jaxpr import from_jaxpr, loops_over_samples
from alpa_lite.trace.passes.code_motion import SinkFreeValues, TwoSizes
from alpa_lite.trace.passes.split_stacked import PartedProgram, SplitStacked
from alpa_lite.trace.trace import Traced

#: Batch sizes (in samples) from which programs are extrapolated, and one to check them if the full batch is no larger.
_SHOWING, _CHECKING = (2, 3), 5


@dataclass(frozen=True, kw_only=True, eq=False)
class SizedPrograms:
    """The programs of a traced step, at the full batch and at other sizes; the former are made once.

    Attributes:
        traced: the traced step.
        loop_parts: number of loops per scan over layers; 0 leaves them and stacked arrays whole.
        driver: runs the passes.
    """

    traced: Traced
    loop_parts: int
    driver: PassDriver
    # Programs at the full batch by the indices of the scans over samples, and by the values whose rows are samples.
    _full: dict[frozenset[int], PartedProgram] = field(default_factory=dict[frozenset[int], PartedProgram])
    _parted: dict[tuple[frozenset[int], frozenset[int]], PartedProgram] = field(
        default_factory=dict[tuple[frozenset[int], frozenset[int]], PartedProgram]
    )
    # Traced programs by batch size in samples, from which others are extrapolated without a check.
    _seen: dict[int, PartedProgram] = field(default_factory=dict[int, PartedProgram])

    def at_two_sizes(self, size: int, *, exact: bool = True) -> TwoSizes:
        """Return the programs at the full batch and at another size, which have equal structure.

        Where JAX writes another program at that size, as it does for one sample, the program is extrapolated from the
        full batch and larger sizes.

        Args:
            size: the other batch size in samples.
            exact: trace the program; otherwise an unchecked extrapolation from traced sizes suffices.

        Raises:
            TraceError: the programs differ in structure, and no extrapolation is possible.
        """
        batch = self.traced.require_batch()
        if not exact and size > 1 and (other := self._unchecked(size)) is not None:
            return TwoSizes(full=self._seen[batch], other=other)
        try:
            if size == 1 and not self._traces_alike(size):
                return self._with_other(self._extrapolated()[1], self.over_samples())
            loops = self.over_samples((batch, size))
            found = self._with_other(self._whole(self.traced.at_batch_size(size), loops), loops)
        except TraceError as error:
            try:
                return self.from_larger(size)
            except TraceError:
                raise error from None  # the first error names the op that differs
        # JAX writes other ops for a single sample, so that such a program is no basis for an extrapolation.
        if size > 1:
            self._seen.update({batch: found.full, size: found.other})
        return found

    def from_larger(self, size: int) -> TwoSizes:
        """Return the programs at the full batch and at a smaller size at which JAX writes another program.

        The program at the smaller size is extrapolated from those at once, twice and three times the full batch.
        """
        batch = self.traced.require_batch()
        loops = self.over_samples((batch, 2 * batch))
        programs = {batch: self._full_program(loops)}
        # Multiples of the batch, so that whatever divides it in the step divides these sizes too.
        for times in (2, 3):
            programs[times * batch] = self._whole(self.traced.at_batch_size(times * batch), loops)
        return self._with_other(self._at_size(size, programs), loops)

    def full(
        self, over_samples: frozenset[int] = frozenset(), of_samples: frozenset[int] = frozenset()
    ) -> PartedProgram:
        """Return the program at the full batch with stacked arrays split, but for scans and rows over samples."""
        # Without parts the values have no effect; a constant lets the memo serve all callers by one entry.
        key = over_samples, of_samples if self.loop_parts else frozenset[int]()
        if key not in self._parted:
            self._parted[key] = self._in_parts(self._full_program(over_samples), of_samples)
        return self._parted[key]

    def over_samples(self, sizes: tuple[int, int] = _SHOWING) -> frozenset[int]:
        """Return the indices of the scans over samples, which are not to be split, as two batch sizes show them."""
        # Two more traces, which nobody needs where loops stay whole.
        return loops_over_samples(*map(self.traced.at_batch_size, sizes)) if self.loop_parts else frozenset()

    def batch_of_one(self, own: PartedProgram) -> dict[Graph, dict[int, int | None]]:
        """Return the batch dims of a step traced at one sample, for each graph and body: value id → dim or None.

        At one sample no shape shows the batch. The values are therefore matched with those of the program that larger
        batches show at size 1; values without a match are missing from the result.
        """
        programs = self._extrapolated()
        pair = programs[1], programs[_SHOWING[0]]
        of_samples = _rows_of_samples(*pair)
        made, larger = (self._in_parts(program, of_samples) for program in pair)
        one, two = made.graph, larger.graph
        dims = {one: batch_dims(one, two)}
        dims |= {body: scope.batch_dims for body, scope in body_scopes(one, one, two).items()}
        places = {part: v for v, part in zip(one.inputs, made.input_parts, strict=True)}
        inputs = zip(own.graph.inputs, own.input_parts, strict=True)
        same = align(own.graph, one, {v: places[part] for v, part in inputs if part in places})
        return {graph: {v: dims[other][w] for v, w in values.items()} for graph, (other, values) in same.items()}

    def _whole(self, jaxpr: ClosedJaxpr, over_samples: frozenset[int]) -> PartedProgram:
        """Return the program of a jaxpr of the step, in which scans over layers are split; stacked arrays are whole."""
        names, parts = self.traced.inputs.names, self.loop_parts
        program = self.driver.made(
            "from jaxpr", lambda: PartedProgram.of(from_jaxpr(jaxpr, names, num_parts=parts, whole=over_samples))
        )
        return self.driver.run(program, (SinkFreeValues(),))

    def _full_program(self, over_samples: frozenset[int]) -> PartedProgram:
        """Return the program at the full batch, which is the same for all numbers of micro-batches."""
        if over_samples not in self._full:
            self._full[over_samples] = self._whole(self.traced.jaxpr, over_samples)
        return self._full[over_samples]

    def _in_parts(self, program: PartedProgram, of_samples: frozenset[int]) -> PartedProgram:
        """Return a program with its stacked arrays split into parts, if scans over layers are split."""
        if not self.loop_parts:
            return program
        # Captured arrays follow the arguments among the inputs, and never hold the batch.
        dims = zip(program.graph.inputs, self.traced.batch.dims, strict=False)
        batched = {v for v, dim in dims if dim is not None}
        return self.driver.run(program, (SplitStacked(of_samples=of_samples | batched, num_parts=self.loop_parts),))

    def _with_other(self, other: PartedProgram, over_samples: frozenset[int]) -> TwoSizes:
        """Return the programs at the full batch and at another size, with their stacked arrays split alike.

        Raises:
            TraceError: the two programs differ in more than shapes.
        """
        of_samples = _rows_of_samples(self._full_program(over_samples), other)
        return TwoSizes(full=self.full(over_samples, of_samples), other=self._in_parts(other, of_samples))

    def _unchecked(self, size: int) -> PartedProgram | None:
        """Return the program at a size, traced or extrapolated from two traced ones; None if neither is possible."""
        if len(self._seen) < 2 or size in self._seen:
            return self._seen.get(size)
        try:
            program = extrapolate(size, {of: parted.program for of, parted in self._seen.items()})
        except TraceError:
            return None
        # Parts are rows of layers, never of samples, so they are the same at all batch sizes.
        return replace(next(iter(self._seen.values())), program=program)

    def _extrapolated(self) -> dict[int, PartedProgram]:
        """Return programs by batch size (in samples): the one at size 1, and those from which it follows."""
        full, loops = self.traced.require_batch(), self.over_samples()
        programs = {
            size: self._whole(self.traced.at_batch_size(size), loops) if size != full else self._full_program(loops)
            # The full batch is traced already, so that it checks the line for free where it can.
            for size in (*_SHOWING, full if full > max(_SHOWING) else _CHECKING)
        }
        return {1: self._at_size(1, programs), **programs}

    def _at_size(self, size: int, programs: dict[int, PartedProgram]) -> PartedProgram:
        return self.driver.made(
            "extrapolate", lambda: PartedProgram.of(at_size(size, {n: p.program for n, p in programs.items()}))
        )

    def _traces_alike(self, size: int) -> bool:
        """Return whether JAX writes the same equations, on arrays of the same ranks, at the full batch and `size`."""
        try:
            return _alike(self.traced.jaxpr, self.traced.at_batch_size(size))
        except TraceError:
            return False


def _rows_of_samples(one: PartedProgram, two: PartedProgram) -> frozenset[int]:
    """Return the values whose leading dim differs between two programs: their rows are samples.

    Raises `TraceError` if the programs differ in more than shapes.
    """
    check_same_structure(one.graph, two.graph)
    pairs = zip(one.graph.values, two.graph.values, strict=True)
    return frozenset(v.id for v, w in pairs if v.shape[:1] != w.shape[:1])


def _alike(jaxpr: AnyJaxpr, other: AnyJaxpr) -> bool:
    """Return whether two jaxprs have the same primitives on arrays of the same ranks, bodies included."""
    a, b = _jax.open_jaxpr(jaxpr), _jax.open_jaxpr(other)
    return len(a.eqns) == len(b.eqns) and all(
        x.primitive is y.primitive
        and _ranks(x) == _ranks(y)
        and all(_alike(i, j) for i, j in zip(_jax.inner_jaxprs(x), _jax.inner_jaxprs(y), strict=True))
        for x, y in zip(a.eqns, b.eqns, strict=True)
    )


def _ranks(eqn: JaxprEqn) -> list[int]:
    return [_jax.aval_of(v).ndim for v in (*eqn.invars, *eqn.outvars)]
