"""The arguments of a call, in three parts: traced arrays, constants of the trace, and objects updated in place.

Which part an argument belongs to is the convention of the library that made it:

    arrays and pytrees of arrays   traced, as `jax.jit` does
    static_argnums, _argnames      constants of the trace, as `jax.jit` has them
    Equinox modules                arrays are traced, all other leaves are constants, as for `equinox.filter_jit`; the
                                   same holds for any argument with a function among its leaves
    Flax NNX modules               their variables are traced as state; a call writes back what the step has changed, as
                                   `flax.nnx.jit` does
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from alpa_lite._jax import Tree, TreeDef
from alpa_lite.errors import PlanError, TraceError
from alpa_lite.program.memo import memoized
from cost_models.checks import printable

Owner = int | str
"""The position of a positional argument, or the name of a keyword argument."""

Arguments = tuple[dict[int, Tree], dict[str, Tree]]
"""The traced values of the positional and of the keyword arguments of a call, as one pytree."""

Static = tuple[tuple[Owner, type, object], ...]
"""The constants of a trace: argument, type and value. 1, True and 1.0 are equal, but three values."""


@dataclass(frozen=True, slots=True)
class NamedArguments:
    """Arguments that an option of the user names, by position and by name, as `jax.jit` reads them.

    Attributes:
        numbers: positions; negative ones count from the end of the positional arguments of a call.
        names: names of parameters.
    """

    numbers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @staticmethod
    def of(option: str, fun: Callable[..., Tree], numbers: Sequence[int], names: Sequence[str]) -> NamedArguments:
        """Return the named arguments of a function, each one by its position and its name where it has both.

        Raises:
            PlanError: the function has no parameter of that name.
        """
        parameters = _parameters(fun)
        if parameters is None or not (numbers or names):
            return NamedArguments(tuple(numbers), tuple(names))
        kinds = [parameter.kind for parameter in parameters.values()]
        unknown = [name for name in names if name not in parameters]
        if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise PlanError(
                f"{option}={unknown[0]!r} was given, but {function_name(fun)} has the parameters "
                f"{', '.join(parameters) or 'none'}. Name one of these."
            )
        positional = [
            name
            for name, kind in zip(parameters, kinds, strict=True)
            if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        before = sum(kind is inspect.Parameter.POSITIONAL_ONLY for kind in kinds)
        places = {name: number for number, name in enumerate(positional, before)}
        more = [name for name, place in places.items() if place in numbers]
        return NamedArguments(
            tuple(dict.fromkeys([*numbers, *(places[name] for name in names if name in places)])),
            tuple(dict.fromkeys([*names, *more])),
        )

    def among(self, num_args: int, keywords: Mapping[str, Tree]) -> frozenset[Owner]:
        """Return the arguments of a call that are named.

        Raises:
            TraceError: a position lies outside of the call, and no parameter of the call stands for it.
        """
        if not self.numbers and not self.names:
            return frozenset()
        given = [name for name in self.names if name in keywords]
        named = [argument_number(number, num_args) for number in self.numbers if self._is_given(number, num_args)]
        return frozenset([*named, *given])

    def _is_given(self, number: int, num_args: int) -> bool:
        # With a name beside it, an argument may be left to its default or be given by keyword.
        return not self.names or -num_args <= number < num_args


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentRoles:
    """The roles that the options of a step give to its arguments.

    Attributes:
        static: arguments that are constants of the trace.
        donated: arguments whose buffers the caller gives up.
    """

    static: NamedArguments = NamedArguments()
    donated: NamedArguments = NamedArguments()


def argument_number(index: int, count: int) -> int:
    """Return the index of a positional argument; negative indices count from the end of `count` arguments.

    Raises:
        TraceError: the index is out of range.
    """
    if not -count <= index < count:
        raise TraceError(
            f"Argument number {index} was named, but the function was called with {count} positional ones."
        )
    return index % count


def argument_name(fun: Callable[..., Tree], owner: Owner) -> str:
    """Return the name of an argument given by position or keyword; `argument N` if Python does not record it."""
    if isinstance(owner, str):
        return owner
    # A decorator made with `functools.wraps` has no parameter names of its own.
    code = getattr(getattr(fun, "__wrapped__", fun), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    if inspect.ismethod(fun):
        # `co_varnames` begins with self, which the callers of a bound method do not pass.
        names = names[1:]
    return names[owner] if owner < len(names) else f"argument {owner}"


# --- constants among the leaves of an argument ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Filled:
    """An argument, or the results, some of whose leaves are constants.

    Attributes:
        structure: pytree structure with all leaves.
        constants: for each leaf its value, or `_TRACED`.
    """

    structure: TreeDef
    constants: tuple[object, ...]

    def whole(self, traced: Tree) -> Tree:
        """Return the tree with its constants; `traced` is the tree of the other leaves, with None in their places."""
        arrays = iter(jax.tree.leaves(traced))
        return jax.tree.unflatten(self.structure, [next(arrays) if c is _TRACED else c for c in self.constants])

    @property
    def key(self) -> tuple[object, ...]:
        """The constants as calls compare them."""
        return self.structure, tuple((type(value), value) for value in self.constants)


class _Traced:
    """The marker of a leaf that is traced."""


_TRACED = _Traced()


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@memoized(entries=256)
def _is_array_class(kind: type) -> bool:
    """Return whether all objects of a class are arrays, so that a call need not look at each of them."""
    return issubclass(kind, _ARRAYS)


def is_array(leaf: object) -> bool:
    """Return whether a leaf is an array, a shape that stands for one, or converts itself to an array."""
    if isinstance(leaf, _ARRAYS):
        return True
    has_form = hasattr(leaf, "__jax_array__") or (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))
    # Classes such as `np.float32` have the attributes dtype and shape too.
    return has_form and not isinstance(leaf, type)


def _split(tree: Tree) -> tuple[Tree, _Filled]:
    """Return a tree with None in place of all leaves that are no arrays, and these."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [is_array(leaf) for leaf in leaves]
    traced = jax.tree.unflatten(
        structure, [leaf if array else None for leaf, array in zip(leaves, arrays, strict=True)]
    )
    return traced, _Filled(structure, tuple(_TRACED if a else leaf for leaf, a in zip(leaves, arrays, strict=True)))


