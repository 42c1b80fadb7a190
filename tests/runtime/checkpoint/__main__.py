"""Long runs: ``python -m tests.runtime.checkpoint hostile --count 20000 --seed 0``.

    hostile      changed checkpoints are refused or give what was saved (`hostile.py`)
    kills        a run that saves all the time is killed and goes on (`saving_for_ever.py`)
    saves        so many saves in one process: memory, descriptors, threads
    power-loss   all that may be left after a loss of power (`power_loss.py`)

Prints what was tried, what came of it and what was lost; the exit code is 1 where something was.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax

from alpa_lite.runtime.checkpoint import lease


def hostile(work: Path, count: int, seed: int) -> bool:
    """See the module."""
    from tests.runtime.checkpoint import hostile as trials

    trials.run(work, 1, seed)
    (work / "more").mkdir()
    before = trials.peak_bytes()
    report = trials.run(work / "more", count, seed, progress=True)
    more = (trials.peak_bytes() - before) / 1e6
    print(f"{count} tried: {dict(report.counts)}; slowest {report.slowest:.2f} s ({report.slow}), {more:.0f} MB more")
    print("\n".join(report.lost))
    return not report.lost


def kills(work: Path, count: int, seed: int) -> bool:
    """See the module."""
    from tests.runtime.checkpoint.test_checkpoints import Runs

    runs, chance = Runs(work), random.Random(seed)
    try:
        for _ in range(count):
            runs.once(chance.uniform(0, 4))
    finally:
        runs.end()
    print(f"{count} kills, {runs.kills_while_writing} while a checkpoint was written, none lost; last step {runs.last}")
    return True


def saves(work: Path, count: int, seed: int) -> bool:
    """See the module."""
    import numpy as np

    import alpa_lite as al

    def use() -> tuple[int, int, int]:
        status = Path("/proc/self/status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return resident, len(os.listdir("/proc/self/fd")), threading.active_count()

    began = time.monotonic()
    with al.Checkpoints(work, keep=3) as checkpoints:
        for step in range(1, count + 1):
            checkpoints.save(step, {"x": np.full(1000, step + seed), "step": step})
            if step in (1, 10, 100, 500) or step % 1000 == 0:
                checkpoints.wait()
                kib, files, threads = use()
                seconds = time.monotonic() - began
                print(
                    f"{step} saves, {seconds:.0f} s: {kib / 1024:.1f} MiB, {files} descriptors, {threads} threads",
                    flush=True,
                )
    return checkpoints.steps == (count - 2, count - 1, count)


def power_loss(work: Path, count: int, seed: int) -> bool:
    """See the module."""
    from tests.runtime.checkpoint.test_durable import RUNS, replay

    del count, seed
    lease.EXPIRY_SECONDS = 0.0
    for name in RUNS:
        (work / name).mkdir()
        print(f"{name}: {replay(name, work / name)} states that may be left, none lost", flush=True)
    return True


def main() -> int:
    """Run what the command line asks for."""
    jax.config.update("jax_platforms", "cpu")
    runs = {"hostile": hostile, "kills": kills, "saves": saves, "power-loss": power_loss}
    parser = argparse.ArgumentParser(prog="python -m tests.runtime.checkpoint")
    parser.add_argument("run", choices=runs)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        return 0 if runs[given.run](Path(work), given.count, given.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
