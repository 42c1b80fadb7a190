"""Checkpoints of a training run: saved under one plan, restored under any other, or under none.

    with Checkpoints("run") as checkpoints:
        checkpoints.save(step, state, plan=train_step.last_plan)          returns when the state may be overwritten
        step, state = checkpoints.restore(compiled)                       the newest that is undamaged

`saved_arrays` defines the content of a checkpoint, `checkpoint_folder` which ones a folder holds, and `lease` who may
write.
"""

from __future__ import annotations

import json
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, SupportsIndex

import jax

from alpa_lite._jax import Tree, TreeDef, TreeLeaf
from alpa_lite.errors import AlpaLiteError, CheckpointError, UnusableFileWarning
from alpa_lite.plan.codec import MAX_BYTES
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime.checkpoint.checkpoint_folder import Folder
from alpa_lite.runtime.checkpoint.checksums import damage
from alpa_lite.runtime.checkpoint.disk import TooLargeError, check_size
from alpa_lite.runtime.checkpoint.saved_leaves import (
    Wanted,
    check_files,
    check_fit,
    read_leaves,
    stored,
    wanted,
    write_leaves,
)
from alpa_lite.runtime.execute.function import CompiledFunction
from alpa_lite.runtime.job.activity import busy
from alpa_lite.runtime.job.consensus import Stopping, agreed_data, everywhere, reason_of, shared_error
from alpa_lite.runtime.job.launched import summary
from alpa_lite.runtime.job.shutdown import is_recoverable, leaving
from alpa_lite.text import show_first
from cost_models.checks import excerpt

if TYPE_CHECKING:  # it needs Orbax, which is imported only when a checkpoint is written or read
    from alpa_lite.runtime.checkpoint.saved_arrays import Writer

_SHOWN = 3
_SHOWN_STEPS = 20
_REASON_LETTERS = 300

Argument = int | str
"""An argument of a step, by position or keyword."""


