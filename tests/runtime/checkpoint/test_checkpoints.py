"""Checkpoints: the same bits under any plan, the last complete one whatever happens, sentences where none is usable."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import alpa_lite as al
from alpa_lite.errors import CheckpointError, UnusableFileWarning
from alpa_lite.runtime.checkpoint.checksums import LIST
from tests.end_to_end.cases import PLANNERS, Training, assert_same, eager_cluster, make_batch
from tests.runtime.checkpoint.saved_states import bits, numbered

TRAINING = Training(model="mlp", optimizer="adamw")
PLACES = ("hybrid", "fsdp", "pipeline_4", "megatron on 4", "one device", "numpy")


def _batch(number: int) -> Any:
    return make_batch(TRAINING.architecture, number)


@cache
def compiled(place: str) -> Any:
    """The step under a plan, on eight devices or on the first four."""
    planner, _, few = place.partition(" on ")
    cluster = al.cluster("p3.16xlarge")
    cluster = eager_cluster() if not few else type(cluster)(**{**_fields(eager_cluster()), "devices_per_host": 4})
    step = al.parallelize(TRAINING.step(), cluster=cluster, planner=PLANNERS[planner], num_microbatches=4)
    structs = jax.eval_shape(lambda: (TRAINING.start(), _batch(0), jax.random.key(0)))
    lowered = step.trace(*structs).plan().lower()
    return lowered.compile(devices=jax.devices()[: cluster.num_devices])


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def like(place: str) -> Any:
    """What to give to `restore` for a state in a place."""
    if place == "one device":
        return jax.eval_shape(TRAINING.start)
    return jax.tree.map(np.zeros_like, trained(2)) if place == "numpy" else compiled(place)


@cache
def placed(place: str) -> Any:
    """The state after two steps, in a place."""
    if place in ("one device", "numpy"):
        return jax.tree.map(np.asarray, trained(2)) if place == "numpy" else trained(2)
    return compiled(place).place(trained(2), _batch(0), jax.random.key(0))[0]


@cache
def trained(num_steps: int) -> Any:
    """The state after some steps of a plain run on one device."""
    state, step = TRAINING.start(), jax.jit(TRAINING.step())
    for number in range(num_steps):
        state, _ = step(state, _batch(number), jax.random.key(number))
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of the same state under each plan."""
    folders = {place: tmp_path_factory.mktemp("saved") for place in PLACES}
    for place, folder in folders.items():
        with al.Checkpoints(folder) as checkpoints:
            checkpoints.save(2, placed(place), plan=getattr(like(place), "plan", None))
    return folders


@pytest.mark.parametrize(("source", "target"), [*product(PLACES, PLACES)])
def test_a_state_is_the_same_to_the_bit_under_another_plan(source: str, target: str, saved: dict[str, Path]) -> None:
    step, state = al.Checkpoints(saved[source]).restore(like(target))
    wanted = placed(target)
    assert step == 2 and jax.tree.structure(state) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert bits(got) == bits(want)
        assert getattr(got, "sharding", None) == getattr(want, "sharding", None)


@pytest.mark.parametrize(("source", "target"), [("hybrid", "pipeline_4"), ("pipeline_4", "megatron on 4")])
def test_training_goes_on_under_another_plan(source: str, target: str, saved: dict[str, Path]) -> None:
    number, state = al.Checkpoints(saved[source]).restore(compiled(target))
    for later in range(number, TRAINING.num_steps):
        state, metrics = compiled(target)(state, _batch(later), jax.random.key(later))
    plain, step = trained(2), jax.jit(TRAINING.step())
    for later in range(2, TRAINING.num_steps):
        plain, wanted = step(plain, _batch(later), jax.random.key(later))
    assert_same((state, metrics), (plain, wanted))


def test_the_plan_is_kept_beside_the_state(saved: dict[str, Path]) -> None:
    checkpoints = al.Checkpoints(saved["hybrid"])
    assert checkpoints.plan() == compiled("hybrid").plan == al.Plan.load(saved["hybrid"] / "2" / "plan.json")
    assert al.Checkpoints(saved["numpy"]).plan(2) is None
    with pytest.raises(CheckpointError, match="no checkpoint of step 7"):
        checkpoints.plan(7)


