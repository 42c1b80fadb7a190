"""Random train steps: drawn from a seed, kept as JSON, written out as Python, labelled.

A program is a choice of pieces (see `pieces`) for each slot of this step::

    def loss(p, x, y, s, w, key):     hidden pieces, extras, one loss, metrics
    def step(state, x, y, s[, key]):  data pieces, one wrapper around `loss`, one update, state pieces

together with sizes, a planner, a number of micro-batches, donation and a number of calls.
"""

from __future__ import annotations

import json
import linecache
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from tests.fuzz.oracle import Outcome, Setup, compare
from tests.fuzz.pieces import HIDDEN, SLOTS, Piece

LISTS = ("data", "hidden", "extras", "metrics", "states")
PLANNERS: dict[str, tuple[Any, int]] = {
    "DataParallel()": (al.planners.DataParallel(), 2),
    "Megatron(tensor=2)": (al.planners.Megatron(tensor=2), 2),
    "Megatron(tensor=8)": (al.planners.Megatron(tensor=8), 8),
    "Pipeline(pipeline=2)": (al.planners.Pipeline(pipeline=2), 2),
    "Pipeline(pipeline=2) with replicas": (al.planners.Pipeline(pipeline=2), 4),
    "Pipeline(schedule=GPipe())": (al.planners.Pipeline(pipeline=2, schedule=al.schedule.GPipe()), 2),
    "Pipeline(schedule=ZeroBubbleH1())": (al.planners.Pipeline(pipeline=2, schedule=al.schedule.ZeroBubbleH1()), 2),
    "FSDP()": (al.planners.FSDP(), 2),
    "Zero(stage=2)": (al.planners.Zero(stage=2), 2),
    "Auto()": (al.planners.Auto(), 2),
}
"""Each with the devices that it plans for; fewer where micro-batches are too small for their replicas."""

RARE = "Auto()"
NEEDS_REPLICAS = ("DataParallel()", "FSDP()", "Zero(stage=2)")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A train step and how it is run.

    Attributes:
        data, hidden, extras, metrics, states: names of pieces, in order.
        loss, wrapper, update: a name each.
        batch, features, tokens: B, D and T.
        time_major: whether sequences are given as ``[T, n, D]``.
        planner: a name from `PLANNERS`.
    """

    seed: int = 0
    data: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ("dense",)
    loss: str = "mean_of_squares"
    extras: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    wrapper: str = "plain"
    update: str = "descent"
    states: tuple[str, ...] = ()
    batch: int = 8
    features: int = 6
    tokens: int = 3
    time_major: bool = False
    planner: str = "DataParallel()"
    num_microbatches: int = 2
    donate: bool = False
    calls: int = 2

    def pieces(self) -> Iterator[tuple[str, str, Piece]]:
        """Slot, name and piece of all that the program is made of, in the order of the step."""
        for slot in SLOTS:
            names = getattr(self, slot)
            for name in (names,) if isinstance(names, str) else names:
                yield slot, name, SLOTS[slot][name]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The program of a line of JSON."""
        values = json.loads(text)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def draw(seed: int) -> Program:
    """The program of a seed. A third have a piece that mixes samples, a fourth one whose label is unknown."""
    rng = random.Random(seed)
    kinds = {"mixed"} if rng.random() < 0.33 else {"unknown", "pairs"} if rng.random() < 0.35 else set[str]()

    def choose(slot: str, count: int) -> tuple[str, ...]:
        names = [name for name, piece in SLOTS[slot].items() if piece.label in {"", *kinds}]
        return tuple(rng.choice(names) for _ in range(count))

    batch = rng.choice([8, 8, 8, 4, 16])
    hidden = choose("hidden", rng.choice([1, 2, 2, 3, 4]))
    if not any(HIDDEN[name].params for name in hidden):
        hidden = ("dense", *hidden)
    if kinds == {"mixed"} and rng.random() < 0.5 and all(HIDDEN[name].label == "" for name in hidden):
        hidden += (rng.choice([name for name, piece in HIDDEN.items() if piece.label == "mixed"]),)
    states = choose("states", rng.choice([0, 0, 1, 2]))
    return Program(
        seed=seed,
        data=choose("data", rng.choice([0, 0, 1, 2])),
        hidden=hidden,
        loss=choose("loss", 1)[0],
        extras=choose("extras", rng.choice([0, 0, 1])),
        metrics=choose("metrics", rng.choice([0, 1, 1, 2])),
        wrapper="plain" if rng.random() < 0.7 else choose("wrapper", 1)[0],
        update=choose("update", 1)[0],
        states=tuple(dict.fromkeys(states)),
        batch=batch,
        features=rng.choice([4, 6, 6, 8]),
        tokens=rng.choice([2, 3, 3, 8]),
        time_major=rng.random() < 0.15,
        planner=RARE if rng.random() < 0.02 else rng.choice([name for name in PLANNERS if name != RARE]),
        num_microbatches=rng.choice([2, 2, 4, 4, batch, 1]),
        donate=rng.random() < 0.3,
        calls=rng.choice([1, 2]),
    )


# --- labels -----------------------------------------------------------------------------------------------------------


