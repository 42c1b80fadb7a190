"""Checkpoints of a training run: saved under one plan, restored under any other, or under none.

    with Checkpoints("run") as checkpoints:
        checkpoints.save(step, state, plan=train_step.last_plan)          returns when the state may be overwritten
        step, state = checkpoints.restore(compiled)                       the newest that is undamaged

What is in a folder: `saved_arrays`. A checkpoint is there when its list of checksums is, which is written last.
"""

from __future__ import annotations

import json
import operator
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from alpa_lite.errors import AlpaLiteError, CheckpointError, PlanError, UnusableFileWarning
from alpa_lite.plan import Plan
from alpa_lite.runtime.checksums import LIST, damage
from alpa_lite.runtime.function import CompiledFunction
from alpa_lite.runtime.job.agreement import agreed_data, everywhere, meet
from alpa_lite.runtime.job.ending import leaving
from alpa_lite.runtime.job.launched import summary
from alpa_lite.runtime.job.stopping import Stopping
from alpa_lite.runtime.job.trouble import agreed_trouble
from alpa_lite.runtime.saved_leaves import (
    Wanted,
    check_fit,
    leaves_from_json,
    leaves_to_json,
    stored,
    wanted,
)

_DAMAGED, _REPLACED = ".damaged", ".replaced"
_SHOWN = 3

Argument = int | str
"""An argument of a step, by position or keyword."""


