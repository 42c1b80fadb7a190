"""Schedules that go back and forth over the processors, and others that list scheduling makes.

With p equal processors, m micro-batches, and tf, ti and tw seconds per forward, input and weight gradient of all
stages of a processor:

    zero bubble H2   makespan m*(tf+ti+tw) + (p-1)*tf for m >= 2p and equal times; holds 2p-1
                      (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 2)          `ZeroBubbleH2`
    zero bubble V    two stages per processor, there and back: makespan about m*(tf+ti+tw) + (p-1)*tf/2, and no
                     processor holds more than the first one of 1F1B (the same authors, "Pipeline Parallelism with
                     Controllable Memory", NeurIPS'24)                                             `ZeroBubbleV`
    DualPipe V       the same places; a processor runs a forward pass of one way and a backward pass of the other in
                     turn: one micro-batch more than 1F1B (DeepSeek-AI, "DualPipe", 2025)          `DualPipeV`
    wave             2w stages per processor, there and back w times (Liu et al., "Hanayo", SC'23): for m = p the
                     waiting is 2/3 (w = 1) and 4/9 (w = 2) of that under 1F1B                     `Wave`

The last stage of a way and the first one of the way back lie on one processor, so that nothing is sent between them.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

from alpa_lite.errors import PlanError
from alpa_lite.schedule.list_scheduling import StageTimes, Workload, list_scheduled
from alpa_lite.schedule.ordering import Schedule, check_numbers
from alpa_lite.schedule.tasks import Task, TaskKind, TaskLists


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSchedule(Schedule):
    """Base class of schedules whose orders follow from what each processor may hold, by list scheduling.

    Tasks are ordered as if all stages were equal, with a forward pass and both parts of a backward pass that take
    equally long.
    """

    @property
    @abstractmethod
    def splits_backward(self) -> bool:
        """Whether gradients of weights are tasks of their own."""

    @abstractmethod
    def most_held(self, processor: int, num_processors: int) -> int:
        """Return how many micro-batches a processor may hold, counted once per stage."""

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        check_numbers(num_stages, num_microbatches)
        count = self.num_processors(num_stages)
        times = StageTimes(
            forward=(1.0,) * num_stages,
            backward=(2.0,) * num_stages,
            weight=(1.0,) * num_stages if self.splits_backward else (),
        )
        work = Workload(
            processors=tuple(self.processor_of(stage, num_stages) for stage in range(num_stages)),
            num_microbatches=num_microbatches,
            times=times,
            most_held=tuple(self.most_held(processor, count) for processor in range(count)),
        )
        return list_scheduled(work)


def _there_and_back(stage: int, num_processors: int) -> int:
    """Return the processor of a stage, if stages go from the first processor to the last one and back, repeatedly."""
    place = stage % (2 * num_processors)
    return min(place, 2 * num_processors - 1 - place)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBubbleH2(ListSchedule):
    """1F1B with split backward passes and enough micro-batches in flight that no stage waits for its gradients."""

    @property
    def name(self) -> str:
        return "zero-bubble-h2"

    @property
    def splits_backward(self) -> bool:
        return True

    @property
    def overlaps_transfers(self) -> bool:
        return True

    def waiting_share(self, postponed: float, num_stages: int, num_microbatches: int) -> float:
        del num_stages, num_microbatches
        # tf / (tf + ti + tw), for ti of about tf.
        return max((1 - postponed) / 2, 1 / 3)

    def most_held(self, processor: int, num_processors: int) -> int:
        return 2 * num_processors - 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBubbleV(ListSchedule):
    """Two stages per processor, there and back, and split backward passes: hardly any waiting in the memory of 1F1B.

    memory: the activations that a processor may hold, relative to the first processor of 1F1B. With 0.5 about half of
        the waiting of 1F1B is left.
    """

    memory: float = 1.0

    @property
    def name(self) -> str:
        return "zero-bubble-v"

    @property
    def stages_per_processor(self) -> int:
        return 2

    @property
    def splits_backward(self) -> bool:
        return True

    def processor_of(self, stage: int, num_stages: int) -> int:
        return _there_and_back(stage, self.num_processors(num_stages))

    def most_held(self, processor: int, num_processors: int) -> int:
        if not 0 < self.memory <= 2:
            raise PlanError(f"{self.name} holds up to 2 times the activations of 1F1B, not memory={self.memory}.")
        # One more where not all of them fit: the processor that turns needs one of each way.
        return round(2 * num_processors * self.memory) + (self.memory < 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Wave(ListSchedule):
    """Stages go from the first processor to the last one and back, `num_waves` times, so that they wait less.

    num_waves: how often; each processor runs twice as many stages.
    """

    num_waves: int = 1

    @property
    def name(self) -> str:
        return "wave"

    @property
    def stages_per_processor(self) -> int:
        if self.num_waves < 1:
            raise PlanError(f"{self.name} goes back and forth at least once, not num_waves={self.num_waves} times.")
        return 2 * self.num_waves

    @property
    def splits_backward(self) -> bool:
        return False

    def processor_of(self, stage: int, num_stages: int) -> int:
        return _there_and_back(stage, self.num_processors(num_stages))

    def most_held(self, processor: int, num_processors: int) -> int:
        # One more of a stage than 1F1B on each processor: what comes back waits behind what has just begun.
        return num_processors * (self.stages_per_processor + 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DualPipeV(Schedule):
    """Two stages per processor, there and back: a forward pass of one way, then a backward pass of the other, in turn.

    At least twice as many micro-batches as processors. Gradients of weights follow those of inputs at once, except at
    the beginning and at the end, where they fill waiting time.
    """

    @property
    def name(self) -> str:
        return "dualpipe-v"

    @property
    def stages_per_processor(self) -> int:
        return 2

    def processor_of(self, stage: int, num_stages: int) -> int:
        return _there_and_back(stage, self.num_processors(num_stages))

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        check_numbers(num_stages, num_microbatches)
        count = self.num_processors(num_stages)
        if num_microbatches < 2 * count:
            raise PlanError(
                f"{self.name} on {count} groups of devices needs at least {2 * count} micro-batches, and"
                f" {num_microbatches} were asked for. Use num_microbatches={2 * count} or more."
            )
        return tuple(tuple(self._on(n, num_stages, num_microbatches)) for n in range(count))

    def _on(self, processor: int, num_stages: int, num_microbatches: int) -> Iterator[Task]:
        """Yield the tasks of a processor."""
        ways, later = (processor, num_stages - 1 - processor), num_stages // 2 - processor - 1
        turns = processor + 1
        # Forward passes (F), gradients of inputs (I) and of weights (W, the oldest) of the way there (0) and back (1),
        # and how often. Weights are late where the processor would wait.
        phases = (
            ("F0 F0", later),
            ("F0 F1", turns),
            ("I1 W F1", later),
            ("F0 I1 W F1 I0 W", num_microbatches - num_stages + turns),
            ("I1 W F1 I0 W", later),
            ("I1 W I0 W", turns - turns // 2),
            ("I1 I0", turns // 2),
            ("W I0", later),
            ("W", turns),
        )
        kinds = {"F": TaskKind.FORWARD, "I": TaskKind.INPUT_GRADIENT}
        done = {(kind, way): 0 for kind in TaskKind for way in (0, 1)}
        late = deque[Task]()
        for tasks, number in phases:
            for name in tasks.split() * number:
                if name == "W":
                    yield from [late.popleft()] if late else []
                    continue
                kind, way = kinds[name[0]], int(name[1])
                task = Task(stage=ways[way], microbatch=done[kind, way], kind=kind)
                done[kind, way] += 1
                if kind is TaskKind.INPUT_GRADIENT:
                    late.append(replace(task, kind=TaskKind.WEIGHT_GRADIENT))
                yield task
        yield from late