class Checkpoints:
    """The checkpoints in a folder that all processes of a job see; all of them make the same calls.

    Nothing is written or removed before the first `save`, so that others may read concurrently. From then on until
    `close` only this job writes to the folder: another one's `save` is refused.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = 3, asynchronous: bool = True) -> None:
        """Open the checkpoints in `folder`.

        keep           number of checkpoints to keep; None for all
        asynchronous   whether `save` returns as soon as the state may be overwritten, and writes while training goes on
        """
        # `Path` would make a local folder of an address.
        if "://" in str(folder):
            raise CheckpointError(
                f"{excerpt(folder, _REASON_LETTERS)} was given, but a folder of a file system is needed that all "
                "processes share. Mount the bucket (gcsfuse, for instance) and give the folder."
            )
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep} was given; give the number of checkpoints to keep, or None for all.")
        self.folder = Path(folder).absolute()
        self._files = Folder(self.folder)
        self._keep, self._asynchronous = keep, asynchronous
        self._writer: Writer | None = None
        self._pending: int | None = None
        self._unfinished = Path()
        self._last: int | None = None
        self._damaged: set[int] = set()
        self._stopping = Stopping()

    def __enter__(self) -> Checkpoints:
        """Return itself."""
        return self

    def __exit__(self, kind: object, exception: BaseException | None, *rest: object) -> None:
        """Close the checkpoints. If the block failed, a failed save is reported as a warning."""
        if exception is None:
            self.close()
            return
        try:
            # Others may wait for this process while it closes, and should learn that it fails, and why.
            with leaving(summary(exception)):
                self.close()
        except AlpaLiteError as error:
            warnings.warn(str(error), UnusableFileWarning, stacklevel=2)

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the saved steps, rising, without damaged ones and those of abandoned branches.

        When a step is saved, later steps that had been saved before count no longer (`set_aside`).
        """
        return tuple(step for step in self._files.branch() if step not in self._damaged)

    @property
    def latest(self) -> int | None:
        """Return the newest step; None if there is none yet."""
        return max(self.steps, default=None)

    @property
    def set_aside(self) -> tuple[Path, ...]:
        """Return the folders that no longer count: of abandoned branches (`3000.aside`), or damaged (`3000.damaged`).

        They are never removed. One counts again when it is renamed to its step and `steps` holds no lower one that was
        saved later.
        """
        return self._files.set_aside()

    def parent(self, step: int) -> int | None:
        """Return the step that the run which saved `step` had restored or saved before; None: none, or unknown.

        Raises:
            CheckpointError: there is no such step.
        """
        saved = self._files.branch().get(step)
        if saved is None:
            raise CheckpointError(self._none(step))
        return None if saved.record is None else saved.record.parent

    def save(self, step: int, state: Tree, *, plan: Plan | None = None) -> None:
        """Save a state, a pytree of arrays and numbers, together with its `plan`.

        A checkpoint of the same step is replaced; those of later steps are set aside once this one is complete. A save
        that is still running is waited for, and raises here if it fails.

        Raises:
            CheckpointError: the state holds something else, or could not be written, or another job saves into the
                folder; earlier checkpoints stay.
        """
        number = _whole(step)
        # Before anything else, so that a state that cannot be saved disturbs no running save.
        content = stored(state)
        files = {"leaves.json": write_leaves(content.leaves)}
        if plan is not None:
            files["plan.json"] = json.dumps(plan.to_json(), allow_nan=False).encode()
        self.wait()
        store, problem = _store(), None
        unfinished = self._unfinished = self._make_way(number)
        self._pending = number
        try:
            # Its threads are started once, by the first save; a program that only restores has none.
            by_first = is_recoverable() and store.is_on_first(content.arrays.values())
            if self._writer is not None and self._writer.by_first != by_first:
                self._drop_writer()
            writer = self._writer = self._writer or store.Writer(by_first=by_first)
            publish = partial(self._files.publish, unfinished, number)
            with busy("saving a checkpoint"):
                writer.start(unfinished, store.Content(arrays=content.arrays, files=files, publish=publish))
        except Exception as error:
            problem = error
        # Not before all processes are here: one that raised alone would leave the others waiting.
        self._raise_if_failed(number, problem)
        if not self._asynchronous:
            self.wait()

    def restore(
        self,
        like: CompiledFunction | Tree,
        *,
        step: int | None = None,
        argument: Argument | Sequence[Argument] = 0,
        partial: bool = False,
        verify: bool = True,
    ) -> tuple[int, Tree]:
        """Return a step and its state, each array in its sharding; every device reads the blocks that it needs.

        Args:
            like: a compiled step, whose `argument` (or several: then a tuple of them) the state is; or a pytree like
                the state, of arrays and `jax.ShapeDtypeStruct`s, with shardings or without.
            step: which step; default: the newest. Then a damaged one is skipped, with a warning.
            argument: see `like`.
            partial: whether `like` may be a part of the state that was saved.
            verify: whether all checksums are compared first, which reads every file once.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another state.
        """
        self.wait()
        leaves, structure = _wanted(like, argument)
        requested = [step] if step in self._files.branch() else []
        # The first process's view counts: on a network file system others may see a folder late.
        there = agreed_data(self.steps[::-1] if step is None else requested)
        if not there:
            raise CheckpointError(self._none(step))
        refused: list[str] = []
        # The newest first, until one is undamaged.
        for number in there:
            problem = self._problem(number, verify=verify)
            if not problem:
                for sentence in refused[:_SHOWN]:
                    warnings.warn(f"{sentence} Step {number} is used.", UnusableFileWarning, stacklevel=2)
                state = jax.tree.unflatten(structure, self._read(number, leaves, partial=partial))
                # The next save names it as its parent, by which the branches of a folder are told apart.
                self._last = number
                return number, state
            refused.append(f"The checkpoint of step {number} in {self._where} is damaged: {problem}.")
            if step is None:
                # It is set aside by the next save; a step that was requested by its number stays as it is.
                self._damaged.add(number)
        left = "No other is left" if step is None else "Leave step= out to have the newest one that is undamaged"
        raise CheckpointError(f"{_some(refused)} {left}.")

    def plan(self, step: int | None = None) -> Plan | None:
        """Return the plan under which a step was saved; None if none was given.

        step: default: the newest. Then a plan that cannot be read is skipped, with a warning.

        Raises:
            CheckpointError: there is no such step, or the plan cannot be read.
        """
        there = [each for number, each in reversed(self._files.branch().items()) if self._is_asked(number, step)]
        if not there:
            raise CheckpointError(self._none(step))
        refused: list[str] = []
        for each in there:
            try:
                plan = _plan(each.path / "plan.json")
            except (OSError, ValueError) as error:
                reason = excerpt(error, _REASON_LETTERS)
                refused.append(f"The plan of step {each.number} in {self._where} cannot be read: {reason}")
                continue
            for sentence in refused[:_SHOWN]:
                warnings.warn(f"{sentence} That of step {each.number} is used.", UnusableFileWarning, stacklevel=2)
            return plan
        raise CheckpointError(_some(refused))

    def wait(self) -> None:
        """Wait for a running save: it is on disk then, and survives a loss of power.

        Raises `CheckpointError` if it failed; earlier checkpoints stay.
        """
        if self._pending is None:
            return
        step, problem = self._pending, None
        try:
            with busy("saving a checkpoint"):
                assert self._writer is not None, "a save is pending"
                self._writer.finish()
        except Exception as error:
            problem = error
        self._raise_if_failed(step, problem)
        # Only a save that is complete on all processes becomes the parent of the next one.
        self._pending, self._last = None, step
        self._on_first(lambda: self._files.settle(step, self._keep, self._damaged))

    def stop_requested(self, step: int) -> bool:
        """Return True if SIGTERM told the job to end after `step`; the same on all processes.

        From the first call on the signal no longer ends the process. Call this once per step; save and exit when it is
        true.
        """
        return self._stopping.requested(step)

    def close(self) -> None:
        """Wait for a running save, end the background threads, and let other jobs save here."""
        self._stopping.close()
        try:
            self.wait()
        finally:
            self._drop_writer()
            # Last, as a save that still runs writes under it.
            self._files.lease.give_back()

    @property
    def _where(self) -> str:
        return excerpt(self.folder, _REASON_LETTERS)

    def _is_asked(self, number: int, step: int | None) -> bool:
        return number == step if step is not None else number not in self._damaged

    def _read(self, step: int, leaves: Sequence[Wanted], *, partial: bool) -> list[TreeLeaf]:
        problem, state = None, list[TreeLeaf]()
        try:
            folder = self._files.branch()[step].path
            saved = read_leaves(folder / "leaves.json")
            check_fit(leaves, saved, partial=partial)
            with busy("restoring a checkpoint"):
                read = _store().read_arrays(folder, leaves, saved)
            state = [each.restored(read.get(each.name)) for each in leaves]
        except Exception as error:
            problem = error
        # An error counts only here: a process that raised before would leave the others waiting for it.
        if failure := shared_error(problem):
            raise CheckpointError(
                f"The checkpoint of step {step} in {self._where} cannot be restored: {failure.reason}."
            ) from problem
        return state

    def _problem(self, step: int, *, verify: bool) -> str:
        """Return the damage of a checkpoint in words; the same on all processes, each of which checks a part."""
        with busy("checking a checkpoint"):
            mine = self._damage(step, verify)
        problems = [*dict.fromkeys(problem for part in everywhere(mine) for problem in part)]
        return show_first(problems, _SHOWN)

    def _damage(self, step: int, verify: bool) -> list[str]:
        """Return the damage in this process's part: first of sizes, as reading the contents might take days."""
        there = self._files.branch().get(step)
        if there is None:
            return ["it is no longer there"]
        if there.record is not None and there.record.step != step:
            return [f"it was saved as step {there.record.step}, and its folder was renamed"]
        try:
            saved = read_leaves(there.path / "leaves.json")
        except CheckpointError as error:
            is_small = not isinstance(error.__cause__, TooLargeError)
            # The checksum tells a changed file from one of a later version; a huge one is not read for that.
            changed = damage(there.path, names=("leaves.json",)) if verify and is_small else []
            return changed or [excerpt(reason_of(error), _REASON_LETTERS)]
        try:
            check_files(there.path, saved)
        except (OSError, ValueError) as error:
            return [excerpt(error, _REASON_LETTERS)]
        return damage(there.path, share=jax.process_index(), num_shares=jax.process_count()) if verify else []

    def _none(self, step: int | None) -> str:
        steps = self.steps
        more = f"{len(steps) - _SHOWN_STEPS} more, " if len(steps) > _SHOWN_STEPS else ""
        there = more + ", ".join(map(str, steps[-_SHOWN_STEPS:])) or "none"
        wanted = f"of step {excerpt(step)} " if step is not None else ""
        return (
            f"There is no checkpoint {wanted}in {self._where}; there are: {there}. Look at `latest` before restoring."
        )

    def _raise_if_failed(self, step: int, problem: Exception | None) -> None:
        """Raise on all processes an error that a save had on any of them."""
        if failure := shared_error(problem):
            raise CheckpointError(f"{self._failed(step, failure.reason)} {failure.advice}") from problem

    def _failed(self, step: int, reason: str) -> str:
        """Return the message of a failed save. Its files are removed, since the disk may be full."""
        self._pending = None
        with suppress(Exception):  # it repeats the error that is being handled
            self._drop_writer()
        with suppress(Exception):  # retried before the next save
            if jax.process_index() == 0:
                # Also what other processes have written: they have all come to the end of the save.
                self._files.give_up(self._unfinished)
        newest = f"The newest one is of step {self.latest}" if self.latest is not None else "There is no earlier one"
        return f"The checkpoint of step {step} in {self._where} could not be written: {reason}. {newest}."

    def _make_way(self, step: int) -> Path:
        """Clean up after an earlier run, and make the folder to write a step into."""
        parent = (
            self._last if self._last is not None else max((each for each in self.steps if each < step), default=None)
        )
        made = self._on_first(lambda: str(self._files.prepare(step, parent, self._damaged)))
        self._raise_if_failed(step, made.problem)
        # `prepare` has renamed them, so that they are no steps of the folder any more.
        self._damaged.clear()
        assert made.value is not None, "the first process returned the folder, or all of them raised"
        return Path(made.value)

    def _on_first(self, action: Callable[[], str | None]) -> _Done:
        """Run an action on the first process. Its refusal (`CheckpointError`) is raised on all of them."""
        value, refused, problem = None, None, None
        if jax.process_index() == 0:
            try:
                value = action()
            except CheckpointError as error:
                refused = str(error)
            except Exception as error:
                problem = error
        # As text: the other processes have not looked at the folder, and raise the same sentence.
        value, refused = agreed_data([value, refused])
        if refused:
            raise CheckpointError(refused)
        return _Done(value=value, problem=problem)

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """The result of the first process, and the error of this one."""

    value: str | None
    problem: Exception | None


