"""A job that saves into a folder: `holding.py FOLDER [BEAT EXPIRY]`.

Prints `owner` when it has saved once, or `refused` and why. For each line on its input it saves once more, and says
`saved`, or `refused` and why. Its heartbeat can be made faster.
"""

import itertools
import sys
import warnings

import jax
import numpy as np

import alpa_lite as al
from alpa_lite.errors import CheckpointError
from alpa_lite.runtime.checkpoint import lease

jax.config.update("jax_platforms", "cpu")


def say(*words: object) -> None:
    """One line, at once."""
    print(*words, flush=True)


def main() -> None:
    """Save, and save again."""
    warnings.simplefilter("ignore")
    folder, *seconds = sys.argv[1:]
    if seconds:
        lease.BEAT_SECONDS, lease.EXPIRY_SECONDS = map(float, seconds)
    checkpoints, step = al.Checkpoints(folder, keep=2), 0
    for answer in itertools.chain(["owner"], ("saved" for _ in sys.stdin)):
        step = max(step, checkpoints.latest or 0) + 1
        try:
            checkpoints.save(step, {"x": np.arange(step)})
            checkpoints.wait()
            say(answer, step)
        except CheckpointError as error:
            say("refused", " ".join(str(error).split()))


if __name__ == "__main__":
    main()