def _has_constants(tree: Tree) -> bool:
    """Return whether the leaves of an argument that are no arrays are constants.

    Numbers are arrays to `jax.jit`, unless they are options of an Equinox module.
    """
    leaves = jax.tree.leaves(tree)
    # This runs at every call: there are few classes, even where there are many leaves.
    if all(map(_is_array_class, {type(leaf) for leaf in leaves})):
        return False
    others = [leaf for leaf in leaves if not is_array(leaf)]
    if any(callable(leaf) for leaf in others):
        return True
    equinox = sys.modules.get("equinox")
    return bool(others) and equinox is not None and _holds(jax.tree.structure(tree), (equinox.Module,))


def _split_results(tree: Tree) -> tuple[Tree, _Filled | None]:
    arrays, filled = _split(tree)
    return (tree, None) if all(value is _TRACED for value in filled.constants) else (arrays, filled)


@memoized(entries=256)
def _holds(structure: TreeDef, kinds: tuple[type, ...], within: type | None = None) -> bool:
    """Return whether a pytree is, or has inside, an object of one of the classes; not inside objects of `within`."""
    ends = kinds if within is None else (*kinds, within)
    # Asking the structure instead of the objects lets the memo answer for all later calls.
    tree = jax.tree.unflatten(structure, range(structure.num_leaves))
    return any(isinstance(node, kinds) for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, ends)))


