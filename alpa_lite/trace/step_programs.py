"""The programs of a train step at all batch sizes: two are traced, the others follow from these.

A step is traced at the full batch and at one more size, which shows what follows the batch (`SizedPrograms.shown`). All
other programs are extrapolated from the two (`extrapolation`), for three reasons: it takes less time, the code of the
user may compute something else at another size, and JAX writes another program for dims of size 1: the transpose of a
broadcast sums over them, an index along them is squeezed. That the extrapolated program of a micro-batch is the right
one need not be assumed: the proof that micro-batches are exact (`step.additivity`) holds for the program that they run.

A full batch of one sample keeps the user's own program. Its values are matched with those of a program that larger
batches show at size 1, which gives the dims that hold the batch (`batch_of_one`).

Each program goes through the same passes: constants move into the loops that read them (`SinkFreeValues`); if scans
over layers are split into parts, so are the stacked arrays that they read (`SplitStacked`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from alpa_lite import _jax
from alpa_lite._jax import ClosedJaxpr
from alpa_lite.errors import TraceError
from alpa_lite.program.ir import Graph
from alpa_lite.program.passes import PassDriver
from alpa_lite.program.phases import batch_dims, body_scopes, check_same_structure
from alpa_lite.trace.alignment import align
from alpa_lite.trace.extrapolation import at_size
from alpa_lite.trace.from_jaxpr import from_jaxpr, is_over_layers, loops_over_samples, scans
from alpa_lite.trace.own_numbers import with_own_numbers
from alpa_lite.trace.passes.code_motion import SinkFreeValues, TwoSizes
from alpa_lite.trace.passes.split_stacked import PartedProgram, SplitStacked
from alpa_lite.trace.trace import Traced

#: Batch sizes (in samples) that show the program of one sample, and one to check it.
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

    @cached_property
    def has_parts(self) -> bool:
        """Whether a scan over layers is split, or a stacked argument or result of the step."""
        if any(is_over_layers(_jax.params_of(scan)) for scan in scans(_jax.open_jaxpr(self.traced.jaxpr))):
            return True
        full = self.full()
        return any(part.rows is not None for part in (*full.input_parts, *full.output_parts))

    def shown(self) -> TwoSizes:
        """Return the programs at the full batch and at another size, both traced.

        Raises `TraceError` where the step has the same ops at no other size that was tried.
        """
        return self._shown()[1]

    def _shown(self) -> tuple[int, TwoSizes]:
        if isinstance(self._other, TraceError):
            raise self._other
        return self._other

    @cached_property
    def _other(self) -> tuple[int, TwoSizes] | TraceError:
        """The other size in samples, and the programs; or why there are none, which takes several traces to learn."""
        errors = list[TraceError]()
        for size in _other_sizes(self.traced.require_batch()):
            try:
                return size, self.traced_at(size)
            except TraceError as error:
                errors.append(error)
        return errors[0]  # of the size that is tried first for a reason

    def traced_at(self, size: int) -> TwoSizes:
        """Return the programs at the full batch and at another size, both traced.

        Raises:
            TraceError: the step cannot be traced at this size, or the programs differ in structure.
        """
        loops = self.over_samples((self.traced.require_batch(), size))
        return self._with_other(self._whole(self.traced.at_batch_size(size), loops), loops)

    def with_own_numbers(self, size: int) -> TwoSizes:
        """Return the programs at the full batch and at another size, in which all numbers are those of the user's code.

        Raises:
            TraceError: the step cannot be traced at this size, or is another one there.
        """
        try:
            return self.traced_at(size)
        except TraceError:
            traced, pair = self._shown()
            if traced == size:
                raise
        loops = self.over_samples((self.traced.require_batch(), size))
        whole = self._whole(self.traced.at_batch_size(size), loops)
        made = self._extrapolated(size, traced, pair)
        own = self._in_parts(whole, _rows_of_samples(pair.full, pair.other))
        places = {part: v for v, part in zip(made.other.graph.inputs, made.other.input_parts, strict=True)}
        inputs = {v: places[part] for v, part in zip(own.graph.inputs, own.input_parts, strict=True) if part in places}
        graph = with_own_numbers(made.other.graph, own.graph, inputs, (pair.graph, pair.other.graph))
        # Captured arrays are the last inputs, in the same order at all sizes.
        shapes = [[v.shape for v in (g.values[i] for i in g.inputs)] for g in (graph, own.graph)]
        if shapes[0] != shapes[1]:
            raise TraceError(
                f"The code captures other arrays at {size} samples than at {self.traced.batch.size}. Use fewer "
                "micro-batches, of more samples each."
            )
        program = replace(made.other.program, graph=graph, constants=own.program.constants)
        return replace(made, other=replace(made.other, program=program))

    def at_two_sizes(self, size: int) -> Iterator[TwoSizes]:
        """Yield programs at the full batch and at another size (in samples), which have equal structure.

        The latter is extrapolated first, with all parameters or with those of the full batch where they fit, then
        traced, and extrapolated from larger sizes at last: the code of the user may be another below a size. Raises
        `TraceError` where there are none.
        """
        batch, errors = self.traced.require_batch(), list[TraceError]()
        ways: list[Callable[[], TwoSizes]] = [lambda: self._extrapolated(size, *self._shown())]
        ways += [lambda: self._extrapolated(size, *self._shown(), of_full=True), lambda: self.traced_at(size)]
        ways += [lambda n=n * batch: self._extrapolated(size, n, self.traced_at(n), of_full=True) for n in (2, 3)]
        for way in ways:
            try:
                pair = way()
            except TraceError as error:
                errors.append(error)
            else:
                yield pair
        if len(errors) == len(ways):
            raise errors[0]

    def full(
        self, over_samples: frozenset[int] = frozenset(), of_samples: frozenset[int] = frozenset()
    ) -> PartedProgram:
        """Return the program at the full batch with stacked arrays split, but for scans and rows over samples."""
        # Without parts the values have no effect; a constant lets the memo serve all callers by one entry.
        key = over_samples, of_samples if self.loop_parts else frozenset[int]()
        if key not in self._parted:
            self._parted[key] = self._in_parts(self._full_program(over_samples), of_samples)
        return self._parted[key]

    def over_samples(self, sizes: tuple[int, int]) -> frozenset[int]:
        """Return the indices of the scans over samples, which are not to be split, as two batch sizes show them."""
        # Traces that nobody needs where loops stay whole.
        return loops_over_samples(*map(self.traced.at_batch_size, sizes)) if self.loop_parts else frozenset()

    def batch_of_one(self, own: PartedProgram) -> dict[Graph, dict[int, int | None]]:
        """Return the batch dims of a step traced at one sample, for each graph and body: value id → dim or None.

        At one sample no shape shows the batch. The values are therefore matched with those of the program that larger
        batches show at size 1; values without a match are missing from the result.
        """
        loops = self.over_samples(_SHOWING)
        sizes = (*_SHOWING, _CHECKING)
        programs = {size: self._whole(self.traced.at_batch_size(size), loops) for size in sizes}
        pair = self._at_one(programs), programs[_SHOWING[0]]
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

    def _extrapolated(self, size: int, traced: int, pair: TwoSizes, *, of_full: bool = False) -> TwoSizes:
        """Return the programs at the full batch and at a size that follow from those at the full batch and `traced`.

        `of_full`: whether parameters are those of the full batch where they give the right shapes.
        """
        if size == traced and not of_full:
            return pair
        batch = self.traced.require_batch()
        programs = {batch: pair.full.program, traced: pair.other.program}

        def made() -> PartedProgram:
            # Parts are rows of layers, never of samples, so they are the same at all batch sizes.
            return replace(pair.full, program=at_size(size, programs, full=batch if of_full else None))

        return replace(pair, other=self.driver.made("extrapolate", made))

    def _at_one(self, programs: dict[int, PartedProgram]) -> PartedProgram:
        return self.driver.made(
            "extrapolate", lambda: PartedProgram.of(at_size(1, {n: p.program for n, p in programs.items()}))
        )


def _rows_of_samples(one: PartedProgram, two: PartedProgram) -> frozenset[int]:
    """Return the values whose leading dim differs between two programs: their rows are samples.

    Raises `TraceError` if the programs differ in more than shapes.
    """
    check_same_structure(one.graph, two.graph)
    pairs = zip(one.graph.values, two.graph.values, strict=True)
    return frozenset(v.id for v, w in pairs if v.shape[:1] != w.shape[:1])


def _other_sizes(size: int) -> tuple[int, ...]:
    """Return other batch sizes (in samples) at which to trace the step to see what follows the batch.

    Several are returned, since the code of the user and JAX may choose other algorithms at some sizes.
    """
    # Sizes that divide the batch come first: what divides the batch in the code of the user divides them too, mostly.
    smaller = [size // p for p in range(2, size) if size % p == 0]
    return tuple(dict.fromkeys((*smaller[:2], 2 * size, 3 * size, *smaller[2:3])))