def label(program: Program) -> str:
    """Whether micro-batches must accept a program: "additive", "mixed" (they may, if it is equal), or "unknown".

    Additive: the loss of each sample depends on that sample, on parameters, and on what data alone fixes; the loss is
    their sum, and all that is returned is a sample's own, or a sum, maximum or minimum over samples.
    """
    labels = {piece.label for _, _, piece in program.pieces()}
    if program.num_microbatches == 1:
        return "additive"
    if "unknown" in labels:
        return "unknown"
    if "pairs" in labels and (program.batch // program.num_microbatches) % 2:
        return "unknown"
    if program.wrapper != "plain" and labels & {"pairs", "mixed"}:
        return "unknown"  # one sample, or half a batch, is mixed with itself
    return "mixed" if "mixed" in labels else "additive"


# --- Python -----------------------------------------------------------------------------------------------------------


def _lines(code: str, number: str) -> str:
    """The code of a piece, its parameters and keys named after it."""
    code = re.sub(r"\$k\b", f"jax.random.fold_in(key, {int(number[1:])})", code)
    return re.sub(r"\$([a-z])\b", rf'p["\1{number}"]', code)


def source(program: Program) -> str:
    """The program as a module of Python with `loss` and `step`."""
    inside, before, after, metrics = [], [], [], []
    update, wrapper = "", ""
    places = {"data": before, "hidden": inside, "loss": inside, "extras": inside, "metrics": metrics, "states": after}
    for i, (slot, _, piece) in enumerate(program.pieces()):
        lines = _lines(piece.code, f"_{i}")
        if slot == "update":
            update = lines
        elif slot == "wrapper":
            wrapper = lines
        else:
            places[slot].append(lines)
    weights = any(re.search(r"\bw = |, w = ", lines) for lines in before)
    start = [] if weights else ["w = x[:, 0] ** 2"]
    loss = ["n, more, h = x.shape[0], 0.0, x", *inside]
    loss.append(f"return value + more, ({''.join(f'({m}), ' for m in metrics)})")
    turned = ["s = s.swapaxes(0, 1)"] if program.time_major else []
    step = ["n, p, new = x.shape[0], state['net'], dict(state)", *turned, *before, *start, wrapper, update, *after]
    step.append("return new, value, aux")
    with_key = needs_key(program)
    text = (
        f"import jax\nimport jax.numpy as jnp\n\nB, D, T = {program.batch}, {program.features}, {program.tokens}\n\n\n"
    )
    text += "def loss(p, x, y, s, w, key):\n" + textwrap.indent("\n".join(loss), "    ")
    text += f"\n\n\ndef step(state, x, y, s{', key' if with_key else ''}):\n"
    text += textwrap.indent("\n".join(step if with_key else ["key = None", *step]), "    ") + "\n"
    return text


def needs_key(program: Program) -> bool:
    """Whether the step takes a random key."""
    return any("$k" in piece.code for _, _, piece in program.pieces())


def build(program: Program) -> Built:
    """The step of a program and its arguments."""
    text = source(program)
    name = f"<program {program.seed}-{abs(hash(text)) % 10**6}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # errors show their lines
    namespace: dict[str, Any] = {}
    exec(compile(text, name, "exec"), namespace)
    rng = np.random.default_rng(program.seed)
    sizes = {"B": program.batch, "D": program.features, "T": program.tokens}

    def array(shape: str, scale: float = 0.5) -> Any:
        dims = eval(f"({shape}{',' if shape else ''})", dict(sizes))
        return jnp.asarray(rng.normal(size=dims) * scale, jnp.float32)

    net = {
        f"{letter}_{i}": array(shape).astype(piece.dtype)
        for i, (_, _, piece) in enumerate(program.pieces())
        for letter, shape in re.findall(r"(\w)=(\S+)", piece.params.replace(" * ", "*"))
    }
    state: dict[str, Any] = {"net": net}
    for _, _, piece in program.pieces():
        for letter, shape in re.findall(r"(\w)=(\S*)", piece.state):
            state[letter] = jax.tree.map(lambda v: abs(v) * 0.1, net) if shape == "net" else abs(array(shape)) + 0.1
    batch, features, tokens = sizes.values()
    x = jnp.asarray(rng.normal(size=(batch, features)), jnp.float32)
    y = jnp.asarray(rng.integers(0, features, batch), jnp.int32)
    s = jnp.asarray(rng.normal(size=(batch, tokens, features)), jnp.float32)
    s = s.swapaxes(0, 1) if program.time_major else s
    key = [jax.random.key(program.seed)] if needs_key(program) else []
    return Built(step=namespace["step"], loss=namespace["loss"], args=(state, x, y, s, *key))


@dataclass(frozen=True, kw_only=True)
class Built:
    """Functions and arguments of a program."""

    step: Callable[..., Any]
    loss: Callable[..., Any]
    args: tuple[Any, ...] = field(repr=False)


def setup(program: Program) -> Setup:
    """The planner of a program, on as many devices as its micro-batches feed."""
    planner, num_devices = PLANNERS[program.planner]
    size = program.batch // program.num_microbatches
    if program.planner in NEEDS_REPLICAS or program.planner.endswith("replicas"):
        num_devices = num_devices if size % 2 == 0 else num_devices // 2
    return Setup(planner=planner, num_devices=num_devices)


def outcome(program: Program) -> Outcome:
    """Run a program in micro-batches and by `jax.jit`, and compare."""
    built = build(program)
    return compare(
        built.step,
        built.args,
        setup=setup(program),
        num_microbatches=program.num_microbatches,
        batch_argnums={1: 0, 2: 0, 3: 1} if program.time_major else (1, 2, 3),
        donate_argnums=(0,) if program.donate else (),
        calls=program.calls,
        tolerance=max(piece.tolerance for _, _, piece in program.pieces()),
    )


def failure(program: Program, found: Outcome) -> str:
    """What is wrong with an outcome: "wrong", "crashed", "refused although additive", or nothing."""
    if found.kind in ("wrong", "crashed", "died"):
        return found.kind
    return "refused although additive" if found.kind == "refused" and label(program) == "additive" else ""
