"""The base class of schedules, and schedules by name."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from inspect import isabstract
from typing import cast

from alpa_lite.errors import PlanError
from alpa_lite.schedule.tasks import MOST_MICROBATCHES, TaskLists, peak_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(ABC):
    """An order of the tasks of a pipeline, for any number of stages and micro-batches."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the schedule in plans and on the command line."""

    @property
    def stages_per_processor(self) -> int:
        """The number of stages that share one processor."""
        return 1

    @property
    def overlaps_transfers(self) -> bool:
        """Whether stages work on other micro-batches during a transfer, for any number of micro-batches."""
        return False

    def waiting_share(self, postponed: float, num_stages: int, num_microbatches: int) -> float:
        """Return the share of the waiting under 1F1B at the beginning and at the end that remains.

        With p equal stages of t seconds the makespan is (m + share*(p-1)) * t; see the module.

        postponed: the share of both passes that are gradients of weights.
        """
        del postponed, num_stages, num_microbatches
        return 1.0

    def microbatches_per_update(self, num_stages: int) -> int:
        """Return the number of micro-batches of a stage that one update of its weights follows; 0: all of a step."""
        del num_stages
        return 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether micro-batches may run with weights that lack some of the updates before them."""
        return False

    def most_stale(self, num_stages: int) -> int | None:
        """Return the most updates that the weights of a micro-batch can lack; None if there is no limit."""
        del num_stages
        return 0

    def replicas(self, num_stages: int) -> tuple[range, ...]:
        """Return the groups of equal stages that take micro-batches in turn; mostly there are none."""
        del num_stages
        return ()

    def replicas_of(self, stage: int, num_stages: int) -> range:
        """Return the group of a stage: mostly that is the stage alone."""
        return next((group for group in self.replicas(num_stages) if stage in group), range(stage, stage + 1))

    def copies(self, num_parts: int) -> tuple[int, ...]:
        """Return how many equal stages run each of so many parts of the model, which mostly is one."""
        return (1,) * num_parts

    def loss_stage(self, num_stages: int) -> int:
        """Return the (first) stage that computes the loss, from which backward passes begin."""
        return self.replicas_of(num_stages - 1, num_stages).start

    def num_processors(self, num_stages: int) -> int:
        """Return the number of processors for `num_stages` stages.

        Raises PlanError if `num_stages` is not a positive multiple of `stages_per_processor`.
        """
        if num_stages < 1 or num_stages % self.stages_per_processor:
            raise PlanError(
                f"{self.name} runs {self.stages_per_processor} stages per group of devices, which {num_stages} stages"
                f" are not. Ask for a multiple of {self.stages_per_processor}."
            )
        return num_stages // self.stages_per_processor

    def processor_of(self, stage: int, num_stages: int) -> int:
        """Return the processor on which a stage runs: round the processors, unless a schedule says otherwise."""
        return stage % self.num_processors(num_stages)

    @abstractmethod
    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        """Return the ordered tasks of each processor. Raises PlanError for numbers that the schedule cannot run."""

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """Return the largest number of micro-batches whose activations `stage` (from 0) holds at one time.

        It is counted in the list of its processor; schedules with a formula need no list.
        """
        tasks = self.tasks(num_stages, num_microbatches)[self.processor_of(stage, num_stages)]
        return peak_in_flight([task for task in tasks if task.stage == stage])

    def __str__(self) -> str:
        """Return text like `interleaved-1f1b(num_chunks=2)`."""
        options = ", ".join(f"{key}={value}" for key, value in asdict(self).items())
        return f"{self.name}({options})" if options else self.name

    def to_json(self) -> dict[str, object]:
        """Return a JSON-serialisable description, the input of `Schedule.from_json`."""
        return {"name": self.name, **asdict(self)}

    @staticmethod
    def from_json(data: Mapping[str, object]) -> "Schedule":
        """Return the schedule of `to_json`; raise PlanError for an unknown name or option, or another type of value."""
        # Defaults stand for options that are not in the data, and tell the types of those that are.
        default = schedule_named(str(data.get("name")))
        if unknown := data.keys() - default.to_json().keys():
            raise PlanError(f"The schedule {default.name!r} has no option named {', '.join(sorted(unknown))}.")
        options = {key: value for key, value in data.items() if key != "name"}
        for key, value in options.items():
            wanted = getattr(default, key)
            if isinstance(wanted, tuple):
                options[key] = _numbers(default.name, key, value)
            # Compare exact types: `isinstance` would accept a bool where a number is needed.
            elif type(value) is not type(wanted):
                raise PlanError(f"The option {key} of the schedule {default.name!r} is {value!r}; give a number.")
        return replace(default, **options)


def num_places(name: str, processors: Sequence[int], num_stages: int) -> int:
    """Return the number of processors that the stages of a schedule are given, one for each stage.

    Raises PlanError for other numbers of stages, and for processors that are not numbered from 0 without gaps.
    """
    if len(processors) != num_stages or num_stages < 1:
        raise PlanError(
            f"{name} was made for {len(processors)} stages, and {num_stages} are to be run. Give one processor for "
            "each stage."
        )
    if {*processors} != {*range(len({*processors}))}:
        raise PlanError(f"{name} needs processors numbered from 0 without gaps, not processors={tuple(processors)}.")
    return len({*processors})


def check_numbers(num_stages: int, num_microbatches: int) -> None:
    """Raise `PlanError` for numbers of stages and micro-batches that no schedule runs."""
    if num_stages < 1 or num_microbatches < 1:
        raise PlanError(f"A pipeline needs stages and micro-batches, not {num_stages} and {num_microbatches}.")
    # Before any task is made: a number far too large would fill the memory first.
    if num_stages * num_microbatches > MOST_MICROBATCHES:
        raise PlanError(
            f"num_microbatches={num_microbatches} in {num_stages} stage(s) was asked for; a step runs at most"
            f" {MOST_MICROBATCHES} micro-batches, those of all stages together. Use num_microbatches="
            f"{max(1, MOST_MICROBATCHES // num_stages)} or fewer."
        )


def _numbers(schedule: str, option: str, value: object) -> tuple[int | float, ...]:
    """Return the numbers of a list. Raises PlanError for anything else."""
    given = cast("list[object]", value) if isinstance(value, (list, tuple)) else []
    numbers = tuple(each for each in given if isinstance(each, (int, float)) and not isinstance(each, bool))
    if len(numbers) < len(given) or not isinstance(value, (list, tuple)):
        raise PlanError(f"The option {option} of the schedule {schedule!r} is {value!r}; give a list of numbers.")
    return numbers


def schedule_named(name: str) -> Schedule:
    """Return the schedule of this name with default options: one of this package, or one that the user defined.

    Raises PlanError if there is no schedule of this name.
    """
    # Found by its class, so that a schedule of the user needs no registration; those of this package come first.
    known = sorted(_subclasses(Schedule), key=lambda of: not _is_own(of))
    schedules = [of() for of in known]
    found = next((schedule for schedule in schedules if schedule.name == name), None)
    if found is None:
        names = ", ".join(sorted({schedule.name for schedule in schedules if _is_own(type(schedule))}))
        raise PlanError(
            f"There is no schedule named {name!r}. Choose one of: {names}; or import the module that defines it first, "
            "in a class whose options have defaults."
        )
    return found


def _is_own(of: type[Schedule]) -> bool:
    return of.__module__.startswith(f"{__package__}.")


def _subclasses(of: type[Schedule]) -> Iterator[type[Schedule]]:
    """Yield the concrete subclasses that can be created without arguments, the latest first.

    Running a notebook cell again defines the same class again, and the latest definition must take precedence.
    """
    for subclass in reversed(of.__subclasses__()):
        yield from _subclasses(subclass)
        needed = [f for f in fields(subclass) if f.default is MISSING and f.default_factory is MISSING]
        if not isabstract(subclass) and not needed:
            yield subclass