def test_plain_orbax_reads_a_checkpoint(saved: dict[str, Path]) -> None:
    with ocp.PyTreeCheckpointer() as reader, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about shardings, which it finds for itself
        kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in _names(trained(2))}
        read = reader.restore(saved["hybrid"] / "2", restore_args=kinds)
    leaves = jax.tree.leaves(trained(2))
    assert [read[name].tobytes() for name in _names(trained(2))] == [np.asarray(leaf).tobytes() for leaf in leaves]


def _names(state: Any) -> list[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def test_several_arguments_are_one_state(tmp_path: Path) -> None:
    def step(weights: Any, moments: Any, *, x: Any) -> Any:
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)
        moments = 0.9 * moments + grads
        return weights - moments, moments

    args = jnp.ones((8, 8)), jnp.full((8, 8), 2.0)
    parallel = al.parallelize(step, cluster=eager_cluster(), planner=PLANNERS["data_parallel"], batch_argnums="x")
    compiled = parallel.compiled(*args, x=jnp.ones((32, 8)))
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, args)
        _, (weights, moments) = checkpoints.restore(compiled, argument=(0, 1))
        assert (weights == 1).all() and (moments == 2).all() and len(weights.sharding.device_set) == 8
        with pytest.raises(CheckpointError, match="no argument 'y'"):
            checkpoints.restore(compiled, argument="y")


# --- one after the other ----------------------------------------------------------------------------------------------


