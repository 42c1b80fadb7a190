"""A process of a job that is told to end: `python -m tests.distributed.stops asks|never FOLDER`.

The processes go at different paces, and none waits for another but for what `stop_requested` needs.
"""

from __future__ import annotations

import sys
import time

import jax

import alpa_lite as al


def main(how: str, folder: str) -> None:
    """Ask once per step, if at all, until told to end."""
    me = jax.process_index()
    with al.Checkpoints(folder) as checkpoints:
        for step in range(1, 100_000):
            time.sleep(0.001 if me == 0 else 0.01 + 0.02 * (step % 3))
            if how == "asks" and checkpoints.stop_requested(step):
                print(f"stops after step {step}", flush=True)
                return
            if step == 20:
                print("goes on", flush=True)


if __name__ == "__main__":
    al.initialize()
    main(*sys.argv[1:])
