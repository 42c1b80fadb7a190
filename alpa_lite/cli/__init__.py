"""The command line: parse, call one public function, print. `alpa-lite COMMAND --help` tells the options.

plan       plan a train step for a cluster, or compare clusters   alpa_lite.plan                        `planning`
check      does a step by its plan give what jax.jit gives          alpa_lite.check                       `checking`
explain    a saved plan, or why something in it is so             Plan.explain, explain_time, …         `reading`
diff       what changes from one plan to another                  inspection.diff.compare               `reading`
simulate   the timeline of a plan, predicted or measured          LoweredFunction.simulate              `reading`
solve      a file with an intra-op problem                        intra_op.solve_file.solve_file        `solving`
calibrate  measure this machine's devices                         alpa_lite.calibrate                   `machine`
doctor     is this machine ready                                  inspection.doctor.diagnose            `machine`
launch     several processes on this machine                      runtime.job.launch.launch                 `launching`
bench      planners against each other                            benchmarks.bench, in its own process  `benchmark`
demo       plan, train and compare on this machine                benchmarks.demo, in its own process   `benchmark`
completion what a shell needs to complete these                   `completion`
"""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; see `alpa_lite.cli.entry.main`."""
    # The parser of all commands imports planners and JAX, which the version of the package should not wait for.
    if (sys.argv[1:] if argv is None else argv) == ["--version"]:
        from alpa_lite import __version__

        print(f"alpa_lite {__version__}")
        raise SystemExit(0)  # as argparse ends after `--version`
    from alpa_lite.cli import entry

    return entry.main(argv)