def _plan(path: Path) -> Plan | None:
    """Return the plan in a file, if it exists. Raises OSError or ValueError if the file is unsafe to open as a plan."""
    if not os.path.lexists(path):
        return None
    check_size(path, MAX_BYTES)
    return Plan.load(path)


def _some(sentences: Sequence[str]) -> str:
    more = f" So it is with {len(sentences) - _SHOWN} others." if len(sentences) > _SHOWN else ""
    return " ".join(sentences[:_SHOWN]) + more


def _whole(step: SupportsIndex) -> int:
    try:
        # To Python a bool is an integer, but it is no step.
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(f"step={excerpt(repr(step))} was given; give a whole number that is not negative.")
    return number


def _wanted(like: CompiledFunction | Tree, argument: Argument | Sequence[Argument]) -> tuple[list[Wanted], TreeDef]:
    """Return the leaves to restore, and the structure of their pytree."""
    if not isinstance(like, CompiledFunction):
        return wanted(like), jax.tree.structure(like)
    traced = like.traced
    several = not isinstance(argument, (int, str))
    # Shapes and shardings in the structure of the arguments: one path selects from both.
    trees = [jax.tree.unflatten(traced.inputs.tree, traced.inputs.leaves), like.input_shardings()]
    arguments = [argument] if isinstance(argument, (int, str)) else list(argument)
    try:
        structs, shardings = (tuple(_argument(tree, each) for each in arguments) for tree in trees)
    except KeyError as error:
        raise CheckpointError(
            f"argument={argument!r} was given, but {traced.name} has no argument {error}. Give the position or the "
            "keyword of the argument that the state is."
        ) from error
    chosen = structs if several else structs[0]
    return wanted(chosen, jax.tree.leaves(shardings)), jax.tree.structure(chosen)


def _argument(tree: Tree, which: Argument) -> Tree:
    positional, keywords = tree
    return positional[which] if isinstance(which, int) else keywords[which]


def _store() -> ModuleType:
    """Return the module `saved_arrays`, which needs Orbax."""
    try:
        from alpa_lite.runtime.checkpoint import saved_arrays
    except ImportError as error:
        raise CheckpointError(
            f"Checkpoints need Orbax, which cannot be imported ({error}). Install it: pip install orbax-checkpoint"
        ) from error
    return saved_arrays