class Checkpoints:
    """The checkpoints in a folder that all processes of a job see; all of them make the same calls.

    Nothing is written or removed before the first `save`, so that others may read along.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = 3, asynchronous: bool = True) -> None:
        """Checkpoints in `folder`.

        keep           how many are kept; None for all
        asynchronous   whether `save` returns as soon as the state may be overwritten, and writes while training goes on
        """
        if "://" in str(folder):
            raise CheckpointError(
                f"{folder} was given, but a folder of a file system is needed that all processes share. Mount the "
                "bucket (gcsfuse, for instance) and give the folder."
            )
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep} was given; give the number of checkpoints to keep, or None for all.")
        self.folder = Path(folder).absolute()
        self._keep, self._asynchronous = keep, asynchronous
        self._writer: Any = None
        self._pending: int | None = None
        self._damaged: set[int] = set()
        self._stopping = Stopping()

    def __enter__(self) -> Checkpoints:
        """Itself."""
        return self

    def __exit__(self, kind: object, exception: BaseException | None, *rest: object) -> None:
        """`close`. Where the block failed, a save that failed too is told in a warning."""
        if exception is None:
            self.close()
            return
        try:
            with leaving(summary(exception)):
                self.close()
        except AlpaLiteError as error:
            warnings.warn(str(error), UnusableFileWarning, stacklevel=2)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that are there, rising; without those that were found to be damaged."""
        return tuple(sorted(self._there() - self._damaged))

    @property
    def latest(self) -> int | None:
        """The newest step that is there; None where there is none yet."""
        return max(self.steps, default=None)

    def save(self, step: int, state: Any, *, plan: Plan | None = None) -> None:
        """Save a state, a pytree of arrays and numbers; `plan` is kept beside it. One of the same step is replaced.

        A save that is still running is waited for, and raises here if it fails.

        Raises:
            CheckpointError: the state holds something else, or could not be written; earlier checkpoints stay.
        """
        number = _whole(step)
        content = stored(state)
        beside = {"leaves.json": leaves_to_json(content.leaves)}
        if plan is not None:
            beside["plan.json"] = plan.to_json()
        self.wait()
        store, problem = _store(), None
        self._make_way(number)
        self._pending = number
        try:
            self._writer = self._writer or store.Writer()
            self._writer.start(self.folder / f"{number}", store.Content(arrays=content.arrays, beside=beside))
        except Exception as error:
            problem = error
        self._raise_if_failed(number, problem)
        if not self._asynchronous:
            self.wait()

    def restore(
        self,
        like: Any,
        *,
        step: int | None = None,
        argument: Argument | Sequence[Argument] = 0,
        partial: bool = False,
        verify: bool = True,
    ) -> tuple[int, Any]:
        """A step and its state, each array in its place; devices get the parts that they need, whoever saved them.

        Args:
            like: a compiled step, whose `argument` (or several: then a tuple of them) the state is; or a pytree like
                the state, of arrays and `jax.ShapeDtypeStruct`s, with shardings or without.
            step: which one; default: the newest. Then one that is damaged is passed over, with a warning.
            argument: see `like`.
            partial: whether `like` may be a part of the state that was saved.
            verify: whether all checksums are compared first, which reads every file once.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another state.
        """
        self.wait()
        leaves, structure = _wanted(like, argument)
        there = agreed_data([step] if step in self._there() else [] if step is not None else self.steps[::-1])
        if not there:
            raise CheckpointError(self._none(step))
        refused: list[str] = []
        for number in there:
            problem = self._problem(number) if verify else ""
            if not problem:
                for sentence in refused:
                    warnings.warn(f"{sentence} Step {number} is used.", UnusableFileWarning, stacklevel=2)
                return number, jax.tree.unflatten(structure, self._read(number, leaves, partial=partial))
            refused.append(f"The checkpoint of step {number} in {self.folder} is damaged: {problem}.")
            if step is None:
                self._damaged.add(number)
        left = "No other is left" if step is None else "Leave step= out to have the newest one that is undamaged"
        raise CheckpointError(f"{' '.join(refused)} {left}.")

    def plan(self, step: int | None = None) -> Plan | None:
        """The plan under which a step was saved; None where none was given.

        step: default: the newest. Then a plan that cannot be read is passed over, with a warning.

        Raises:
            CheckpointError: there is no such step, or the plan cannot be read.
        """
        there = [number for number in self.steps[::-1] if step in (None, number)]
        if not there:
            raise CheckpointError(self._none(step))
        refused: list[str] = []
        for number in there:
            path = self._path(number) / "plan.json"
            try:
                plan = Plan.load(path) if path.exists() else None
            except PlanError as error:
                refused.append(f"The plan of step {number} in {self.folder} cannot be read: {error}")
                continue
            for sentence in refused:
                warnings.warn(f"{sentence} That of step {number} is used.", UnusableFileWarning, stacklevel=2)
            return plan
        raise CheckpointError(" ".join(refused))

    def wait(self) -> None:
        """Wait for a save that is running. Raises `CheckpointError` if it fails; earlier checkpoints stay."""
        if self._pending is None:
            return
        step, problem = self._pending, None
        try:
            self._writer.finish()
        except Exception as error:
            problem = error
        self._raise_if_failed(step, problem)
        self._pending = None
        self._remove(f"{step}{_REPLACED}")
        if self._keep is not None:
            others = [each for each in self.steps if each != step]
            self._remove(*map(str, others[: len(others) - self._keep + 1]))
        _together()

    def stop_requested(self, step: int) -> bool:
        """Whether the job was told by SIGTERM to end, after `step`; the same on all processes.

        From the first call on the signal no longer ends the process. Ask once per step; save and leave when it is true.
        """
        return self._stopping.requested(step)

    def close(self) -> None:
        """Wait for a save that is running, and end what runs in the background."""
        self._stopping.close()
        try:
            self.wait()
        finally:
            self._drop_writer()

    def _there(self) -> set[int]:
        """The steps that are complete, damaged or not."""
        names = (path.parent.name.removesuffix(_REPLACED) for path in self.folder.glob(f"*/{LIST}"))
        return {int(name) for name in names if name.isdecimal()}

    def _path(self, step: int) -> Path:
        path = self.folder / str(step)
        return path if path.exists() else self.folder / f"{step}{_REPLACED}"

    def _read(self, step: int, leaves: Sequence[Wanted], *, partial: bool) -> list[Any]:
        folder, problem, state = self._path(step), None, list[Any]()
        try:
            saved = leaves_from_json(json.loads((folder / "leaves.json").read_text(encoding="utf-8")))
            check_fit(leaves, saved, partial=partial)
            read = _store().read_arrays(folder, leaves, saved)
            state = [each.restored(read.get(each.name)) for each in leaves]
        except Exception as error:
            problem = error
        if trouble := agreed_trouble(problem):
            raise CheckpointError(
                f"The checkpoint of step {step} in {self.folder} cannot be restored: {trouble.reason}."
            ) from problem
        return state

    def _problem(self, step: int) -> str:
        """What is wrong with a checkpoint; the same on all processes, each of which looks at a part."""
        mine = damage(self._path(step), share=jax.process_index(), num_shares=jax.process_count())
        found = [*dict.fromkeys(problem for part in everywhere(mine) for problem in part)]
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return ", ".join(found[:_SHOWN]) + more

    def _none(self, step: int | None) -> str:
        there = ", ".join(map(str, self.steps)) or "none"
        wanted = f"of step {step} " if step is not None else ""
        return (
            f"There is no checkpoint {wanted}in {self.folder}; there are: {there}. Look at `latest` before restoring."
        )

    def _raise_if_failed(self, step: int, problem: Exception | None) -> None:
        """Raise on all processes what went wrong with a save on any of them."""
        if trouble := agreed_trouble(problem):
            raise CheckpointError(f"{self._failed(step, trouble.reason)} {trouble.advice}") from problem

    def _failed(self, step: int, reason: str) -> str:
        """What to say when a save failed. What it wrote is removed, since the disk may be full."""
        self._pending = None
        with suppress(Exception):  # what it says is what went wrong before
            self._drop_writer()
        self._remove_unfinished(step)
        self._bring_back(step)
        kept = f"The newest one is of step {self.latest}" if self.latest is not None else "There is no earlier one"
        return f"The checkpoint of step {step} in {self.folder} could not be written: {reason}. {kept}."

    def _make_way(self, step: int) -> None:
        """Put right what an earlier run left, and make room for a step."""
        refused, problem = None, None
        if jax.process_index() == 0:
            try:
                self._put_right(step)
            except CheckpointError as error:
                refused = str(error)
            except Exception as error:
                problem = error
        self._damaged.clear()
        if refused := agreed_data(refused):
            raise CheckpointError(refused)
        self._raise_if_failed(step, problem)

    def _put_right(self, step: int) -> None:
        """Damaged checkpoints no longer count; one of the same step is kept until the new one is complete."""
        place = self.folder / f"{step}"
        if place.exists() and not (place / LIST).exists():
            raise CheckpointError(
                f"{place} is there and is no checkpoint of alpa_lite, so that it is not replaced. Remove it, or give "
                "another folder."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(f"*{_REPLACED}"):
            if (number := path.name.removesuffix(_REPLACED)).isdecimal():
                self._bring_back(int(number))
        for path in self.folder.glob(f"*{_store().UNFINISHED}*"):
            self._remove(path.name)
        for damaged in self._damaged:
            self._rename(f"{damaged}", f"{damaged}{_DAMAGED}")
        self._rename(f"{step}", f"{step}{_REPLACED}")
        # Were this to fail in Orbax, the others would wait there.
        place.with_name(f"{step}{_store().UNFINISHED}").mkdir()
        place.with_name(f"{step}{_store().UNFINISHED}").rmdir()

    def _bring_back(self, step: int) -> None:
        """What was to be replaced, unless it was."""
        if not (self.folder / f"{step}" / LIST).exists():
            self._rename(f"{step}{_REPLACED}", f"{step}")
        self._remove(f"{step}{_REPLACED}")

    def _remove_unfinished(self, step: int) -> None:
        names = [path.name for path in self.folder.glob(f"{step}{_store().UNFINISHED}*")]
        self._remove(*names, *([] if (self.folder / f"{step}" / LIST).exists() else [f"{step}"]))

    def _rename(self, name: str, other: str) -> None:
        if jax.process_index() == 0 and (self.folder / name).exists():
            self._remove(other)
            (self.folder / name).rename(self.folder / other)

    def _remove(self, *names: str) -> None:
        if jax.process_index() == 0:
            for name in names:
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _whole(step: Any) -> int:
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"step={step!r} was given; give a whole number that is not negative.")
    return number


