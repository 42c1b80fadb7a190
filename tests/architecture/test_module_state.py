"""State of modules: what outlives a call is listed here with its reason; all else is a value that is passed on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.measures import Module, structure

STATE = {
    # Registries, filled while modules are imported or by a decorator of the user.
    "alpa_lite.rules.registry._RULES": "rules by primitive, which users extend by `rule`",
    "alpa_lite.step.transfer_functions._TRANSFERS": "transfer functions by primitive",
    "alpa_lite.lower.run_local._LOWERINGS": "local lowerings by primitive",
    "alpa_lite.text._views": "views of values, which `inspection` registers",
    # Memoisation: results of pure functions, which `clear_caches` empties.
    "alpa_lite.program.memo._bounded": "the tables of functions of values",
    "alpa_lite.program.memo._of_subjects": "the tables of functions of graphs and the like",
    "alpa_lite.program.memo._filling": "the lock of these tables",
    # Not emptied: what is remembered is referred to by its number, its name or its identity.
    "alpa_lite.sharding.reshard._GRAPHS": "spec graphs in use: two for one shape would number specs differently",
    "alpa_lite._jax._extended": "dtypes of JAX by their names, which cannot be parsed",
    "alpa_lite._jax.name_of": "below the room of the memo, as is the rest of `_jax`",
    "alpa_lite._jax.key_implementation": "see above",
    "alpa_lite._jax._unpickler_class": "a class that needs an import that takes long",
    "cost_models.hardware._with_ported_attention": "cost models import nothing of alpa_lite",
    "cost_models.composed._best_tiling": "see above",
    "alpa_lite.runtime.calibrate.calibrate._measured": "a measurement: another one would be another cluster",
    # The process has one JAX, one compiler, one set of signal handlers.
    "alpa_lite._jax._assuming": "the lock of a setting of JAX that holds for all threads",
    "alpa_lite.program.kernel._compiling": "the lock of numba's compiler",
    "alpa_lite.inspection.text.progress_bar._LINE": "the lock of the one line of progress",
    # The process is a part of one job.
    "alpa_lite.runtime.execute.placing._known": "meshes that plans ran on; JAX keeps them alive as well",
    "alpa_lite.runtime.checkpoint.lease._open_here": "leases of this process on folders",
    "alpa_lite.runtime.job.activity._doing": "what this process tells the others that it does",
    "alpa_lite.runtime.job.activity._all_flights": "running steps, which the heartbeat's thread looks at",
    "alpa_lite.runtime.job.consensus._service_of": "numbers of messages since the job's service started",
    "alpa_lite.runtime.job.consensus._listener_numbers": "all processes number their listeners alike",
    "alpa_lite.runtime.job.channel._channel_of": "the connections of this process to the others of its job",
    "alpa_lite.runtime.job.shutdown._left": "whether the others know that this process fails",
    "alpa_lite.runtime.job.shutdown._ends": "the lock of the thread that ends the process",
    "alpa_lite.runtime.job.shutdown._watched": "whether the job's processes watch each other",
    "alpa_lite.runtime.job.shutdown._Watched": "the neighbours and what was heard of them, as above",
    "alpa_lite.runtime.execute.watch._thread": "one thread watches the running steps of all executors",
}

_CHANGING = frozenset(
    "add append appendleft clear discard extend insert pop popitem popleft remove setdefault sort update set".split()
)
_MUTABLE = frozenset(
    "Condition Event Lock RLock WeakKeyDictionary WeakSet WeakValueDictionary count cycle deque".split()
)
_EMPTY = frozenset("defaultdict dict list set".split())
_CACHES = frozenset(("cache", "lru_cache"))


def _name(node: ast.AST) -> str:
    """Return the last name of an expression like `a.b.c[d](e)`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _root(node: ast.AST) -> str:
    """Return the first name of `a.b[c]`, if it is more than a name."""
    inner = node
    while isinstance(inner, ast.Attribute | ast.Subscript):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) and inner is not node else ""


def _is_made_to_change(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return _name(value) in _MUTABLE or (_name(value) in _EMPTY and not value.args)
    empty_display = isinstance(value, ast.List | ast.Dict) and not (
        getattr(value, "elts", None) or getattr(value, "keys", None)
    )
    return bool(empty_display)


def _changed(tree: ast.Module) -> set[str]:
    """Return the names whose value some function of a module changes in place."""
    found = set[str]()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        local = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
        local |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names = set[str]()
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found.update(node.names)
            elif isinstance(node, ast.Assign | ast.Delete):
                names.update(map(_root, node.targets))
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                names.add(_root(node.target))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
                names.add(_root(node.func))
            elif isinstance(node, ast.Call) and _name(node.func) == "next" and node.args:
                names.add(_name(node.args[0]))
        found |= names - local
    return found


def _state(module: Module) -> Iterator[str]:
    """Yield the names of a module that hold state, and its functions with a cache that nothing empties."""
    changed = _changed(module.tree)
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (target.id for target in targets if isinstance(target, ast.Name)):
                if name in changed or _is_made_to_change(node.value):
                    yield name
        elif isinstance(node, ast.ClassDef) and node.name in changed:
            yield node.name
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef) and any(_name(d) in _CACHES for d in node.decorator_list):
            yield node.name


def test_all_state_of_modules_has_a_reason() -> None:
    modules = structure().modules.values()
    found = {f"{module.name}.{name}" for module in modules for name in _state(module)}
    assert sorted(found - STATE.keys()) == [], "pass it on as a value, or list it with the reason why that cannot be"
    assert sorted(STATE.keys() - found) == [], "no longer there"


def test_state_is_recognised() -> None:
    text = """
import threading
from functools import lru_cache
FIXED = {"a": 1}
_filled = {"a": 1}
_empty: list[int] = []
_lock = threading.Lock()
_numbered = iter([1])
class Watched: heard = {}
class Value: number = 0
@lru_cache(maxsize=None)
def cached(): ...
def fill(FIXED_too):
    _filled["b"] = FIXED["a"]
    Watched.heard = {}
    FIXED_too["c"] = next(_numbered)
"""
    module = Module(name="m", path=Path(), tree=ast.parse(text), text=text, imports=frozenset())
    assert {*_state(module)} == {"_filled", "_empty", "_lock", "_numbered", "Watched", "cached"}
