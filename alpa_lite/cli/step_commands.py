"""Commands on a user's train step.

`plan` plans it for a cluster, `compare` by several planners, `import` as another program has it; `check` compares it
with `jax.jit` on this machine. `plan` also compares several clusters, and shows the cost of pins.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import alpa_lite as al
from alpa_lite._jax import Tree
from alpa_lite.api.check import check_step
from alpa_lite.api.comparison import compare_planners
from alpa_lite.api.doctor import virtual_environment
from alpa_lite.api.stages import PlannedFunction
from alpa_lite.cli.command import Command, answer, check_writable, complain, positive, run_module, suggests, writing
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.cli.user_files import PinFile, load_example, make_planner, read_pins
from alpa_lite.errors import AlpaLiteError, CheckError, InfeasibleError, PlanError
from alpa_lite.export.targets import TARGETS, target_of_name
from alpa_lite.inspection.text.diff import Candidate, ClusterComparison, PinsCost, varied
from alpa_lite.inspection.text.tables import plan_summary, whole_plan_text
from alpa_lite.planners.by_name import FROM_TEXT, PLANNERS, options_of
from alpa_lite.program.user_shardings import Mode
from alpa_lite.text import read_bytes
from cost_models.cluster import Cluster, known_clusters


@dataclass(frozen=True, kw_only=True)
class _PlanArguments:
    """The planning that a command line asks for: the step with its arguments, and the options."""

    step: Callable[..., Tree]
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]
    planner: al.planners.Planner | al.Plan
    num_microbatches: int | str
    user_shardings: Mode
    cache: bool

    def planned(self, cluster: Cluster | None, planner: al.planners.Planner | al.Plan | None = None) -> PlannedFunction:
        """Plan for a cluster (None: this machine's devices), by the named planner unless another one is given."""
        function = al.parallelize(
            self.step,
            cluster=cluster,
            planner=planner or self.planner,
            num_microbatches=self.num_microbatches,
            user_shardings=self.user_shardings,
            # Ctrl-C stops the search, and the best plan so far is printed and saved as any other.
            on_interrupt="best",
            cache=self.cache,
        )
        return function.trace(*self.args, **self.kwargs).plan()


def run_plan(given: argparse.Namespace) -> int:
    """Run `alpa_lite.plan` and return the exit code. Ctrl-C ends the search with the best plan so far, if any."""
    _check_outputs(given)
    step, args, kwargs = load_example(given.step)
    clusters = _clusters(given)
    asked = _PlanArguments(
        step=step,
        args=args,
        kwargs=kwargs,
        planner=make_planner(given.planner, given.option),
        num_microbatches=given.num_microbatches,
        user_shardings=given.user_shardings,
        cache=not given.no_cache,
    )
    if isinstance(asked.planner, al.Plan) and (len(clusters) > 1 or given.memory or given.bandwidth_scale):
        raise PlanError(
            "A saved plan keeps its own predictions: --memory, --bandwidth-scale and several clusters need a planner. "
            f"Name one of {', '.join(PLANNERS)} as --planner."
        )
    if len(clusters) > 1:
        return _plan_for_each(given, asked, clusters)
    cluster = clusters[0] if clusters else None
    return _plan_one(given, asked, cluster) if given.pins is None else _plan_with_pins(given, asked, cluster)


def _check_outputs(given: argparse.Namespace) -> None:
    """Raise an error for files that cannot be written, before a search that may take minutes."""
    check_writable(given.output)
    if given.export is not None:
        target, path = given.export
        target_of_name(target)
        check_writable(path)


def _plan_one(given: argparse.Namespace, asked: _PlanArguments, cluster: Cluster | None) -> int:
    # The plan may come from the cache on disk; what follows is the same.
    found = asked.planned(cluster)
    plan = found.last_plan
    _save(given, found)
    note = "\nThis plan is from the cache; --no-cache plans anew." if found.cached else ""
    # Tables of a large plan take time, which `--json` does not need.
    text = "" if given.json else f"{whole_plan_text(plan) if given.all else plan}{note}"
    answer(given, text, lambda: {"kind": "plan", **plan_summary(plan), "cached": found.cached})
    return Exit.DONE


def _plan_with_pins(given: argparse.Namespace, asked: _PlanArguments, cluster: Cluster | None) -> int:
    file = read_pins(given.pins)
    pinned_planner = _with_pins(asked.planner, file, given.planner)
    # The free plan first: its traced step is needed to check the pins, and its cost to compare with.
    free = asked.planned(cluster)
    file.check(free.function.step(1).step, axes_of_search=isinstance(asked.planner, al.planners.Auto))
    pinned = asked.planned(free.last_plan.cluster, pinned_planner)
    plan = pinned.last_plan
    _save(given, pinned)
    found = PinsCost(pins=tuple(file.pins), free=free.last_plan, pinned=plan)
    text = "" if given.json else str(found)
    answer(given, text, lambda: {"kind": "pins", **plan_summary(plan), **found.to_json()})
    return Exit.DONE


def _with_pins(planner: al.planners.Planner | al.Plan, file: PinFile, name: str) -> al.planners.Planner:
    """Return the planner with the pins of a file. Raises `PlanError` for a planner that takes no pins."""
    # Checked by class, so that pins are never passed to a planner that would ignore them.
    if isinstance(planner, (al.planners.Auto, al.planners.OnMesh)):
        return replace(planner, pins=file.pins)
    taking = [known for known, kind in PLANNERS.items() if "pins" in options_of(kind)]
    raise PlanError(f"--pins was given, but the planner {name!r} takes none: use {' or '.join(taking)}.")


def _plan_for_each(given: argparse.Namespace, asked: _PlanArguments, clusters: Sequence[Cluster]) -> int:
    for option in ("output", "pins", "dump_passes", "export"):
        if getattr(given, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise PlanError(f"{name} is for one plan, but --cluster was given {len(clusters)} times. Leave one out.")
    candidates, infeasible = list[Candidate](), False
    for cluster in clusters:
        try:
            candidates.append(Candidate(cluster=cluster, plan=asked.planned(cluster).last_plan))
        except AlpaLiteError as error:
            # One cluster without a plan must not hide the results of the others.
            candidates.append(Candidate(cluster=cluster, plan=None, problem=str(error)))
            # The exit code tells a step that fits nowhere from a mistake in its description.
            infeasible |= isinstance(error, InfeasibleError)
    found = ClusterComparison(candidates=tuple(candidates))
    answer(given, found, lambda: {"kind": "clusters", **found.to_json()})
    return Exit.DONE if found.fastest is not None else Exit.INFEASIBLE if infeasible else Exit.ERROR


def _clusters(given: argparse.Namespace) -> list[Cluster]:
    """Return the named clusters with the changes of the options; an empty list means this machine unchanged."""
    changes = {"memory_bytes": given.memory, "bandwidth_scale": given.bandwidth_scale}
    if given.cluster:
        return [varied(al.cluster(name, num_hosts=given.num_hosts), **changes) for name in given.cluster]
    if given.num_hosts is not None:
        raise PlanError("--num-hosts says how many hosts a described cluster has: give --cluster as well.")
    return [varied(al.local_cluster(), **changes)] if any(value is not None for value in changes.values()) else []


def _save(given: argparse.Namespace, found: PlannedFunction) -> None:
    if given.output is not None:
        with writing(given.output):
            found.last_plan.save(given.output)
    if given.dump_passes is not None:
        with writing(given.dump_passes):
            found.dump_passes(given.dump_passes)
    if given.export is not None:
        target, path = given.export
        with writing(path):
            found.last_plan.export(target, path)


def _count_or_auto(text: str) -> int | str:
    # A negative number passes here: planning refuses it, in the words of its own error.
    if text != "auto" and not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f'{text!r} was given; it must be a whole number or "auto"')
    return text if text == "auto" else int(text)


def _export(text: str) -> tuple[str, Path]:
    target, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{text!r} names no file: write TARGET=FILE, such as jax=parallel_train.py")
    return target, Path(path)


def _memory(text: str) -> float:
    try:
        return read_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory: write 40GB, 40GiB or a number") from error


def add_planner(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add `--planner` and `--option`."""
    planner = parser.add_argument(
        "--planner",
        default=default,
        metavar="NAME",
        help=f"{', '.join(PLANNERS)}, or a saved plan (default: {default or 'as decorated, else auto'})",
    )
    suggests(planner, tuple(PLANNERS))
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the planner, e.g. pipeline=4"
    )


def add_microbatches(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add `--num-microbatches`."""
    count = parser.add_argument(
        "--num-microbatches", type=_count_or_auto, default=default, metavar="N", help='a number, or "auto"'
    )
    suggests(count, ("auto",))


STEP_HELP = "or FILE.py:FUNCTION: returns (train_step, args) or (train_step, args, kwargs)"


def _add_clusters(parser: argparse.ArgumentParser) -> None:
    """Add the options that `_clusters` reads."""
    cluster = parser.add_argument(
        "--cluster",
        action="append",
        default=[],
        metavar="NAME[:HOSTS]",
        help="a known cluster or a .json file, with its number of hosts (default: this machine's devices); several are "
        "compared",
    )
    suggests(cluster, known_clusters())
    parser.add_argument("--num-hosts", type=int, metavar="N", help="hosts of each cluster (default: as described)")
    parser.add_argument(
        "--memory", type=_memory, metavar="SIZE", help="what if each device had this much usable memory, as 40GB"
    )
    parser.add_argument(
        "--bandwidth-scale", type=float, metavar="X", help="what if all links had X times their bandwidth, as 0.5"
    )


def _add_user_shardings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--user-shardings",
        choices=get_args(Mode),
        default="hint",
        help="obey the shardings that the step names, list them beside those of the plan, or drop them (default: hint)",
    )


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "step",
        metavar="MODULE:FUNCTION",
        help=STEP_HELP,
    )
    _add_clusters(parser)
    add_planner(parser, "auto")
    parser.add_argument(
        "--pins", type=Path, metavar="FILE.yaml", help="the sharding of some arguments; prints its cost as well"
    )
    add_microbatches(parser, "auto")
    _add_user_shardings(parser)
    _add_outputs(parser)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that `_plan_one` and `_check_outputs` read."""
    parser.add_argument("--no-cache", action="store_true", help="plan anew even if this plan was made before")
    parser.add_argument("--all", action="store_true", help="print all rows of all tables")
    parser.add_argument("--output", type=Path, metavar="PLAN.json", help="save the plan")
    parser.add_argument(
        "--export",
        type=_export,
        metavar="TARGET=FILE",
        help=f"write the plan as another program takes it: {', '.join(TARGETS)}",
    )
    parser.add_argument(
        "--dump-passes", type=Path, metavar="DIR", help="write the program after each pass as text, with their seconds"
    )


PLAN = Command(
    name="plan",
    about="plan a train step for a cluster, or compare clusters",
    example="train.py:example --cluster p3.16xlarge --output plan.json",
    run=run_plan,
    add_arguments=_plan_arguments,
)


def run_compare(given: argparse.Namespace) -> int:
    """Run `alpa_lite.compare` and return the exit code; Ctrl-C ends the search that runs with its best plan so far."""
    planners = [make_planner(name, ()) for name in given.planners]
    step, args, kwargs = load_example(given.step)
    clusters = _clusters(given)
    if len(clusters) > 1:
        raise PlanError(
            f"compare plans for one cluster, but --cluster was given {len(clusters)} times. Leave out all but one; "
            "`alpa-lite plan` compares clusters."
        )
    saved = [name for name, planner in zip(given.planners, planners, strict=True) if isinstance(planner, al.Plan)]
    if saved and (given.memory or given.bandwidth_scale):
        raise PlanError(
            f"{saved[0]} keeps its own predictions: --memory and --bandwidth-scale need planners. Leave them out."
        )
    found = compare_planners(
        step,
        args,
        kwargs,
        planners,
        {
            "cluster": clusters[0] if clusters else None,
            "num_microbatches": given.num_microbatches,
            "user_shardings": given.user_shardings,
            "on_interrupt": "best",
            "cache": not given.no_cache,
        },
    )
    answer(given, found, found.to_json)
    if found.fastest is not None:
        return Exit.DONE
    return Exit.INFEASIBLE if any(each.does_not_fit for each in found.candidates) else Exit.ERROR


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", metavar="MODULE:FUNCTION", help=STEP_HELP)
    planners = parser.add_argument(
        "planners",
        nargs="+",
        metavar="PLANNER",
        help=f"{', '.join(PLANNERS)}, with options as hybrid:pipeline=2:tensor=4; a saved plan; or what "
        f"another program has written, or a file with it, as NAME:TEXT ({', '.join(FROM_TEXT)})",
    )
    suggests(planners, tuple(PLANNERS))
    _add_clusters(parser)
    add_microbatches(parser, "auto")
    _add_user_shardings(parser)
    parser.add_argument("--no-cache", action="store_true", help="plan anew even if these plans were made before")


COMPARE = Command(
    name="compare",
    about="is a configuration good: planners and settings of other trainers, side by side",
    example="train.py:example 'megatron:--tensor-model-parallel-size 8' auto --cluster dgx-h100:8",
    run=run_compare,
    add_arguments=_compare_arguments,
)


def run_import(given: argparse.Namespace) -> int:
    """Run `alpa_lite.plan` by what another program has written, and return the exit code."""
    _check_outputs(given)
    kind = given.kind or _kind_of(given.file)
    if not given.file.is_file():
        raise PlanError(f"There is no file {str(given.file)!r} to import. Give the path of one.")
    planner = FROM_TEXT[kind](str(given.file))
    step, args, kwargs = load_example(given.step)
    clusters = _clusters(given)
    if len(clusters) > 1:
        raise PlanError(
            f"A plan is for one cluster, but --cluster was given {len(clusters)} times. Leave out all but one."
        )
    asked = _PlanArguments(
        step=step,
        args=args,
        kwargs=kwargs,
        planner=planner,
        num_microbatches=given.num_microbatches,
        user_shardings=given.user_shardings,
        cache=not given.no_cache,
    )
    return _plan_one(given, asked, clusters[0] if clusters else None)


_KINDS = {".toml": "torchtitan", ".json": "deepspeed", ".yml": "maxtext", ".yaml": "maxtext", ".sh": "megatron"}


def _kind_of(path: Path) -> str:
    """Return what has written a file, by its ending; programs have endings of many kinds."""
    return _KINDS.get(path.suffix, "compiled")


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="the text of a compiled program, or settings of a trainer"
    )
    parser.add_argument("--step", required=True, metavar="MODULE:FUNCTION", help=STEP_HELP)
    kinds = ", ".join(f"{ending} {kind}" for ending, kind in _KINDS.items())
    parser.add_argument(
        "--as",
        dest="kind",
        choices=tuple(FROM_TEXT),
        help=f"what has written the file (default: by its ending, {kinds}, else compiled)",
    )
    _add_clusters(parser)
    add_microbatches(parser, "auto")
    _add_user_shardings(parser)
    _add_outputs(parser)


IMPORT = Command(
    name="import",
    about="the plan that a compiled program or the settings of a trainer are",
    example="compiled.txt --step train.py:example --cluster dgx-1 --output mine.json",
    run=run_import,
    add_arguments=_import_arguments,
)


def run_check(given: argparse.Namespace) -> int:
    """Run `alpa_lite.check` and return its exit code, which is 0 only if all outputs agree.

    `--devices` runs the command again in a new process, since JAX reads the number of virtual devices when it starts.
    """
    if given.devices is not None:
        # The options are written anew, as a process with other devices must not be started again by its own
        # `--devices`.
        return run_module("alpa_lite.cli", _words_without_devices(given), virtual_environment(given.devices))
    step, args, kwargs = load_example(given.step, decorated=True)
    # Without either option the planner counts that the step was decorated with.
    named = given.planner is not None or given.option
    options = {
        "planner": make_planner(given.planner or "auto", given.option) if named else None,
        "num_microbatches": given.num_microbatches,
        "cluster": given.cluster,
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


def _check_arguments(parser: argparse.ArgumentParser) -> None:
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
    add_arguments=_check_arguments,
)