def _together() -> None:
    """All processes go on when all have come here: what the first one did to the folder is done."""
    meet(range(jax.process_count()))


def _wanted(like: Any, argument: Argument | Sequence[Argument]) -> tuple[list[Wanted], Any]:
    """The leaves to restore, and the pytree that they make up."""
    if not isinstance(like, CompiledFunction):
        return wanted(like), jax.tree.structure(like)
    traced = like.traced
    several = not isinstance(argument, (int, str))
    trees = [jax.tree.unflatten(traced.in_tree, values) for values in (traced.leaves, _shardings(like))]
    asked = [argument] if isinstance(argument, (int, str)) else list(argument)
    try:
        structs, shardings = (tuple(_argument(tree, each) for each in asked) for tree in trees)
    except KeyError as error:
        raise CheckpointError(
            f"argument={argument!r} was given, but {traced.name} has no argument {error}. Give the position or the "
            "keyword of the argument that the state is."
        ) from error
    chosen = structs if several else structs[0]
    return wanted(chosen, jax.tree.leaves(shardings)), jax.tree.structure(chosen)


def _shardings(like: CompiledFunction) -> list[Any]:
    return [like.executor.input_sharding(leaf) for leaf in range(len(like.traced.leaves))]


def _argument(tree: Any, which: Argument) -> Any:
    positional, keywords = tree
    return positional[which] if isinstance(which, int) else keywords[which]


def _store() -> ModuleType:
    """`saved_arrays`, which needs Orbax."""
    try:
        from alpa_lite.runtime import saved_arrays
    except ImportError as error:
        raise CheckpointError(
            f"Checkpoints need Orbax, which cannot be imported ({error}). Install it: pip install orbax-checkpoint"
        ) from error
    return saved_arrays
