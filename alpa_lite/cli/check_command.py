"""`alpa-lite check`: compare a step that runs by its plan with `jax.jit`, on the devices of this machine."""

from __future__ import annotations

import argparse

from rich.console import Console

from alpa_lite.api.check import check_step
from alpa_lite.api.doctor import virtual_environment
from alpa_lite.cli.command import Command, answer, complain, positive, run_module, suggests
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.cli.plan_command import STEP_HELP, add_microbatches, add_planner, make_planner
from alpa_lite.cli.user_step import load_example
from alpa_lite.errors import CheckError
from alpa_lite.inspection.text.progress_bar import planning_progress
from cost_models.cluster import known_clusters


def run_check(given: argparse.Namespace) -> int:
    """Run `alpa_lite.check` and return its exit code, which is 0 only if all outputs agree.

    `--devices` runs the command again in a new process, since JAX reads the number of virtual devices when it starts.
    """
    if given.devices is not None:
        return run_module("alpa_lite.cli", _words_without_devices(given), virtual_environment(given.devices))
    step, args, kwargs = load_example(given.step, decorated=True)
    # Without either option the planner counts that the step was decorated with.
    named = given.planner is not None or given.option
    with planning_progress(Console(stderr=True, quiet=given.json)) as progress:
        options = {
            "planner": make_planner(given.planner or "auto", given.option) if named else None,
            "num_microbatches": given.num_microbatches,
            "cluster": given.cluster,
            "progress": progress,
            "cache": False if given.no_cache else None,
        }
        try:
            report, problem = check_step(step, args, kwargs, options), None
        except CheckError as error:
            # Without a report there was nothing to compare: an error as any other.
            if error.report is None:
                raise
            report, problem = error.report, error
    answer(given, report, report.to_dict)
    if problem is not None:
        complain(problem)
        return Exit.ERROR
    return Exit.DONE


def _words_without_devices(given: argparse.Namespace) -> list[str]:
    """Return the words of this command line without `--devices`, for the process with virtual devices."""
    words = ["check", given.step, *(word for option in given.option for word in ("--option", option))]
    for name in ("planner", "cluster", "num_microbatches"):
        value = getattr(given, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return [*words, *(["--no-cache"] if given.no_cache else []), *(["--json"] if given.json else [])]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", metavar="MODULE:FUNCTION", help=STEP_HELP)
    cluster = parser.add_argument(
        "--cluster",
        metavar="NAME[:HOSTS]",
        help="a known cluster or a .json file with as many devices as there are here (default: this machine's devices)",
    )
    suggests(cluster, known_clusters())
    add_planner(parser, None)
    add_microbatches(parser, None)
    parser.add_argument("--devices", type=positive, metavar="N", help="run on N virtual CPU devices instead")
    parser.add_argument("--no-cache", action="store_true", help="plan anew even if this plan was made before")


CHECK = Command(
    name="check",
    about="does a step by its plan give what jax.jit gives",
    example="train.py:example --devices 8 --cluster p3.16xlarge --num-microbatches 4",
    run=run_check,
    add_arguments=_arguments,
)
