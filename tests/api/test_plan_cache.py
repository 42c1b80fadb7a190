"""Plans that were made before: taken again where everything is the same, and only there; damage is no error."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import alpa_lite as al
from alpa_lite.api import plan_cache
from alpa_lite.plan import codec
from alpa_lite.plan.progress import Progress
from alpa_lite.planners import Auto, DataParallel, Hybrid, Megatron, Planner, PlanRequest
from alpa_lite.runtime.calibrate.calibrate import CACHE_VARIABLE

WIDTH, BATCH = 64, 32
CLUSTER = al.cluster("p3.16xlarge")


def step_with(rate: float) -> Callable[..., Any]:
    """A training step; of another rate, another one."""

    def train_step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean(jnp.tanh(x @ weights["a"]) @ weights["b"])

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - rate * g, weights, grads), value

    return train_step


def _weights(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32))


def _planned(folder: Path | bool | None, step: Any = None, batch: int = BATCH, **options: Any) -> al.PlannedFunction:
    options = {"cluster": CLUSTER, "planner": Hybrid(data=8), **options}
    x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
    return al.parallelize(step or step_with(0.1), **options).trace(_weights("a", "b"), x).plan(cache=folder)


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests register rules in this process."""
    monkeypatch.setattr(plan_cache, "only_own_rules", lambda: True)


@pytest.mark.parametrize("planner", [Auto(), Hybrid(pipeline=2), Auto(pins={"a": PartitionSpec(None, "x")})])
def test_the_same_again_is_the_same_plan(tmp_path: Path, planner: Planner) -> None:
    said: list[str] = []
    first = _planned(tmp_path, planner=planner)
    again = _planned(tmp_path, planner=planner, progress=said.append)
    assert not first.cached and again.cached
    assert again.last_plan == first.last_plan and again.last_plan.solver.seconds == first.last_plan.solver.seconds
    assert len(said) == 1 and "from the cache" in said[0]
    again.lower()


OTHERS: dict[str, dict[str, Any]] = {
    "step": {"step": step_with(0.2)},
    "batch": {"batch": 2 * BATCH},
    "micro-batches": {"num_microbatches": 2},
    "what is accepted": {"on_non_additive": "mean_of_means"},
    "planner": {"planner": DataParallel()},
    "option": {"planner": Hybrid(data=8, zero=1)},
    "cluster": {"cluster": replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=10**10))},
}


def _branching(at: int) -> Callable[..., Any]:
    """A training step that reads other columns at `at` samples; 0 for none. All have one line of code."""

    def train_step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            first = 8 * (len(x) == at)
            return jnp.mean(jax.lax.slice_in_dim(jnp.tanh(x @ weights["a"]), first, first + 8, axis=1))

        value, slope = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, slope), value

    return train_step


def test_steps_that_differ_at_a_micro_batch_alone_have_one_key_and_one_plan(tmp_path: Path) -> None:
    """Micro-batches run the program of the full batch, which the key holds."""
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    plain, other = (
        al.parallelize(_branching(at), cluster=CLUSTER, planner=Hybrid(data=8), num_microbatches=2).trace(
            _weights("a", "b"), x
        )
        for at in (0, BATCH // 2)
    )
    key, same = (plan_cache.key_of(Hybrid(data=8), each.request(CLUSTER, 2, advise=True)) for each in (plain, other))
    assert key is not None and key == same
    assert not plain.plan(cache=tmp_path).cached and plain.plan(cache=tmp_path).cached
    assert other.plan(cache=tmp_path).cached
    for each in (plain, other):
        assert plan_cache._load(tmp_path, key, each.request(CLUSTER, 2, advise=True)) is not None


def _scaling(weights: Any, x: Any, rate: Any = 0.1) -> Any:
    def loss(weights: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ weights["a"]) @ weights["b"])

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - rate * g, weights, grads), value


def _cached(folder: Path, *rate: Any) -> bool:
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    step = al.parallelize(_scaling, cluster=CLUSTER, planner=Hybrid(data=8), batch_argnums=1)
    return step.trace(_weights("a", "b"), x, *rate).plan(cache=folder).cached


@pytest.mark.parametrize("config", [jax.default_matmul_precision("highest"), jax.enable_x64(True)])
def test_what_the_configuration_of_jax_changes_is_planned_anew(tmp_path: Path, config: Any) -> None:
    wide = jax.ShapeDtypeStruct((), jnp.float64)
    assert not _cached(tmp_path)
    with config:
        assert not (_cached(tmp_path, wide) if jax.config.jax_enable_x64 else _cached(tmp_path))
    assert _cached(tmp_path)


