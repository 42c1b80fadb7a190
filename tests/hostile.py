"""Files that an accident or somebody changed: each is read, or refused in a sentence, soon and in little memory.

``python -m tests.hostile --files 50000`` tries out many and prints how they ended.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from alpa_lite.cli.user_files import read_pins
from alpa_lite.inspection.text.timeline import predicted_timeline
from alpa_lite.intra_op.problem import Problem, Ragged
from alpa_lite.intra_op.problem_file import read_problem, write_problem
from tests.mutations import damaged, mutated, nested

LONGEST_MESSAGE = 3000
HOST = al.cluster("p3.16xlarge")
PINS = "state/params/head: [null, model]\nlayers/0/w: [[replica, data], null]\nboth: &x [null]\nthere: *x\n"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Files of a kind.

    Attributes:
        text: of a good one.
        read: what programs do with such a file.
    """

    text: Callable[[], bytes]
    read: Callable[[Path], Any]


def train_step(params: Any, x: Any) -> tuple[Any, Any]:
    def loss(params: Any) -> Any:
        return (jnp.tanh(x @ params["a"]) @ params["b"]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(jnp.subtract, params, grads), value


@cache
def _planned() -> al.PlannedFunction:
    width = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    function = al.parallelize(train_step, cluster=HOST, planner=al.planners.Pipeline(pipeline=2), num_microbatches=2)
    return function.trace({"a": width, "b": width}, width).plan(cache=False)


def _plan() -> bytes:
    """Without its checksum, so that changes are looked at."""
    return json.dumps(_planned().last_plan.to_json()).encode()


def _use_plan(path: Path) -> None:
    plan = al.Plan.load(path)
    texts = [
        str(plan),
        plan.explain_time(),
        plan.explain_memory(),
        plan.explain("stage 0"),
        str(predicted_timeline(plan)),
    ]
    texts.append(str(plan.diff(_planned().last_plan)))
    for text in texts:
        _check_shown(text)
    plan.to_html(path.with_suffix(".html"))
    _planned().function.plan(planner=plan, cluster=plan.cluster).lower()


def _cluster() -> bytes:
    return json.dumps(HOST.to_json()).encode()


def _use_cluster(path: Path) -> None:
    cluster = al.cluster(str(path))
    _check_shown(str(cluster.to_json()))


def _problem() -> bytes:
    ragged = Ragged(values=np.array([1.0, 2.0, 3.0, 4.0]), starts=np.array([0, 2, 4]))
    matrix = Ragged(values=np.array([0.0, 1.0, 2.0, np.inf]), starts=np.array([0, 4]))
    problem = Problem(
        node_costs=ragged,
        edge_nodes=np.array([[0, 1]]),
        edge_costs=matrix,
        usage_nodes=np.array([0, 1]),
        usage_times=np.array([[0, 2], [1, 3]]),
        usage_bytes=ragged,
        limit_bytes=7.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_problem(problem, Path(folder) / "problem.json")
        return (Path(folder) / "problem.json").read_bytes()


KINDS = {
    "plan": Kind(text=_plan, read=_use_plan),
    "cluster": Kind(text=_cluster, read=_use_cluster),
    "pins": Kind(text=PINS.encode, read=read_pins),
    "problem": Kind(text=_problem, read=read_problem),
}


@cache
def _text(kind: str) -> bytes:
    return KINDS[kind].text()


def hostile(kind: str, chance: random.Random) -> bytes:
    """A file of a kind with changes."""
    text = _text(kind)
    if kind == "pins" or chance.random() < 0.3:
        return damaged(text, chance)
    data = mutated(json.loads(text), chance, changes=chance.choice((1, 1, 2, 5)), subtle=chance.random() < 0.3)
    if chance.random() < 0.05:
        data = {**data, chance.choice([*data, "more"]): nested(chance.choice((50, 300, 985, 20_000)))}
    return _dumped(data)


def _dumped(data: Any) -> bytes:
    try:
        return json.dumps(data).encode()
    except RecursionError:
        depth = 100_000
        return b'{"format": 5, "stages": ' + b"[" * depth + b"]" * depth + b"}"


def _check_shown(text: str) -> None:
    """What a terminal may be told."""
    text.encode()
    assert not any(unicodedata.category(each) in ("Cc", "Cs") and each != "\n" for each in text)


def ended(kind: str, text: bytes, path: Path) -> str:
    """How the use of a file ended: "used" or "refused"; raises whatever else it ended in."""
    path.write_bytes(text)
    try:
        KINDS[kind].read(path)
    except al.AlpaLiteError as error:
        _check_shown(str(error))
        assert 10 < len(str(error)) <= LONGEST_MESSAGE
        return "refused"
    return "used"


def main() -> None:
    """Try out many files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    counts, slowest = Counter[str](), (0.0, "", 0)
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:  # what is imported and compiled once counts for none of them
            ended(kind, _text(kind), Path(folder) / f"{kind}.json")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for seed in range(given.seed, given.seed + given.files):
            chance = random.Random(seed)
            kind = chance.choice(["plan", "plan", "cluster", "pins", "problem"])
            text, begun = hostile(kind, chance), time.process_time()
            try:
                how = ended(kind, text, Path(folder) / f"{kind}.json")
            except Exception as error:
                how = "lost"
                print(f"seed {seed}, {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            counts[f"{kind}, {how}"] += 1
            slowest = max(slowest, (time.process_time() - begun, kind, seed))
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print(f"the slowest took {slowest[0]:.2f} s ({slowest[1]}, seed {slowest[2]}); memory grew by {grown} MiB at most")


if __name__ == "__main__":
    main()
