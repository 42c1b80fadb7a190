"""A training run that saves all the time and starts again where it was: `python saving_for_ever.py FOLDER`.

Forks a run for each line on its input, and says what the run does: `pid N`, `restored STEP` (-1: nothing was there),
`complete STEP` for each checkpoint, `damaged` and a sentence if one was found to be so.
"""

import os
import sys
import warnings
from pathlib import Path

import jax

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, UnusableFileWarning
from alpa_lite.runtime.checkpoint import saved_arrays
from tests.runtime.checkpoint.saved_states import bits, numbered

jax.config.update("jax_platforms", "cpu")
_IMPORTED = saved_arrays  # before the forks


def say(*words: object) -> None:
    """One line, at once."""
    print(*words, flush=True)


def run(folder: Path) -> None:
    """Restore, compare with what was saved, and save one step after the other."""
    warnings.simplefilter("error", UnusableFileWarning)
    checkpoints, step = al.Checkpoints(folder, keep=2), -1
    if checkpoints.latest is not None:
        step, state = checkpoints.restore(numbered(0))
        wanted = numbered(step)
        assert all(bits(state[name]) == bits(wanted[name]) for name in wanted), f"step {step} is another state"
    say("restored", step)
    while True:
        step += 1
        checkpoints.save(step, numbered(step))
        if step % 2:
            checkpoints.wait()
            say("complete", step)


def main() -> None:
    """Fork for each line."""
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            say("pid", os.getpid())
            try:
                run(Path(sys.argv[1]))
            except (AlpaLiteError, AssertionError, UnusableFileWarning) as error:
                say("damaged", " ".join(str(error).split()))
            os._exit(1)
        os.waitpid(child, 0)
        say("ended")


if __name__ == "__main__":
    main()