def test_weak_types_share_a_plan(tmp_path: Path) -> None:
    assert not _cached(tmp_path, jax.ShapeDtypeStruct((), jnp.float32))
    assert _cached(tmp_path, jax.ShapeDtypeStruct((), jnp.float32, weak_type=True))
    assert not _cached(tmp_path, jax.ShapeDtypeStruct((), jnp.bfloat16))


@pytest.mark.parametrize("other", OTHERS)
def test_what_differs_is_planned_anew(tmp_path: Path, other: str) -> None:
    _planned(tmp_path)
    assert not _planned(tmp_path, **OTHERS[other]).cached
    assert _planned(tmp_path).cached


def test_other_source_or_versions_are_planned_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _planned(tmp_path)
    monkeypatch.setattr(plan_cache, "own_digest", lambda: "after an upgrade")
    assert not _planned(tmp_path).cached


@pytest.mark.parametrize("package", ["highspy", "numpy", "jax"])
def test_the_digest_depends_on_what_plans_are_made_with(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, version = plan_cache.own_digest.__wrapped__(), plan_cache.metadata.version
    monkeypatch.setattr(plan_cache.metadata, "version", lambda name: "another" if name == package else version(name))
    assert plan_cache.own_digest.__wrapped__() != before


def test_a_plan_that_does_not_belong_to_the_step_is_made_anew(tmp_path: Path) -> None:
    """The key sees the step at its whole batch only; at the micro-batches of the plan it might be another."""
    options = {"planner": Hybrid(pipeline=2), "num_microbatches": 4}
    plan = _planned(tmp_path, **options).last_plan
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace(plan.fingerprint, "0" * 64))
    assert not _planned(tmp_path, **options).cached
    assert _planned(tmp_path, **options).cached


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b'{"format": 4}', b"[1]"])
def test_damage_is_no_error(tmp_path: Path, damage: bytes) -> None:
    plan = _planned(tmp_path).last_plan
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    again = _planned(tmp_path)
    assert not again.cached and again.last_plan.stages == plan.stages
    assert _planned(tmp_path).cached  # mended


def test_no_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for _ in range(2):
        assert not _planned(tmp_path / "file" / "plans").cached


def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step_with(rate) for rate in (0.1, 0.2, 0.3)]
    for number, step in enumerate(steps[:2]):
        _planned(tmp_path, step)
        newest = max(tmp_path.iterdir(), key=os.path.getmtime)
        os.utime(newest, (number + 1, number + 1))
    assert _planned(tmp_path, steps[0]).cached  # asked for, so that the second is the oldest now
    size = max(file.stat().st_size for file in tmp_path.iterdir())
    monkeypatch.setattr(plan_cache, "MAX_BYTES", 2.5 * size)
    _planned(tmp_path, steps[2])
    assert len(list(tmp_path.iterdir())) == 2
    assert [_planned(tmp_path, step).cached for step in (steps[2], steps[0], steps[1])] == [True, True, False]


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _planned(tmp_path)
    (own,) = tmp_path.iterdir()
    others = {
        "dataset.bin": b"0" * 10_000,
        "thesis.tex": b"chapter one",
        f"{'0' * 64}": b"a blob of another cache",
        f"{'1' * 64}.json": b"{}",
        f"{'2' * 64}.json": own.read_bytes(),  # a copy, for its name not one that was written
        f"{'3' * 64}.abcd1234.tmp": b"",
        f"{own.stem}.json.bak": own.read_bytes(),
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / f"{'4' * 64}.json").mkdir()
    (tmp_path / f"{'5' * 64}.json").symlink_to(tmp_path / "thesis.tex")
    os.mkfifo(tmp_path / f"{'6' * 64}.json")
    there = {path.name for path in tmp_path.iterdir()} - {own.name}
    monkeypatch.setattr(plan_cache, "MAX_BYTES", 1.5 * own.stat().st_size)
    os.utime(own, (2, 2))
    _planned(tmp_path, step_with(0.2))
    left = {path.name for path in tmp_path.iterdir()}
    assert own.name not in left and there < left and len(left) == len(there) + 1
    assert all((tmp_path / name).read_bytes() == content for name, content in others.items())


def test_plans_belong_to_their_keys(tmp_path: Path) -> None:
    """One that somebody stored under another key is not taken, with a right checksum or not."""
    megatron, wanted = tmp_path / "megatron", tmp_path / "wanted"
    _planned(megatron, planner=Megatron(tensor=8))
    _planned(wanted, planner=DataParallel())
    (stored,), (path,) = megatron.iterdir(), wanted.iterdir()
    path.write_bytes(stored.read_bytes())
    assert not _planned(wanted, planner=DataParallel()).cached
    data = codec.from_text(stored.read_bytes(), stored)
    path.write_bytes(codec.to_text({**data, "key": path.stem}))
    assert _planned(wanted, planner=DataParallel()).cached  # who may write this user's files can say anything
    path.write_bytes(stored.read_bytes().replace(stored.stem.encode(), path.stem.encode()))
    assert not _planned(wanted, planner=DataParallel()).cached


