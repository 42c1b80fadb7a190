"""Convert a jaxpr to a `Graph`: calls are inlined, loops keep their body, dead equations are dropped.

The graph holds plain data only; the JAX equations that are needed to run its ops on arrays are stored in a parallel
tuple (`alpa_lite.program.equations`).

JAX uses one jaxpr object for the body of a function that is called repeatedly. It becomes one `Graph` object, so that
every analysis of the body is done once for all loops that run it.

The region of a `remat` is inlined behind one `optimization_barrier` per input, which keeps XLA from merging the
recomputation with the first computation.

Scans over layers may be split into several loops, so that pipeline stages can hold parts of them; scans over samples
are never split (`loops_over_samples`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives

from alpa_lite import _jax
from alpa_lite._jax import AnyJaxpr, Array, Aval, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from alpa_lite.errors import TraceError
from alpa_lite.program.editor import ProgramEditor, without_dead_ops
from alpa_lite.program.equations import Equation, GraphWithEquations, PlainParams
from alpa_lite.program.ir import MAX_TRIPS, Graph, Op, Value, accumulated, parts_of
from alpa_lite.program.user_shardings import USER_SHARDING, UserSharding
from alpa_lite.trace import inserted
from alpa_lite.trace.kernels.kernel_params import is_kernel, kernel_params, unread_results
from alpa_lite.trace.source_lines import in_a_library, source_line

_HEAVY = {"dot_general", "conv_general_dilated", "ragged_dot_general"}


def loops_over_samples(closed: ClosedJaxpr, at_another_size: ClosedJaxpr) -> frozenset[int]:
    """Return the indices (into `scans`) of the scans whose lengths differ between jaxprs at two batch sizes."""
    # Not strict: steps that differ in more than lengths are refused later, with the line at which they differ.
    pairs = zip(*(scans(_jax.prune(_jax.open_jaxpr(c))) for c in (closed, at_another_size)), strict=False)
    return frozenset(i for i, (a, b) in enumerate(pairs) if a.params["length"] != b.params["length"])


def scans(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the scan equations of an open jaxpr at any depth, outer ones before inner ones, each once."""
    # By id, since one jaxpr may be reached through several calls.
    found: dict[int, JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        inner = [e for body in _jax.inner_jaxprs(eqn) for e in scans(_jax.open_jaxpr(body))]
        found.update({id(e): e for e in ([eqn] if eqn.primitive.name == "scan" else []) + inner})
    return list(found.values())


def is_over_layers(params: Mapping[str, Any]) -> bool:
    """Return whether a scan with these parameters runs over layers: it contracts in at most `MAX_TRIPS` trips."""
    return params["length"] <= MAX_TRIPS and _has_contraction(params["jaxpr"])


def _has_contraction(closed: AnyJaxpr) -> bool:
    jaxpr = _jax.open_jaxpr(closed)
    return any(
        eqn.primitive.name in _HEAVY or any(_has_contraction(inner) for inner in _jax.inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


_CALLS = frozenset(
    "jit pjit closed_call core_call call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "custom_vmap_call composite linear_call remat_opt eval_jaxpr program_order xla_metadata_call".split()
)
_CALLED_JAXPR = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee", "fwd_jaxpr")
#: Parameters that hold the bodies of control flow, and parameters that count the constants of each body.
_BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
_NUM_CONSTS = {"scan": ("num_consts",), "while": ("cond_nconsts", "body_nconsts")}


def called_jaxpr(eqn: JaxprEqn) -> AnyJaxpr | None:
    """Return the jaxpr that an equation calls once, on its operands; None for other equations."""
    name = eqn.primitive.name
    if name not in _CALLS and not name.startswith(("remat", "checkpoint")):
        return None
    return next((eqn.params[key] for key in _CALLED_JAXPR if key in eqn.params), None)


def from_jaxpr(
    closed: ClosedJaxpr,
    input_names: Sequence[str],
    *,
    num_parts: int = 0,
    whole: frozenset[int] = frozenset(),
    source: str = "",
) -> GraphWithEquations:
    """Convert a closed jaxpr; captured arrays become further inputs named `constant i`.

    Scans over layers (with contractions in their body and at most `MAX_TRIPS` trips) become about `num_parts` loops,
    each over some of the layers, which can go to different pipeline stages (`parts_of`).

    Args:
        closed: the closed jaxpr of a step.
        input_names: names of the jaxpr's inputs, in order.
        num_parts: number of loops per scan over layers; 0 or 1 leaves scans whole.
        whole: indices (into `scans`) of scans to leave whole (`loops_over_samples`).
        source: the source line of ops for which JAX records none.
    """
    jaxpr = _jax.prune(_jax.open_jaxpr(closed))
    builder = _GraphBuilder(
        num_parts=num_parts, whole={id(e) for i, e in enumerate(scans(jaxpr)) if i in whole}, bodies={}
    )
    result = builder.convert(closed, jaxpr, input_names, source)
    # Unused equations were pruned, but splitting a scan can leave single parts without readers.
    return without_dead_ops(result) if num_parts else result


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Location:
    """The place of ops in the user's program.

    Attributes:
        stack: their JAX name stack.
        source: their source line; for a call, the line of ops for which JAX records none.
    """

    stack: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _NewOp:
    """An op to append.

    Attributes:
        equation: its equation.
        bodies: the graphs of its bodies.
        effectful: whether it has an effect, so that it stays even if nothing reads its results.
        plain: the op's parameters, by default those of the equation that have a plain form.
    """

    equation: Equation
    bodies: tuple[Graph, ...] = ()
    effectful: bool = False
    plain: Mapping[str, Any] | None = None


class _GraphBuilder:
    """Collect values, ops and equations while jaxprs are inlined."""

    def __init__(self, *, num_parts: int, whole: set[int], bodies: dict[tuple[int, str], _Body]) -> None:
        self.num_parts = num_parts
        self.whole = whole
        # Keyed by the id of the jaxpr and the default source line; shared with the builders of bodies.
        self.bodies = bodies
        # Joined value → the results of the split loop's parts, so that a later split loop reads its part directly and
        # no stage has to assemble the whole array.
        self.pieces: dict[int, list[int]] = {}
        # Memo: a split loop with one layer per part inlines its body once per trip.
        self.places: dict[int, _EquationPlace] = {}
        self.lines: dict[Hashable, str] = {}  # keyed by traceback, which many equations share
        self.plain = PlainParams()
        self.kernels: dict[tuple[int, frozenset[int]], tuple[Any, Mapping[str, Any] | None]] = {}
        self.editor = ProgramEditor()
        self.values = self.editor.values
        self.captured: list[int] = []
        self.constants: list[Array] = []

    def convert(
        self, closed: AnyJaxpr, jaxpr: Jaxpr, input_names: Sequence[str], source: str, *, is_body: bool = False
    ) -> GraphWithEquations:
        """Convert a closed jaxpr; `jaxpr` is its open jaxpr without dead equations. A builder converts one jaxpr."""
        constants = tuple(_jax.consts_of(closed))
        inputs = [self.new_value(v.aval, name=name) for v, name in zip(jaxpr.invars, input_names, strict=True)]
        captured = [self.new_value(v.aval, name=f"constant {i}") for i, v in enumerate(jaxpr.constvars)]
        environment = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*inputs, *captured], strict=True))
        outputs = self.inline(jaxpr, environment, _Location(stack="", source=source))
        if not is_body:
            outputs = [self.as_array(v) for v in outputs]
        # Constants of inlined calls are met during inlining; their inputs follow those of the jaxpr's own constants.
        self.constants[:0] = constants
        return self.editor.program(inputs + captured + self.captured, outputs, tuple(self.constants))

    def new_value(self, aval: Aval, *, name: str = "", literal: complex | None = None) -> int:
        """Append a value with the shape and dtype of `aval` and return its id."""
        dtype, number = _jax.name_of(aval.dtype), len(self.values)
        return self.editor.add(Value(id=number, shape=tuple(aval.shape), dtype=dtype, literal=literal, name=name))

    def read(self, atom: Var | Literal, environment: Mapping[Var, int]) -> int:
        """Return the value id of a jaxpr variable or literal."""
        if not isinstance(atom, _jax.Literal):
            return environment[atom]
        if np.ndim(atom.val) == 0:
            # Rounding to the dtype makes the literal equal whether its type is weak or strong.
            aval = _jax.aval_of(atom)
            return self.new_value(aval, literal=np.asarray(atom.val, aval.dtype).item())
        return self.capture(atom.aval, atom.val)

    def capture(self, aval: Aval, constant: Array) -> int:
        """Append an input that holds a captured array and return its value id."""
        value = self.new_value(aval, name="captured constant")
        self.captured.append(value)
        self.constants.append(constant)
        return value

    def as_array(self, value: int) -> int:
        """Return the value, or for a scalar literal a new captured input: outputs of a step must be arrays."""
        v = self.values[value]
        return value if v.literal is None else self.capture(v, np.asarray(v.literal, jax.numpy.dtype(v.dtype)))

    def inline(self, jaxpr: Jaxpr, environment: dict[Var, int], at: _Location) -> list[int]:
        """Append the equations of an open jaxpr and return the value ids of its outputs."""
        for eqn in jaxpr.eqns:
            operands = [self.read(atom, environment) for atom in eqn.invars]
            place = self.place(eqn)
            path = "/".join(filter(None, (at.stack, place.stack)))
            # JAX 0.12 truncates the traceback of equations inside a jitted library function at that function; the
            # caller's line is the one the user can act on.
            has_line = place.line and not (at.source and in_a_library(place.line))
            here = _Location(stack=path, source=place.line if has_line else at.source)
            results = self.equation(eqn, operands, here, jaxpr)
            environment.update(zip(eqn.outvars, results, strict=True))
        return [self.read(atom, environment) for atom in jaxpr.outvars]

    def place(self, eqn: JaxprEqn) -> _EquationPlace:
        """Return the name stack and source line of an equation, memoized."""
        if id(eqn) not in self.places:
            traceback = _jax.traceback(eqn)
            if traceback not in self.lines:
                self.lines[traceback] = source_line(eqn)
            self.places[id(eqn)] = _EquationPlace(eqn=eqn, stack=_jax.name_stack(eqn), line=self.lines[traceback])
        return self.places[id(eqn)]

    def equation(self, eqn: JaxprEqn, operands: list[int], at: _Location, jaxpr: Jaxpr) -> list[int]:
        """Append one equation of a jaxpr, inlining calls, and return the value ids of its results."""
        name, inner = eqn.primitive.name, called_jaxpr(eqn)
        if inner is not None:
            # `differentiated` marks the recomputation, which alone must not be merged with the forward pass.
            if name not in _CALLS and eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                operands = [self.barrier(v, at) for v in operands]
            return self.call(inner, operands, at)
        if name == USER_SHARDING:
            return [self.user_sharding(eqn, operands[0], at)]
        if name == "convert_element_type" and self.values[operands[0]].dtype == _jax.name_of(eqn.params["new_dtype"]):
            return operands  # a weak type becomes a strong one, for which nothing is computed
        if name == "custom_linear_solve":
            # Only the solve runs; the other functions define derivatives, which JAX has taken by now.
            first = eqn.params["const_lengths"].matvec + eqn.params["const_lengths"].vecmat
            last, num_consts = first + eqn.params["const_lengths"].solve, sum(eqn.params["const_lengths"])
            solve = eqn.params["jaxprs"].solve
            return self.call(solve, operands[first:last] + operands[num_consts:], at)
        if name in inserted.REDUCTIONS_OVER_NAMES and all(isinstance(axis, int) for axis in eqn.params["axes"]):
            # `vmap` with an axis name turns a collective over that name into a reduction over a dim.
            avals, axes = map(_jax.aval_of, eqn.invars), eqn.params["axes"]
            jaxprs = [inserted.reduction_jaxpr(name, aval.shape, str(aval.dtype), axes) for aval in avals]
            return [self.call(jaxpr, [v], at)[0] for jaxpr, v in zip(jaxprs, operands, strict=True)]
        if name in _BODIES:
            return self.control_flow(eqn, operands, at)
        avals = list(map(_jax.aval_of, eqn.outvars))
        empty = avals and all(0 in aval.shape and not _is_key(aval) for aval in avals)
        # A broadcast is excepted, since `empty` itself makes the array by one.
        if empty and not eqn.effects and name != "broadcast_in_dim":
            # An array without elements needs neither computation nor communication; made on the spot, it also cuts
            # false dependencies between stages.
            return [self.empty(aval, at) for aval in avals]
        return self.operation(eqn, operands, at, jaxpr)

    def operation(self, eqn: JaxprEqn, operands: list[int], at: _Location, jaxpr: Jaxpr) -> list[int]:
        """Append an equation of a jaxpr that becomes an op, and return the value ids of its results."""
        _refuse(eqn, at.source)
        avals, made = list(map(_jax.aval_of, eqn.outvars)), Equation(primitive=eqn.primitive, params=eqn.params)
        if not is_kernel(eqn.primitive.name):
            return self.append(_NewOp(equation=made, effectful=bool(eqn.effects)), operands, avals, at)
        key = (id(eqn.params), unread_results(eqn, jaxpr))
        if key not in self.kernels:
            # A proof takes time. Holding a reference to the parameters keeps their id from being reused.
            self.kernels[key] = eqn.params, kernel_params(eqn.primitive.name, eqn.params, key[1])
        plain = self.kernels[key][1]
        if plain is None:
            return self.call(eqn.params["call"], operands, at)
        return self.append(_NewOp(equation=made, effectful=bool(eqn.effects), plain=plain), operands, avals, at)

    def user_sharding(self, eqn: JaxprEqn, value: int, at: _Location) -> int:
        """Give a value a sharding of the user, or append an op whose result must have it; return the value's id."""
        if eqn.params["pinned"]:
            made = Equation(primitive=eqn.primitive, params=eqn.params)
            (value,) = self.append(_NewOp(equation=made), [value], [eqn.outvars[0].aval], at)
        # What XLA would give a value is no demand of the user's, to be listed.
        if eqn.params["propagated"]:
            return value
        wanted = UserSharding(mesh=eqn.params["mesh"], dims=eqn.params["dims"], source=at.source)
        old = self.values[value]
        self.values[value] = dataclasses.replace(old, user_shardings=(*old.user_shardings, wanted))
        return value

    def empty(self, aval: Aval, at: _Location) -> int:
        """Append an array without elements and return its value id."""
        return self.call(inserted.zeros_jaxpr(aval.shape, aval.dtype), [], at)[0]

    def call(self, inner: AnyJaxpr, operands: list[int], at: _Location) -> list[int]:
        """Inline a closed jaxpr on these operands and return the value ids of its outputs."""
        jaxpr = _jax.open_jaxpr(inner)
        captured = [self.capture(v.aval, c) for v, c in zip(jaxpr.constvars, _jax.consts_of(inner), strict=True)]
        environment = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*operands, *captured], strict=True))
        return self.inline(jaxpr, environment, at)

    def barrier(self, value: int, at: _Location) -> int:
        """Return the value behind an `optimization_barrier`; literals and keys are returned unchanged."""
        if self.values[value].literal is not None:
            return value
        aval = self.values[value]
        if aval.dtype.startswith("key<"):
            return value
        eqn = inserted.barrier_equation(_struct(aval))
        barrier = _NewOp(equation=Equation(primitive=eqn.primitive, params=eqn.params))
        return self.append(barrier, [value], [aval], at)[0]

    def control_flow(self, eqn: JaxprEqn, operands: list[int], at: _Location) -> list[int]:
        """Append a loop or conditional and return the value ids of its results."""
        name, params = eqn.primitive.name, _jax.params_of(eqn)
        if name == "scan" and params["length"] == 0:  # the carry is returned unchanged
            first, num_carry = params["num_consts"], params["num_carry"]
            rest = [self.empty(v.aval, at) for v in eqn.outvars[num_carry:]]
            return [*operands[first : first + num_carry], *rest]
        if name == "scan" and self.num_parts > 1 and id(eqn) not in self.whole and is_over_layers(params):
            return self.scan_in_parts(eqn, operands, at)
        if name == "while" and _jax.aval_of(_jax.open_jaxpr(params["cond_jaxpr"]).outvars[0]).shape:
            return self.call(inserted.while_any_goes_on(eqn), operands, at)
        return self.with_bodies(eqn, params, operands, list(map(_jax.aval_of, eqn.outvars)), at)

    def with_bodies(
        self, eqn: JaxprEqn, params: dict[str, Any], operands: list[int], avals: Sequence[Aval], at: _Location
    ) -> list[int]:
        """Append a loop or conditional with these parameters and result avals; return the value ids of its results."""
        name = eqn.primitive.name
        closed = params["branches"] if name == "cond" else [params[key] for key in _BODIES[name]]
        converted = [self.body(c, at.source) for c in closed]
        # Arrays captured by a body become operands: leading constants of a loop, trailing arguments of a branch.
        captured = [
            [self.capture(b.graph.values[i], c) for i, c in _captured(b)] for b in (k.program for k in converted)
        ]
        if name == "cond":
            operands = [*operands, *chain.from_iterable(captured)]
            bodies = [self.taking_all(k.program, captured, number) for number, k in enumerate(converted)]
        else:
            counts = [params[key] for key in _NUM_CONSTS[name]]
            places = [sum(counts[:i]) for i in range(len(counts))]
            # Insert from the last position on, so that earlier positions stay valid.
            for place, values in reversed(list(zip(places, captured, strict=True))):
                operands = operands[:place] + values + operands[place:]
            bodies = [k.of_loop for k in converted]
            params |= {key: params[key] + len(c) for key, c in zip(_NUM_CONSTS[name], captured, strict=True)}
        graphs, inner = tuple(b.graph for b in bodies), tuple(b.equations for b in bodies)
        made = Equation(primitive=eqn.primitive, params=params, bodies=inner)
        new = _NewOp(equation=made, bodies=graphs, effectful=bool(eqn.effects))
        return self.append(new, operands, avals, at)

    def body(self, closed: AnyJaxpr, source: str) -> _Body:
        """Return the converted body of a closed jaxpr; the same object for the same jaxpr."""
        key = (id(closed), source)
        if key not in self.bodies:
            jaxpr = _jax.prune(_jax.open_jaxpr(closed))
            names = [f"body input {i}" for i in range(len(jaxpr.invars))]
            builder = _GraphBuilder(num_parts=0, whole=set(), bodies=self.bodies)
            program = builder.convert(closed, jaxpr, names, source, is_body=True)
            self.bodies[key] = _Body(closed=closed, program=program, of_loop=_captured_first(program))
        return self.bodies[key]

    def taking_all(self, branch: GraphWithEquations, captured: list[list[int]], number: int) -> GraphWithEquations:
        """Return branch `number` extended by unread inputs for the arrays that the other branches captured.

        All branches of a conditional must take the same operands.
        """
        own = len(branch.graph.inputs) - len(branch.constants)
        editor, inputs = ProgramEditor(branch.graph), list(branch.graph.inputs[:own])
        for other, arrays in enumerate(captured):
            if other == number:
                inputs += branch.graph.inputs[own:]
                continue
            inputs += [editor.add(self.values[v]) for v in arrays]
        graph = dataclasses.replace(branch.graph, values=tuple(editor.values), inputs=tuple(inputs))
        return dataclasses.replace(branch, graph=graph, constants=())

    def scan_in_parts(self, eqn: JaxprEqn, operands: list[int], at: _Location) -> list[int]:
        """Append one loop for each part of the trips, or the inlined body where a part is a single trip."""
        params = _jax.params_of(eqn)
        split = params["num_consts"] + params["num_carry"]
        consts, carry, xs = operands[: params["num_consts"]], operands[params["num_consts"] : split], operands[split:]
        bounds = parts_of(params["length"], self.num_parts)
        made, totals = list[list[int]](), dict[int, int]()
        # A reverse scan carries values from the last trips to the first.
        for number in reversed(range(len(bounds))) if params["reverse"] else range(len(bounds)):
            trips = bounds[number][1] - bounds[number][0]
            rows = [self.piece(x, bounds, number, at) for x in xs]
            if trips == 1:
                results = self.call(params["jaxpr"], [*consts, *carry, *rows], at)
            else:
                some = {**params, "length": trips}
                avals = list(map(_jax.aval_of, eqn.outvars))
                for i in range(params["num_carry"], len(avals)):
                    avals[i] = _jax.struct((trips, *avals[i].shape[1:]), str(avals[i].dtype))
                results = self.with_bodies(eqn, some, [*consts, *carry, *rows], avals, at)
            carry = results[: params["num_carry"]]
            carry = self.restarted_sums(carry, totals, at) if trips > 1 else carry
            made.append(results[params["num_carry"] :])
        if params["reverse"]:
            made.reverse()
        sums = [totals.get(i, v) for i, v in enumerate(carry)]
        # Parts of a single trip have no dim of trips yet.
        stacked = len(bounds) == params["length"]
        return sums + [self.joined(list(pieces), at, stacked=stacked) for pieces in zip(*made, strict=True)]

    def restarted_sums(self, carry: list[int], totals: dict[int, int], at: _Location) -> list[int]:
        """Return the carry with which the next part of a loop starts, and add accumulated values to `totals`.

        A carry that all trips only add to (the gradient of a weight that all layers share) restarts from zero in each
        part, so that no part, and no stage, waits for the sum of another.
        """
        carry = list(carry)
        for i in accumulated(self.editor.ops[-1]):
            form, own = (self.values[carry[i]].shape, self.values[carry[i]].dtype), [carry[i]]
            sums = self.call(inserted.sum_jaxpr(*form), [totals[i], *own], at) if i in totals else own
            zeros = self.call(inserted.zeros_jaxpr(*form), [], at)
            totals[i], carry[i] = sums[0], zeros[0]
        return carry

    def piece(self, value: int, bounds: list[tuple[int, int]], number: int, at: _Location) -> int:
        """Return the rows of one part, or the single row; the part itself when a split loop before made the value."""
        if value in self.pieces and len(self.pieces[value]) == len(bounds):
            return self.pieces[value][number]
        shape, dtype = self.values[value].shape[1:], self.values[value].dtype
        start, stop = bounds[number]
        rows = _jax.struct((stop - start, *shape), dtype)
        if 0 in shape and not dtype.startswith("key<"):
            return self.empty(rows if stop > start + 1 else _jax.struct(shape, dtype), at)
        limits, strides = ((start, *[0] * len(shape)), (stop, *shape)), (1,) * rows.ndim
        params = {"start_indices": limits[0], "limit_indices": limits[1], "strides": strides}
        cut = _NewOp(equation=Equation(primitive=primitives.slice_p, params=params))
        (taken,) = self.append(cut, [value], [rows], at)
        if stop > start + 1:
            return taken
        row = _jax.struct(shape, dtype)
        squeeze = _NewOp(equation=Equation(primitive=primitives.squeeze_p, params={"dimensions": (0,)}))
        return self.append(squeeze, [taken], [row], at)[0]

    def joined(self, pieces: list[int], at: _Location, *, stacked: bool) -> int:
        """Append the op that concatenates pieces along the leading dim, or stacks them, and return its result."""
        shapes = tuple(self.values[v].shape for v in pieces)
        jaxpr = inserted.join_jaxpr(shapes, self.values[pieces[0]].dtype, stacked)
        result = self.call(jaxpr, pieces, at)[0]
        self.pieces[result] = pieces
        return result

    def append(self, new: _NewOp, operands: list[int], result_avals: Sequence[Aval], at: _Location) -> list[int]:
        """Append an op with its equation and return the value ids of its results."""
        results = [self.new_value(aval) for aval in result_avals]
        op = Op(
            id=len(self.editor.ops),
            primitive=new.equation.primitive.name,
            operands=tuple(operands),
            results=tuple(results),
            params=self.plain.of(new.equation.params) if new.plain is None else new.plain,
            source=at.source,
            name_stack=at.stack,
            bodies=new.bodies,
            effectful=new.effectful,
        )
        self.editor.emit(op, op.operands, op.results, new.equation)
        return results


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _EquationPlace:
    """The name stack and source line of an equation.

    Attributes:
        eqn: the equation; holding a reference keeps its `id` from being reused.
        stack: its name stack.
        line: its source line, empty if JAX has none.
    """

    eqn: JaxprEqn
    stack: str
    line: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The converted body of a control-flow op.

    Attributes:
        closed: its closed jaxpr; holding a reference keeps its `id` from being reused.
        program: the body with captured arrays as its last inputs.
        of_loop: the body as loops take it, with captured arrays as its first inputs.
    """

    closed: AnyJaxpr
    program: GraphWithEquations
    of_loop: GraphWithEquations


def _struct(value: Value) -> jax.ShapeDtypeStruct:
    return _jax.struct(value.shape, value.dtype)


def _is_key(aval: Aval) -> bool:
    return jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _refuse(eqn: JaxprEqn, source: str) -> None:
    """Raise `TraceError` for an equation that cannot run on several devices, or cannot run at all."""
    if eqn.primitive.name == "custom_lin":  # remains where a forward-mode derivative is evaluated and not transposed
        raise TraceError(
            f"{source}: a function with a custom_vjp is differentiated in forward mode (jax.jvp, jax.jacfwd or "
            "jax.linearize), for which it has no rule; jax.jit cannot run this either. Use reverse mode, or write the "
            "function with jax.custom_jvp."
        )
    if eqn.effects and eqn.params.get("ordered"):
        raise TraceError(
            f"{source}: {eqn.primitive.name} with ordered=True keeps its place in the order of a program, but "
            "programs on several devices have none. Use ordered=False."
        )


def _captured(body: GraphWithEquations) -> list[tuple[int, Array]]:
    """Return the inputs of a body that hold captured arrays (its last inputs), each with its array."""
    first = len(body.graph.inputs) - len(body.constants)
    return list(zip(body.graph.inputs[first:], body.constants, strict=True))


def _captured_first(body: GraphWithEquations) -> GraphWithEquations:
    """Return a body with its captured arrays moved from the last inputs to the first."""
    inputs, first = body.graph.inputs, len(body.graph.inputs) - len(body.constants)
    graph = dataclasses.replace(body.graph, inputs=inputs[first:] + inputs[:first])
    return dataclasses.replace(body, graph=graph, constants=())