# --- objects that the step updates in place ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Graph:
    """The arguments that hold Flax NNX modules, as one graph: a variable that two of them share occurs once.

    Attributes:
        nodes: the user's objects, by argument.
        definition: the graph without the values of its variables.
    """

    nodes: dict[Owner, Tree]
    definition: object

    @staticmethod
    def of(arguments: Mapping[Owner, Tree]) -> tuple[_Graph | None, dict[Owner, Tree]]:
        """Return the graph of the arguments that hold modules, and their states; None if no argument does."""
        nnx = sys.modules.get("flax.nnx")  # an argument can only be of a library that the process has imported
        if nnx is None:
            return None, {}
        # In newer versions of Flax, modules are `nnx.Pytree`s, of which there are others.
        kinds = (getattr(nnx, "Pytree", nnx.Module), nnx.Module, nnx.Variable)
        # A State holds variables that nobody updates in place: it is the form of a module for functional code.
        nodes = {
            owner: value
            for owner, value in arguments.items()
            if _holds(jax.tree.structure(value), kinds, within=nnx.State)
        }
        if not nodes:
            return None, {}
        definition, states = _states(nodes)
        return _Graph(nodes, definition), states

    def merged(self, states: Mapping[Owner, Tree]) -> dict[Owner, Tree]:
        """Return new objects that hold these values."""
        nnx = sys.modules["flax.nnx"]
        return nnx.merge(self.definition, nnx.State(dict(states)))

    def update(self, states: Mapping[Owner, Tree]) -> None:
        """Write values back into the user's objects."""
        if states:
            nnx = sys.modules["flax.nnx"]
            nnx.update({owner: self.nodes[owner] for owner in states}, nnx.State(dict(states)))


def _states(nodes: Mapping[Owner, Tree]) -> tuple[object, dict[Owner, Tree]]:
    """Return the graph of objects without the values of its variables, and these values by argument."""
    definition, state = sys.modules["flax.nnx"].split(dict(nodes))
    return definition, {owner: state[owner] if owner in state else {} for owner in nodes}


# --- a call -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments of one call.

    Attributes:
        traced: what is traced of each argument.
        static: all constants, as calls compare them.
        num_args: number of positional arguments.
    """

    traced: dict[Owner, Tree]
    static: Static
    num_args: int
    _values: dict[Owner, Tree]
    _filled: dict[Owner, _Filled]
    _graph: _Graph | None

    @staticmethod
    def of(fun: Callable[..., Tree], args: Sequence[Tree], kwargs: Mapping[str, Tree], static: NamedArguments) -> Call:
        """Read the arguments of a call of `fun`.

        Raises:
            TraceError: a constant has no hash, or `static` names an argument that is not given.
        """
        chosen = static.among(len(args), kwargs)
        arguments: dict[Owner, Tree] = {**dict(enumerate(args)), **kwargs}
        # In a fixed order, so that equal calls have equal keys; positions and names compare as strings only.
        values = {owner: arguments.pop(owner) for owner in sorted(chosen, key=str)}
        constants: list[tuple[Owner, type, object]] = [(o, type(v), v) for o, v in values.items()]
        for owner, _, value in constants:
            _check_hash(value, f"{argument_name(fun, owner)} is a static argument", _STATIC_ADVICE)
        graph, states = _Graph.of(arguments)
        if graph is not None:
            arguments |= states
            constants.append(("the modules", type(graph.definition), graph.definition))
        filled: dict[Owner, _Filled] = {}
        for owner, value in arguments.items():
            if _has_constants(value):
                arguments[owner], filled[owner] = _split(value)
                key = filled[owner].key
                _check_hash(key, f"{argument_name(fun, owner)} has leaves that are no arrays", _LEAF_ADVICE)
                constants.append((owner, _Filled, key))
        return Call(
            traced=arguments,
            static=tuple(constants),
            num_args=len(args),
            _values=values,
            _filled=filled,
            _graph=graph,
        )

    @property
    def tree(self) -> Arguments:
        """The traced values of the positional and of the keyword arguments, as one pytree."""
        return _by_kind(self.traced)

    def run(self, fun: Callable[..., Tree], tree: Arguments) -> tuple[Tree, Results]:
        """Call `fun` with other values of what is traced.

        Returns:
            The pytree of all arrays that come out, updates in place among them, and how results are made of it.
        """
        traced = {**tree[0], **tree[1]}
        # The objects that the function is given may hold these very variables, and change them.
        before = {owner: jax.tree.flatten(value) for owner, value in traced.items()} if self._graph else {}
        arguments = self._whole(traced)
        positional, keywords = _by_kind(arguments)
        result = fun(*[positional[i] for i in range(self.num_args)], **keywords)
        # Without constants among the arguments, an output that is no array is an error (`trace._check_outputs`).
        arrays, filled = _split_results(result) if self._filled else (result, None)
        if self._graph is None:
            return arrays, Results(filled, None)
        updates = self._updates(fun, {owner: arguments[owner] for owner in self._graph.nodes}, before)
        return (arrays, updates), Results(filled, frozenset(updates))

    def unchanged(self, results: Results) -> frozenset[Owner]:
        """Return the arguments that could be updated in place, but are not."""
        return frozenset() if self._graph is None else frozenset(self._graph.nodes) - (results.updated or frozenset())

    def _whole(self, traced: Mapping[Owner, Tree]) -> dict[Owner, Tree]:
        """Return the arguments as the function takes them."""
        found = {**traced, **self._values}
        for owner, filled in self._filled.items():
            found[owner] = filled.whole(traced[owner])
        return found if self._graph is None else found | self._graph.merged({o: found[o] for o in self._graph.nodes})

    def _updates(
        self, fun: Callable[..., Tree], nodes: Mapping[Owner, Tree], before: Mapping[Owner, Tree]
    ) -> dict[Owner, Tree]:
        """Return the states of the objects that the function has changed."""
        changed: dict[Owner, Tree] = {}
        for owner, state in _states(nodes)[1].items():
            leaves, structure = before[owner]
            new, new_structure = jax.tree.flatten(state)
            if new_structure != structure:
                raise TraceError(
                    f"{function_name(fun)} adds variables to {argument_name(fun, owner)}, or removes some, while it is "
                    "traced. Make all variables before the first step, for example by one call of the model."
                )
            # A variable that nobody has assigned to holds the very tracer that it was given.
            if any(a is not b for a, b in zip(new, leaves, strict=True)):
                changed[owner] = state
        return changed

    def update(self, states: Mapping[Owner, Tree]) -> None:
        """Write states back into the user's objects."""
        if self._graph is not None:
            self._graph.update(states)

    def with_values(self, tree: Arguments) -> dict[Owner, Tree]:
        """Return the arguments of this call with other arrays; objects that are updated in place are updated."""
        traced = {**tree[0], **tree[1]}
        if self._graph is None:
            return self._whole(traced)
        self.update({owner: traced[owner] for owner in self._graph.nodes})
        return {**traced, **self._values, **self._graph.nodes}