def test_plans_of_other_users_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _planned(tmp_path)
    me = os.getuid()
    monkeypatch.setattr(plan_cache.os, "getuid", lambda: me + 1)
    assert not _planned(tmp_path).cached


def test_folders_are_for_the_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "caches" / "plans"
    _planned(folder)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder.parent, folder)] == [0o700, 0o700]
    assert [stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()] == [0o600]


def test_interrupted_plans_are_not_kept(tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        if text.startswith("survey"):
            raise KeyboardInterrupt

    plan = _planned(tmp_path, planner=Auto(), progress=Progress(interrupt), on_interrupt="best").last_plan
    assert plan.solver.status == "interrupted" and not list(tmp_path.iterdir())


@dataclass(frozen=True, kw_only=True)
class Mine(Planner):
    """A planner of the user's, whose code nobody can compare."""

    name = "mine"

    def plan(self, request: PlanRequest) -> al.Plan:
        """As data parallel."""
        return DataParallel().plan(request)


@dataclass(frozen=True, kw_only=True)
class Looks(Planner):
    """Keeps the requests that it gets."""

    requests: list[PlanRequest]
    name = "looks"

    def plan(self, request: PlanRequest) -> al.Plan:
        """As data parallel."""
        self.requests.append(request)
        return DataParallel().plan(request)


def test_plans_that_are_chosen_by_running_them_are_not_kept() -> None:
    looks = Looks(requests=[])
    _planned(False, planner=looks)
    assert plan_cache.key_of(Auto(), looks.requests[0]) is not None
    assert plan_cache.key_of(Auto(measure_top=2), looks.requests[0]) is None


@dataclass(frozen=True, kw_only=True)
class Tries(Planner):
    """Looks at the step at some numbers of micro-batches, and takes the last of them."""

    numbers: tuple[int, ...]
    seen: list[PlanRequest]
    name = "tries"

    def plan(self, request: PlanRequest) -> al.Plan:
        """As data parallel."""
        self.seen.append(request)
        for number in self.numbers:
            request.step_at(number, 0)
        return DataParallel().plan(replace(request, num_microbatches=self.numbers[-1]))


@pytest.mark.parametrize("odd", [0, 2, 8])
def test_steps_that_look_at_their_batch_size_are_planned_as_the_full_batch_runs(odd: int) -> None:
    """Micro-batches of `odd` samples would be rounded otherwise, but are not, as the full batch is not."""

    def train_step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            bits = 10 if x.shape[0] == odd else 12
            rounded = jax.lax.reduce_precision(x @ weights["a"], exponent_bits=8, mantissa_bits=bits)
            return jnp.mean(jnp.tanh(rounded) @ weights["b"])

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    tries, said = Tries(numbers=(1, 2, 16, 4), seen=[]), list[str]()
    found = _planned(False, train_step, planner=tries, progress=said.append)
    assert len(tries.seen) == 1 and not any("planned again" in text for text in said)
    found.lower()


def test_what_has_no_content_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _planned(tmp_path, planner=Mine())
    _planned(tmp_path, planner=Auto(manual=(Mine(),)))
    _planned(tmp_path, planner=_planned(False).last_plan)  # a replay
    monkeypatch.setattr(plan_cache, "only_own_rules", lambda: False)
    _planned(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_cache.folder_of(True) is None  # as tests run
    assert plan_cache.folder_of(tmp_path) == tmp_path and plan_cache.folder_of(str(tmp_path)) == tmp_path
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))
    assert plan_cache.folder_of(True) == tmp_path / "mine" and plan_cache.folder_of(False) is None
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert plan_cache.folder_of(True) == tmp_path / "alpa_lite" / "plans"


def test_al_plan_takes_a_folder(tmp_path: Path) -> None:
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    options = {"cluster": "p3.16xlarge", "planner": DataParallel(), "cache": tmp_path}
    first, again = (al.plan(step_with(0.1), _weights("a", "b"), x, **options) for _ in range(2))
    assert first == again and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("word", ["on", "1", "True", "yes"])
def test_a_word_that_means_yes_is_no_folder(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    usual = plan_cache.folder_of(True)
    monkeypatch.setenv(CACHE_VARIABLE, word)
    assert usual is not None and plan_cache.folder_of(True) == usual