def test_the_newest_are_kept(tmp_path: Path) -> None:
    with al.Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest is None and checkpoints.steps == ()
        for step in (1, 9, 10, 12):
            checkpoints.save(step, numbered(step))
        checkpoints.wait()
        assert checkpoints.steps == (10, 12) and checkpoints.latest == 12
        assert bits(checkpoints.restore(numbered(0), step=10)[1]["array 1"]) == bits(numbered(10)["array 1"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "12"]
    with al.Checkpoints(tmp_path, keep=None, asynchronous=False) as checkpoints:
        checkpoints.save(13, numbered(13))
        assert checkpoints.steps == (10, 12, 13)


def test_a_step_that_is_there_is_replaced(tmp_path: Path) -> None:
    with al.Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, numbered(1))
        checkpoints.save(1, numbered(7))
    assert al.Checkpoints(tmp_path).restore(numbered(0))[1]["array 0"].tolist() == numbered(7)["array 0"].tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_one_that_was_to_be_replaced_is_kept_until_it_is(tmp_path: Path) -> None:
    """As a run leaves it that ends while it writes the same step again."""
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, numbered(4))
    (tmp_path / "4").rename(tmp_path / "4.replaced")
    (tmp_path / "4.unfinished-0").mkdir()
    with al.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == (4,)
        assert checkpoints.restore(numbered(0))[1]["array 0"].tolist() == numbered(4)["array 0"].tolist()
        checkpoints.save(5, numbered(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]


def test_going_back_keeps_what_is_saved_then(tmp_path: Path) -> None:
    with al.Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (np.int64(10), jnp.int32(20), 15, 16):
            checkpoints.save(step, numbered(int(step)))
            checkpoints.wait()
            assert checkpoints.latest == step and len(checkpoints.steps) <= 2
    assert checkpoints.steps == (15, 16)
    assert [path.name for path in checkpoints.set_aside] == ["20.aside"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "thesis.tex").write_text("the only copy")
    (tmp_path / "notes.replaced").mkdir()
    checkpoints = al.Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match="is no checkpoint of alpa_lite, so that it is not replaced"):
        checkpoints.save(1, numbered(1))
    with checkpoints:
        checkpoints.save(2, numbered(2))
        checkpoints.save(3, numbered(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3", "notes.replaced"]
    assert (tmp_path / "1" / "thesis.tex").read_text() == "the only copy"


def test_what_was_saved_is_let_go(tmp_path: Path) -> None:
    """Else a state would stay on the devices beside the one after it."""
    array = jnp.arange(1000.0)
    watched = weakref.ref(array)
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": array})
        checkpoints.wait()
        del array
        gc.collect()
        assert watched() is None


def test_reading_changes_nothing(tmp_path: Path) -> None:
    with al.Checkpoints(tmp_path, keep=None) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, numbered(step))
    (tmp_path / "3.unfinished-0").mkdir()  # somebody is writing this
    _flip(tmp_path / "2" / "leaves.json")
    before = sorted(path for path in tmp_path.rglob("*"))
    with al.Checkpoints(tmp_path, keep=1) as checkpoints, pytest.warns(UnusableFileWarning):
        checkpoints.restore(numbered(0))
    assert before == sorted(path for path in tmp_path.rglob("*"))


def test_a_state_may_be_overwritten_while_it_is_written(tmp_path: Path) -> None:
    """`donate_argnums`, and NumPy arrays that are changed in place."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state, counts = jnp.zeros(2**20), np.zeros(2**20)
    with al.Checkpoints(tmp_path, keep=None) as checkpoints:
        for number in range(4):
            checkpoints.save(number, {"x": state, "counts": counts})
            for _ in range(5):
                state = step(state)
                counts += 1
        for number in range(4):
            _, read = checkpoints.restore({"x": state, "counts": counts}, step=number)
            assert (read["x"] == 5 * number).all() and (read["counts"] == 5 * number).all()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


FILES = (LIST, "leaves.json", "plan.json", "manifest.ocdbt", "_METADATA", "ocdbt.process_0/d/*", "d/*")
DAMAGES: dict[str, Callable[[Path], None]] = {"flip": _flip, "cut": _cut, "empty": _empty, "lose": Path.unlink}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("two")
    with al.Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, numbered(step), plan=compiled("fsdp").plan)
    return folder


@pytest.mark.parametrize(("file", "damage"), [*product(FILES, DAMAGES)])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(
    file: str, damage: str, two: Path, tmp_path: Path
) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    DAMAGES[damage](max((tmp_path / "2").glob(file), key=lambda path: path.stat().st_size))
    checkpoints = al.Checkpoints(tmp_path)
    if (file, damage) == (LIST, "lose"):
        assert checkpoints.steps == (1,)  # as if it had not been finished
        return
    with pytest.raises(CheckpointError, match=r"step 2 .*damaged.* Leave step= out"):
        checkpoints.restore(numbered(0), step=2)
    with pytest.warns(UnusableFileWarning, match=r"step 2 .*damaged: .*Step 1 is used"):
        step, state = checkpoints.restore(numbered(0))
    assert step == 1 and all(bits(state[name]) == bits(numbered(1)[name]) for name in state)
    assert checkpoints.steps == (1,)
    with checkpoints:
        checkpoints.save(2, numbered(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "2.damaged"]
    assert bits(checkpoints.restore(numbered(0))[1]["array 2"]) == bits(numbered(3)["array 2"])


def test_a_damaged_plan_is_passed_over_or_refused(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    checkpoints = al.Checkpoints(tmp_path)
    _flip(tmp_path / "2" / "plan.json")
    with pytest.raises(CheckpointError, match=r"plan of step 2 .*cannot be read"):
        checkpoints.plan(2)
    with pytest.warns(UnusableFileWarning, match=r"plan of step 2 .*That of step 1 is used"):
        assert checkpoints.plan() == compiled("fsdp").plan
    _empty(tmp_path / "1" / "plan.json")
    with pytest.raises(CheckpointError, match=r"plan of step 2 .*plan of step 1 "):
        checkpoints.plan()


def test_where_all_are_damaged_each_is_named(two: Path, tmp_path: Path) -> None:
    shutil.copytree(two, tmp_path, dirs_exist_ok=True)
    for step in (1, 2):
        _flip(tmp_path / str(step) / "leaves.json")
    with pytest.raises(CheckpointError, match=r"step 2 .*leaves.json is not what was written.*step 1 .*No other"):
        al.Checkpoints(tmp_path).restore(numbered(0))


def _single(step: int) -> Any:
    """A state of one array: where one of several fails, Orbax drops the others, and Python complains now and then."""
    return {"array": numbered(step)["array 2"]}


def test_what_is_not_looked_at_may_still_be_found(tmp_path: Path) -> None:
    """Without the checksums, damage is found where it cannot be read."""
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, _single(2))
    _empty(tmp_path / "2" / "manifest.ocdbt")
    with pytest.raises(CheckpointError, match=r"step 2 .*cannot be restored"):
        checkpoints.restore(_single(0), verify=False)


def test_a_folder_without_checkpoints_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "notes").write_text("not a checkpoint")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"no checkpoint in .*there are: none"):
            al.Checkpoints(folder).restore(numbered(0))
    with pytest.raises(CheckpointError, match="Mount the bucket"):
        al.Checkpoints("gs://bucket/run")
    with pytest.raises(CheckpointError, match="keep=0"):
        al.Checkpoints(tmp_path, keep=0)


@pytest.mark.parametrize("step", [-1, 1.5, True, float("nan"), "3", None])
def test_steps_are_whole_numbers(step: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step="):
        al.Checkpoints(tmp_path).save(step, {})


@pytest.fixture
def little_room() -> Iterator[None]:
    """Files may have 200 kB: writing fails in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_a_sentence_and_the_checkpoint_before_stays(
    asynchronous: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoints = al.Checkpoints(tmp_path, asynchronous=asynchronous)
    checkpoints.save(1, _single(1))
    checkpoints.wait()
    request.getfixturevalue("little_room")
    for step in (1, 3):
        with pytest.raises(CheckpointError, match=rf"step {step} .*could not be written: .*newest one is of step 1"):
            checkpoints.save(step, _single(9))
            checkpoints.wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "alpa_lite_writer.1.json"]
    assert bits(checkpoints.restore(_single(0))[1]["array"]) == bits(_single(1)["array"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with checkpoints:
        checkpoints.save(3, _single(3))
    assert checkpoints.latest == 3


def test_a_failed_save_does_not_hide_why_training_ended(tmp_path: Path, little_room: None) -> None:
    del little_room
    with (
        pytest.warns(UnusableFileWarning, match="could not be written"),
        pytest.raises(ZeroDivisionError),
        al.Checkpoints(tmp_path) as checkpoints,
    ):
        checkpoints.save(1, _single(1))
        _ = 1 / 0


def test_without_orbax_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "alpa_lite.runtime.checkpoint.saved_arrays", raising=False)
    monkeypatch.delattr("alpa_lite.runtime.checkpoint.saved_arrays", raising=False)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(CheckpointError, match="Install it: pip install orbax-checkpoint"):
        al.Checkpoints(tmp_path).save(1, numbered(1))


# --- runs that are killed ---------------------------------------------------------------------------------------------


class Runs:
    """A run that saves all the time, killed and started again; `saving_for_ever` says what each one finds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.last, self.kills_while_writing, self.seconds = folder, -1, 0, 0.5
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("saving_for_ever.py")), str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def once(self, saves: float) -> None:
        """Start a run, check what it restores, and kill it after so many times two saves, however long they take."""
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        number = int(self._line("pid"))
        restored = int(self._line("restored"))
        assert restored >= self.last, f"step {self.last} was complete, but step {restored} was restored"
        for _ in range(int(saves)):
            began = time.monotonic()
            self.last = int(self._line("complete"))
            self.seconds = time.monotonic() - began
        time.sleep(saves % 1 * self.seconds)
        os.kill(number, signal.SIGKILL)
        while (line := self._read())[0] != "ended":
            assert line[0] == "complete", line
            self.last = int(line[1])
        self.kills_while_writing += any(".unfinished-" in path.name for path in self.folder.iterdir())

    def _read(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split(maxsplit=1)

    def _line(self, kind: str) -> str:
        found = self._read()
        assert found[0] == kind, found
        return found[1]

    def end(self) -> None:
        """No more runs."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(20)


@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=pytest.mark.long)])
def test_a_run_that_is_killed_goes_on_from_the_last_complete_checkpoint(kills: int, tmp_path: Path) -> None:
    runs, chance = Runs(tmp_path), random.Random(kills)
    try:
        for _ in range(kills):
            runs.once(chance.uniform(0, 4))
    finally:
        runs.end()
    assert runs.last > kills and runs.kills_while_writing >= kills / 8


# --- SIGTERM ----------------------------------------------------------------------------------------------------------


def test_sigterm_asks_to_stop_and_is_handled_as_before_afterwards(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with al.Checkpoints(tmp_path) as checkpoints:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert not checkpoints.stop_requested(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert checkpoints.stop_requested(2) and checkpoints.stop_requested(3)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_is_listened_for_in_the_main_thread(tmp_path: Path) -> None:
    raised: list[Exception] = []

    def ask() -> None:
        try:
            al.Checkpoints(tmp_path).stop_requested(1)
        except CheckpointError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


# --- large states -----------------------------------------------------------------------------------------------------


def test_large_arrays_are_written_in_parts(tmp_path: Path) -> None:
    """A device that needs an eighth of an array must not make its process read all of it."""
    array = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 10 * 2**20), np.uint8))
    place = NamedSharding(Mesh(np.array(jax.devices()[:1]), "x"), PartitionSpec())
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": jax.device_put(array, place)})
        spread = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
        _, state = checkpoints.restore({"x": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=spread)})
    assert (state["x"] == array).all() and state["x"].sharding == spread
    assert len(list((tmp_path / "1" / "ocdbt.process_0" / "d").iterdir())) > 2
