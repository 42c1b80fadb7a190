"""From a jaxpr to a `Graph`: calls are inlined, loops keep their body, dead equations go.

JAX enters here. The graph holds plain data; the equations that lowering needs to run the ops on real arrays are kept
beside it (`equations`).

Bodies that are one jaxpr, as JAX makes them where one function is called again and again, are one `Graph`: what is
found out about it holds for all loops that run it.

`remat` regions are inlined behind one `optimization_barrier` per input, which is what keeps XLA from merging the
recomputation with the first computation.

The loops of a jaxpr: which go over layers, so that stages may have parts of them, and which over samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives

from alpa_lite import _jax
from alpa_lite.errors import TraceError
from alpa_lite.program.equations import Equation, GraphWithEquations, PlainParams, without_dead_ops
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.wiring import MAX_TRIPS, accumulated, parts_of
from alpa_lite.trace import inserted

_HEAVY = {"dot_general", "conv_general_dilated", "ragged_dot_general"}


def loops_over_samples(closed: Any, at_another_size: Any) -> frozenset[int]:
    """Numbers of the scans whose length follows the batch, from the jaxprs of one step at two batch sizes."""
    pairs = zip(*(scans(_jax.prune(_jax.open_jaxpr(c))) for c in (closed, at_another_size)), strict=False)
    return frozenset(i for i, (a, b) in enumerate(pairs) if a.params["length"] != b.params["length"])


def scans(jaxpr: Any) -> list[Any]:
    """The scan equations of an open jaxpr at any depth, outer ones first, each once."""
    found: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        inner = [e for body in _jax.inner_jaxprs(eqn) for e in scans(_jax.open_jaxpr(body))]
        found.update({id(e): e for e in ([eqn] if eqn.primitive.name == "scan" else []) + inner})
    return list(found.values())


def is_over_layers(params: Mapping[str, Any]) -> bool:
    """Whether a scan with these parameters goes over layers: it contracts, and has not too many trips."""
    return params["length"] <= MAX_TRIPS and _has_contraction(params["jaxpr"])


def _has_contraction(closed: Any) -> bool:
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
#: Parameters that hold the bodies of control flow, and those that count the constants of each.
_BODIES = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
_NUM_CONSTS = {"scan": ("num_consts",), "while": ("cond_nconsts", "body_nconsts")}


def from_jaxpr(
    closed: Any,
    input_names: Sequence[str],
    *,
    num_parts: int = 0,
    kept: frozenset[int] = frozenset(),
    source: str = "",
) -> GraphWithEquations:
    """Convert a closed jaxpr. Captured arrays become further inputs named `constant i`; `source`: for ops without line.

    Loops over layers (scans with contractions in their body, at most `MAX_TRIPS` trips) become about `num_parts`
    loops over some of their layers each, which can go to different pipeline stages (`parts_of`). With 0 or 1 they stay
    as they are, as do those numbered in `kept` (`loops_over_samples`).
    """
    jaxpr = _jax.prune(_jax.open_jaxpr(closed))
    builder = _GraphBuilder(
        num_parts=num_parts, kept={id(e) for i, e in enumerate(scans(jaxpr)) if i in kept}, bodies={}
    )
    result = _converted(builder, closed, jaxpr, input_names, source, is_body=False)
    return without_dead_ops(result) if num_parts else result


def _converted(
    builder: _GraphBuilder, closed: Any, jaxpr: Any, input_names: Sequence[str], source: str, *, is_body: bool
) -> GraphWithEquations:
    """A closed jaxpr, of which `jaxpr` holds the equations that are needed, by a builder that is new."""
    constants = tuple(_jax.consts_of(closed))
    inputs = [builder.new_value(v.aval, name=name) for v, name in zip(jaxpr.invars, input_names, strict=True)]
    captured = [builder.new_value(v.aval, name=f"constant {i}") for i, v in enumerate(jaxpr.constvars)]
    environment = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*inputs, *captured], strict=True))
    outputs = builder.inline(jaxpr, environment, stack="", source=source)
    if not is_body:
        outputs = [builder.as_array(v) for v in outputs]
    # Constants of inlined calls are discovered on the way and come last.
    builder.constants[:0] = constants
    graph = Graph(
        values=tuple(builder.values),
        ops=tuple(builder.ops),
        inputs=tuple(inputs + captured + builder.captured),
        outputs=tuple(outputs),
    )
    return GraphWithEquations(graph=graph, equations=tuple(builder.equations), constants=tuple(builder.constants))


class _GraphBuilder:
    """Collects values and ops while jaxprs are walked."""

    def __init__(self, *, num_parts: int, kept: set[int], bodies: dict[tuple[int, str], _Body]) -> None:
        self.num_parts = num_parts
        self.kept = kept
        # By identity of the jaxpr and the source of ops without a line; shared with the builders of bodies.
        self.bodies = bodies
        # Values that parts of a loop made, one after the other, so that parts of a later loop read them directly.
        self.pieces: dict[int, list[int]] = {}
        # Bodies are walked once per trip where loops are cut.
        self.places: dict[int, _EquationPlace] = {}
        self.lines: dict[Any, str] = {}  # by traceback, of which many equations share one
        self.plain = PlainParams()
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.equations: list[Equation] = []
        self.captured: list[int] = []
        self.constants: list[Any] = []

    def new_value(self, aval: Any, *, name: str = "", literal: Any = None) -> int:
        value = Value(
            id=len(self.values), shape=tuple(aval.shape), dtype=_jax.name_of(aval.dtype), literal=literal, name=name
        )
        self.values.append(value)
        return value.id

    def read(self, atom: Any, environment: Mapping[Any, int]) -> int:
        if not isinstance(atom, _jax.Literal):
            return environment[atom]
        if np.ndim(atom.val) == 0:
            # Rounded to its dtype: it is the same number then with a weak and with a strong type.
            aval: Any = atom.aval
            return self.new_value(aval, literal=np.asarray(atom.val, aval.dtype).item())
        return self.capture(atom.aval, atom.val)

    def capture(self, aval: Any, constant: Any) -> int:
        value = self.new_value(aval, name="captured constant")
        self.captured.append(value)
        self.constants.append(constant)
        return value

    def as_array(self, value: int) -> int:
        """The value itself; for a scalar constant an input that holds it, since the step's outputs are arrays."""
        v = self.values[value]
        return value if v.literal is None else self.capture(v, np.asarray(v.literal, jax.numpy.dtype(v.dtype)))

    def inline(self, jaxpr: Any, environment: dict[Any, int], *, stack: str, source: str) -> list[int]:
        """Append the equations of an open jaxpr; returns the value ids of its outputs."""
        for eqn in jaxpr.eqns:
            operands = [self.read(atom, environment) for atom in eqn.invars]
            place = self.place(eqn)
            path = "/".join(filter(None, (stack, place.stack)))
            # JAX 0.12 cuts the traceback of what a jitted function calls at that function: its caller knows more.
            known = place.line and not (source and _jax.in_a_library(place.line))
            results = self.equation(eqn, operands, stack=path, source=place.line if known else source)
            environment.update(zip(eqn.outvars, results, strict=True))
        return [self.read(atom, environment) for atom in jaxpr.outvars]

    def place(self, eqn: Any) -> _EquationPlace:
        """Where an equation stands, remembered."""
        if id(eqn) not in self.places:
            traceback = _jax.traceback(eqn)
            if traceback not in self.lines:
                self.lines[traceback] = _jax.source_line(eqn)
            self.places[id(eqn)] = _EquationPlace(eqn=eqn, stack=_jax.name_stack(eqn), line=self.lines[traceback])
        return self.places[id(eqn)]

    def equation(self, eqn: Any, operands: list[int], *, stack: str, source: str) -> list[int]:
        name = eqn.primitive.name
        if name in _CALLS or name.startswith(("remat", "checkpoint")):
            inner = next((eqn.params[key] for key in _CALLED_JAXPR if key in eqn.params), None)
            if inner is not None:
                if name not in _CALLS and eqn.params.get("differentiated") and eqn.params.get("prevent_cse"):
                    operands = [self.barrier(v, stack=stack, source=source) for v in operands]
                return self.call(inner, operands, stack=stack, source=source)
        if name == "convert_element_type" and self.values[operands[0]].dtype == _jax.name_of(eqn.params["new_dtype"]):
            return operands  # a weak type becomes a strong one, for which nothing is computed
        if name == "custom_linear_solve":
            first = eqn.params["const_lengths"].matvec + eqn.params["const_lengths"].vecmat
            last, num_consts = first + eqn.params["const_lengths"].solve, sum(eqn.params["const_lengths"])
            solve = eqn.params["jaxprs"].solve
            return self.call(solve, operands[first:last] + operands[num_consts:], stack=stack, source=source)
        if name in inserted.REDUCTIONS_OVER_NAMES and _is_over_dims(eqn.params["axes"]):
            # What `vmap` with an axis name leaves of a collective: a reduction over a dim.
            made = [
                inserted.reduction_jaxpr(name, v.aval.shape, str(v.aval.dtype), eqn.params["axes"]) for v in eqn.invars
            ]
            return [self.call(j, [v], stack=stack, source=source)[0] for j, v in zip(made, operands, strict=True)]
        if name in _BODIES:
            return self.control_flow(eqn, operands, stack=stack, source=source)
        avals = [v.aval for v in eqn.outvars]
        empty = avals and all(0 in aval.shape and not _is_key(aval) for aval in avals)
        if empty and not eqn.effects and name != "broadcast_in_dim":
            # Nothing to compute, and nothing to hand from one program to the next.
            return [self.empty(aval, stack=stack, source=source) for aval in avals]
        _refuse(eqn, source)
        return self.append(eqn.primitive, eqn.params, operands, avals, (), stack, source, effectful=bool(eqn.effects))

    def empty(self, aval: Any, *, stack: str, source: str) -> int:
        """An array without elements."""
        return self.call(inserted.zeros_jaxpr(aval.shape, aval.dtype), [], stack=stack, source=source)[0]

    def call(self, inner: Any, operands: list[int], *, stack: str, source: str) -> list[int]:
        jaxpr = _jax.open_jaxpr(inner)
        captured = [self.capture(v.aval, c) for v, c in zip(jaxpr.constvars, _jax.consts_of(inner), strict=True)]
        environment = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*operands, *captured], strict=True))
        return self.inline(jaxpr, environment, stack=stack, source=source)

    def barrier(self, value: int, *, stack: str, source: str) -> int:
        if self.values[value].literal is not None:
            return value
        aval = self.values[value]
        if aval.dtype.startswith("key<"):
            return value
        eqn = inserted.barrier_equation(_struct(aval))
        return self.append(eqn.primitive, eqn.params, [value], [aval], (), stack, source)[0]

    def control_flow(self, eqn: Any, operands: list[int], *, stack: str, source: str) -> list[int]:
        name, params = eqn.primitive.name, _jax.params_of(eqn)
        if name == "scan" and params["length"] == 0:  # what it carries is what it began with
            first, num_carry = params["num_consts"], params["num_carry"]
            rest = [self.empty(v.aval, stack=stack, source=source) for v in eqn.outvars[num_carry:]]
            return [*operands[first : first + num_carry], *rest]
        if name == "scan" and self.num_parts > 1 and id(eqn) not in self.kept and is_over_layers(params):
            return self.scan_in_parts(eqn, operands, stack=stack, source=source)
        if name == "while" and _jax.open_jaxpr(params["cond_jaxpr"]).outvars[0].aval.shape:
            return self.call(inserted.while_any_goes_on(eqn), operands, stack=stack, source=source)
        return self.with_bodies(eqn, params, operands, [v.aval for v in eqn.outvars], stack=stack, source=source)

    def with_bodies(
        self,
        eqn: Any,
        params: dict[str, Any],
        operands: list[int],
        avals: Sequence[Any],
        *,
        stack: str,
        source: str,
    ) -> list[int]:
        """A loop or a conditional with these parameters and results."""
        name = eqn.primitive.name
        closed = params["branches"] if name == "cond" else [params[key] for key in _BODIES[name]]
        known = [self.body(c, source) for c in closed]
        # Arrays captured by a body become operands: the first constants of a loop, further arguments of a branch.
        captured = [[self.capture(b.graph.values[i], c) for i, c in _captured(b)] for b in (k.program for k in known)]
        if name == "cond":
            operands = [*operands, *chain.from_iterable(captured)]
            bodies = [self.taking_all(k.program, captured, number) for number, k in enumerate(known)]
        else:
            counts = [params[key] for key in _NUM_CONSTS[name]]
            places = [sum(counts[:i]) for i in range(len(counts))]
            for place, values in reversed(list(zip(places, captured, strict=True))):
                operands = operands[:place] + values + operands[place:]
            bodies = [k.of_loop for k in known]
            params |= {key: params[key] + len(c) for key, c in zip(_NUM_CONSTS[name], captured, strict=True)}
        effectful = bool(eqn.effects)
        return self.append(eqn.primitive, params, operands, avals, tuple(bodies), stack, source, effectful=effectful)

    def body(self, closed: Any, source: str) -> _Body:
        """A body; the same object for the same jaxpr."""
        key = (id(closed), source)
        if key not in self.bodies:
            jaxpr = _jax.prune(_jax.open_jaxpr(closed))
            names = [f"body input {i}" for i in range(len(jaxpr.invars))]
            builder = _GraphBuilder(num_parts=0, kept=set(), bodies=self.bodies)
            program = _converted(builder, closed, jaxpr, names, source, is_body=True)
            self.bodies[key] = _Body(closed=closed, program=program, of_loop=_captured_first(program))
        return self.bodies[key]

    def taking_all(self, branch: GraphWithEquations, captured: list[list[int]], number: int) -> GraphWithEquations:
        """Branch `number`, which captured its own arrays, as one that also takes those of the others, unread."""
        own = len(branch.graph.inputs) - len(branch.constants)
        values, inputs = list(branch.graph.values), list(branch.graph.inputs[:own])
        for other, arrays in enumerate(captured):
            if other == number:
                inputs += branch.graph.inputs[own:]
                continue
            for v in arrays:
                inputs.append(len(values))
                values.append(dataclasses.replace(self.values[v], id=len(values)))
        graph = dataclasses.replace(branch.graph, values=tuple(values), inputs=tuple(inputs))
        return dataclasses.replace(branch, graph=graph, constants=())

    def scan_in_parts(self, eqn: Any, operands: list[int], *, stack: str, source: str) -> list[int]:
        """One loop for each part of the trips; the body itself where a part is one trip."""
        params, place = _jax.params_of(eqn), {"stack": stack, "source": source}
        split = params["num_consts"] + params["num_carry"]
        consts, carry, xs = operands[: params["num_consts"]], operands[params["num_consts"] : split], operands[split:]
        bounds = parts_of(params["length"], self.num_parts)
        made, totals = list[list[int]](), dict[int, int]()
        for number in reversed(range(len(bounds))) if params["reverse"] else range(len(bounds)):
            trips = bounds[number][1] - bounds[number][0]
            rows = [self.piece(x, bounds, number, **place) for x in xs]
            if trips == 1:
                results = self.call(params["jaxpr"], [*consts, *carry, *rows], **place)
            else:
                some = {**params, "length": trips}
                avals = [v.aval for v in eqn.outvars]
                for i in range(params["num_carry"], len(avals)):
                    avals[i] = _jax.struct((trips, *avals[i].shape[1:]), str(avals[i].dtype))
                results = self.with_bodies(eqn, some, [*consts, *carry, *rows], avals, **place)
            carry = results[: params["num_carry"]]
            carry = self.begun_anew(carry, totals, **place) if trips > 1 else carry
            made.append(results[params["num_carry"] :])
        if params["reverse"]:
            made.reverse()
        sums = [totals.get(i, v) for i, v in enumerate(carry)]
        stacked = len(bounds) == params["length"]
        return sums + [self.joined(list(pieces), stacked=stacked, **place) for pieces in zip(*made, strict=True)]

    def begun_anew(self, carry: list[int], totals: dict[int, int], **place: str) -> list[int]:
        """What the next part of a loop starts from: zeros for what all only add to, whose sums are in `totals`."""
        carry = list(carry)  # gradients of weights that all trips share: no part, and no stage, waits for another's
        for i in accumulated(self.ops[-1]):
            form, own = (self.values[carry[i]].shape, self.values[carry[i]].dtype), [carry[i]]
            sums = self.call(inserted.sum_jaxpr(*form), [totals[i], *own], **place) if i in totals else own
            zeros = self.call(inserted.zeros_jaxpr(*form), [], **place)
            totals[i], carry[i] = sums[0], zeros[0]
        return carry

    def piece(self, value: int, bounds: list[tuple[int, int]], number: int, *, stack: str, source: str) -> int:
        """The rows of a part, or the row; the piece itself when parts of an earlier loop made the value."""
        if value in self.pieces and len(self.pieces[value]) == len(bounds):
            return self.pieces[value][number]
        shape, dtype = self.values[value].shape[1:], self.values[value].dtype
        start, stop = bounds[number]
        rows = _jax.struct((stop - start, *shape), dtype)
        if 0 in shape and not dtype.startswith("key<"):
            return self.empty(rows if stop > start + 1 else _jax.struct(shape, dtype), stack=stack, source=source)
        limits, strides = ((start, *[0] * len(shape)), (stop, *shape)), (1,) * rows.ndim
        params = {"start_indices": limits[0], "limit_indices": limits[1], "strides": strides}
        (taken,) = self.append(primitives.slice_p, params, [value], [rows], (), stack, source)
        if stop > start + 1:
            return taken
        row = _jax.struct(shape, dtype)
        return self.append(primitives.squeeze_p, {"dimensions": (0,)}, [taken], [row], (), stack, source)[0]

    def joined(self, pieces: list[int], *, stacked: bool, stack: str, source: str) -> int:
        """Op that puts pieces one after the other, or stacks them."""
        shapes = tuple(self.values[v].shape for v in pieces)
        jaxpr = inserted.join_jaxpr(shapes, self.values[pieces[0]].dtype, stacked)
        result = self.call(jaxpr, pieces, stack=stack, source=source)[0]
        self.pieces[result] = pieces
        return result

    def append(
        self,
        primitive: Any,
        params: Mapping[str, Any],
        operands: list[int],
        result_avals: Sequence[Any],
        bodies: tuple[GraphWithEquations, ...],
        stack: str,
        source: str,
        *,
        effectful: bool = False,
    ) -> list[int]:
        results = [self.new_value(aval) for aval in result_avals]
        self.ops.append(
            Op(
                id=len(self.ops),
                primitive=primitive.name,
                operands=tuple(operands),
                results=tuple(results),
                params=self.plain.of(params),
                source=source,
                name_stack=stack,
                bodies=tuple(body.graph for body in bodies),
                effectful=effectful,
            )
        )
        inner = tuple(body.equations for body in bodies)
        self.equations.append(Equation(primitive=primitive, params=params, bodies=inner))
        return results


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _EquationPlace:
    """Name stack and line of an equation, which is kept so that its id stays its own."""

    eqn: Any
    stack: str
    line: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """A body of control flow as it was converted, and as loops take it: with the arrays that it captured in front.

    The jaxpr is kept, so that its id stays its own.
    """

    closed: Any
    program: GraphWithEquations
    of_loop: GraphWithEquations


def _struct(value: Value) -> jax.ShapeDtypeStruct:
    return _jax.struct(value.shape, value.dtype)


def _is_key(aval: Any) -> bool:
    return jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _is_over_dims(axes: Sequence[Any]) -> bool:
    return all(isinstance(axis, int) for axis in axes)


def _refuse(eqn: Any, source: str) -> None:
    """Raises `TraceError` for an equation that cannot run on several devices, or anywhere."""
    if eqn.primitive.name == "custom_lin":  # left where a derivative in forward mode is used, not transposed
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


def _captured(body: GraphWithEquations) -> list[tuple[int, Any]]:
    """The inputs of a body that stand for captured arrays (its last ones), and the arrays."""
    first = len(body.graph.inputs) - len(body.constants)
    return list(zip(body.graph.inputs[first:], body.constants, strict=True))


def _captured_first(body: GraphWithEquations) -> GraphWithEquations:
    inputs, first = body.graph.inputs, len(body.graph.inputs) - len(body.constants)
    graph = dataclasses.replace(body.graph, inputs=inputs[first:] + inputs[:first])
    return dataclasses.replace(body, graph=graph, constants=())
