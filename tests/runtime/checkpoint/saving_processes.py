"""One of two processes of two devices each that save and restore a state: `saving_processes.py PORT ID FOLDER FAILS`.

Some arrays lie on all devices, some on those of one process, as the stages of a pipeline do. Prints a JSON object.

FAILS: the process that gets no room on its disk for the second checkpoint, after which more goes wrong; -1: none.
"""

import faulthandler
import json
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import alpa_lite as al
from alpa_lite.errors import CheckpointError
from alpa_lite.runtime.checkpoint import disk
from tests.runtime.checkpoint.saved_states import ROWS, global_values

READ = "/tensorstore/kvstore/file/bytes_read"


def placements() -> list[dict[str, NamedSharding]]:
    """Two ways to place the arrays: over all devices, on the first process, on the second; and the other way round."""
    devices = np.array(jax.devices())
    everywhere, first, second = (Mesh(part, "x") for part in (devices, devices[:2], devices[2:]))

    def place(mesh: Mesh, *spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec))

    return [
        {
            "everywhere": place(everywhere, "x"),
            "first": place(first, "x"),
            "second": place(second, None, "x"),
            "copies": place(everywhere),
            "keys": place(second, "x"),
        },
        {
            "everywhere": place(second, None, "x"),
            "first": place(everywhere, "x"),
            "second": place(first),
            "copies": place(first, "x"),
            "keys": place(everywhere, "x"),
        },
    ]


def make(name: str, sharding: NamedSharding) -> jax.Array:
    """An array of the state, in its place."""
    value = global_values()[name]
    if name == "keys":
        return jax.jit(lambda: jax.random.split(jax.random.key(7), ROWS), out_shardings=sharding)()
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)


def is_right(name: str, array: jax.Array) -> bool:
    """Whether the parts on this process's devices are those of the whole."""
    data = jax.random.key_data(array) if name == "keys" else array
    return all(np.array_equal(np.asarray(s.data), global_values()[name][s.index]) for s in data.addressable_shards)


def main() -> None:
    """Join the other process, and do what is wanted."""
    port, number, folder, fails = sys.argv[1:]
    faulthandler.dump_traceback_later(100, exit=True)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number))
    found = save_and_restore(folder) if fails == "-1" else fail(folder, number == fails)
    print(json.dumps(found))


def no_folder(path: Path) -> None:
    """As a file system that says no."""
    raise FileExistsError(17, "File exists", str(path))


def fail(folder: str, here: bool) -> dict[str, object]:
    """What goes wrong on one of the processes is told on all, and saving goes on afterwards."""
    state = {name: make(name, sharding) for name, sharding in placements()[0].items()}
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in state.items()}
    checkpoints, begun, found = al.Checkpoints(folder), time.perf_counter(), dict[str, object]()
    plan = al.Plan.load(checkpoints.folder.parent / "plan.json")
    checkpoints.save(1, state, plan=plan)
    checkpoints.wait()

    def told(what: str, *calls: Callable[[], object]) -> None:
        try:
            for call in calls:
                call()
        except CheckpointError as error:
            found[what] = str(error)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    told("no room", lambda: checkpoints.save(2, state), checkpoints.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)

    make_folder = disk.make_folder
    if jax.process_index() == 0:
        disk.make_folder = no_folder
    told("no folder", lambda: checkpoints.save(2, state), checkpoints.wait)
    disk.make_folder = make_folder
    multihost_utils.sync_global_devices("failed")  # the first process removes what it began once all have been told
    found["left"] = sorted(path.name for path in checkpoints.folder.iterdir())
    multihost_utils.sync_global_devices("listed")  # the first process begins the next one once both have looked
    checkpoints.save(2, state, plan=plan)
    checkpoints.wait()
    multihost_utils.sync_global_devices("saved")
    if here:
        for path in (checkpoints.folder / "2").rglob("d/*"):
            path.write_bytes(b"")
        beside = checkpoints.folder / "2" / "plan.json"
        beside.write_text(beside.read_text()[:-9])
    multihost_utils.sync_global_devices("damaged")
    told("plan", lambda: checkpoints.plan(2))
    told("cannot be read", lambda: checkpoints.restore(like, verify=False))
    told("damaged", lambda: checkpoints.restore(like, step=2))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found["plan of the one before"] = checkpoints.plan() == plan
        found["used"] = checkpoints.restore(like)[0]
    found["warned"] = [str(each.message) for each in warned]
    return {**found, "seconds": time.perf_counter() - begun}


def save_and_restore(folder: str) -> dict[str, object]:
    """Save under the first placement, restore under both, and save what was restored."""
    first, second = placements()
    state = {name: make(name, sharding) for name, sharding in first.items()}
    state |= {"numbers": np.arange(3), "epoch": 5, "own": jnp.arange(5)}  # each process has an array of its own
    found: dict[str, object] = {}
    with al.Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state)
        for way, shardings in (("same", first), ("other", second)):
            like = {
                name: jax.ShapeDtypeStruct(state[name].shape, state[name].dtype, sharding=sharding)
                for name, sharding in shardings.items()
            }
            before = _bytes_read()
            step, restored = checkpoints.restore(
                like | {"numbers": np.zeros(3, int), "epoch": 0, "own": jnp.zeros(5, int)}, verify=False
            )
            found[f"{way}: bytes"] = _bytes_read() - before
            found[f"{way}: right"] = all(is_right(name, restored[name]) for name in like)
            found[f"{way}: placed"] = all(restored[name].sharding == shardings[name] for name in like)
            found[f"{way}: host"] = restored["numbers"].tolist(), restored["epoch"], restored["own"].tolist(), step
        checkpoints.save(4, {**restored, "epoch": 6})
        checkpoints.wait()
        found["steps"] = checkpoints.steps
        damaged = next(path for path in sorted((checkpoints.folder / "4").rglob("d/*")))
        if jax.process_index() == 0:
            damaged.write_bytes(damaged.read_bytes()[:-1])
        multihost_utils.sync_global_devices("damaged")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found["after damage"] = checkpoints.restore({"epoch": 0}, partial=True)[0]
        found["told"] = [str(each.message) for each in told]
        checkpoints.save(5, state)
    multihost_utils.sync_global_devices("closed")  # the first process has the lease, and gives it back as it closes
    found["left"] = sorted(path.name for path in checkpoints.folder.iterdir())
    return found


def _bytes_read() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics(READ)
    return sum(value["value"] for metric in metrics for value in metric["values"])


if __name__ == "__main__":
    main()