@dataclass(frozen=True, slots=True)
class Results:
    """The recipe that makes the results of a call from the arrays that come out of the traced function.

    Attributes:
        filled: the results with their constants; None if all are arrays.
        updated: the arguments that the step updates in place; their new states come out with the results. None where
            no argument can be updated.
    """

    filled: _Filled | None
    updated: frozenset[Owner] | None

    @property
    def is_plain(self) -> bool:
        """Whether the arrays are the results."""
        return self.filled is None and self.updated is None

    def finish(self, arrays: Tree, call: Call) -> Tree:
        """Return the results of a call, after writing its updates back."""
        if self.updated is not None:
            arrays, updates = arrays
            call.update(updates)
        return arrays if self.filled is None else self.filled.whole(arrays)


def _by_kind(arguments: Mapping[Owner, Tree]) -> Arguments:
    return (
        {owner: value for owner, value in arguments.items() if isinstance(owner, int)},
        {owner: value for owner, value in arguments.items() if isinstance(owner, str)},
    )


_STATIC_ADVICE = "Pass a value that has one (a tuple, a frozen dataclass), or take the argument out of static_argnums."
_LEAF_ADVICE = "Make such leaves values that have one (functions, strings, tuples), or static fields of their class."


def _check_hash(value: object, what: str, advice: str) -> None:
    try:
        hash(value)
    except TypeError as error:
        kind = str(error).removeprefix("unhashable type: ").strip("'")
        raise TraceError(
            f"{what}, whose value is part of the key of a compiled step, but the {kind} given has no hash. {advice}"
        ) from error


def _parameters(fun: Callable[..., Tree]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function; None for builtins and extension callables without a signature."""
    try:
        return inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return None


def function_name(fun: Callable[..., Tree]) -> str:
    """Return the name of a function, for messages."""
    return printable(getattr(fun, "__name__", type(fun).__name__))
