"""The schedules: the order in which each processor runs its tasks.

With p equal processors s = 0..p-1, m micro-batches, and tf and tb seconds per forward and backward of a micro-batch:

    Sequential  makespan m*p*(tf+tb) if stages follow each other, one micro-batch in flight     `Sequential`
    GPipe       makespan (m+p-1)*(tf+tb), warm-up m        `GPipe.num_warmup`     (Huang et al., NeurIPS'19)
    1F1B        makespan (m+p-1)*(tf+tb), warm-up p-s-1    `OneFOneB.num_warmup`  (Narayanan et al., SC'21)
    micro-batches in flight on stage s = min(warm-up + 1, m)      `WarmupSchedule.in_flight`
    eager 1F1B  the makespan of 1F1B also where a transfer takes up to (tf+tb)/2, warm-up 2*(p-s-1)
    zero bubble H1, with tb = ti + tw for the gradients of inputs and of weights: makespan
                m*(tf+tb) + (p-1)*(tf+ti-tw) for m >= p and tw <= ti, tf, in flight min(p, m)   `ZeroBubbleH1`
                (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR'24, section 2)
    inference   makespan m*tf + (p-1)*tf, one micro-batch in flight                             `Inference`
    interleaved makespan (m+(p-1)/v)*(tf+tb), warm-up 2*(p-s-1)+(v-1)*p tasks, m a multiple of p, in flight on
                processor s over all its stages min(warm-up + 1, m*v)   `Interleaved1F1B`  (SC'21, section 2.2)
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from alpa_lite.errors import PlanError
from alpa_lite.schedule.ordering import Schedule, check_numbers, num_places
from alpa_lite.schedule.tasks import Task, TaskKind, TaskLists, peak_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupSchedule(Schedule):
    """Base class of schedules with warm-up forwards, alternating forwards and backwards, then the other backwards.

    Micro-batches run in ascending order in both directions (the backwards in GPipe's figure are descending): makespan
    and memory are the same, and gradients are summed in the same order under every schedule.
    """

    @abstractmethod
    def num_warmup(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        """Return the number of forwards that `stage` runs before it alternates."""

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        check_numbers(num_stages, num_microbatches)
        lists: list[tuple[Task, ...]] = []
        for stage in range(num_stages):
            # With fewer micro-batches than warm-up forwards all forwards come first, as in GPipe.
            warmup = min(self.num_warmup(stage, num_stages, num_microbatches), num_microbatches)
            forwards = [Task(stage=stage, microbatch=b, kind=TaskKind.FORWARD) for b in range(num_microbatches)]
            backwards = [Task(stage=stage, microbatch=b, kind=TaskKind.BACKWARD) for b in range(num_microbatches)]
            lists.append(warmed_up(forwards, backwards, warmup))
        return tuple(lists)

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        # Those of the warm-up, and the forward that runs before the first backward frees anything.
        return min(self.num_warmup(stage, num_stages, num_microbatches) + 1, num_microbatches)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sequential(Schedule):
    """Naive model parallelism: a micro-batch runs through all stages, forward and backward, before the next starts.

    Several stages may be placed on one processor. Stages on different processors run at the same time where neither
    reads what the other makes, as the branches of a network do.

    Attributes:
        processors: the processor of each stage, numbered from 0 without gaps; () for one of its own.
    """

    processors: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return "sequential"

    def __str__(self) -> str:
        return f"{self.name} on given devices" if self.processors else self.name

    @property
    def stages_per_processor(self) -> int:
        return max(map(self.processors.count, self.processors), default=1)

    def num_processors(self, num_stages: int) -> int:
        return num_places(self.name, self.processors or range(num_stages), num_stages)

    def processor_of(self, stage: int, num_stages: int) -> int:
        self.num_processors(num_stages)
        return int(self.processors[stage]) if self.processors else stage

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        check_numbers(num_stages, num_microbatches)
        lists: list[list[Task]] = [[] for _ in range(self.num_processors(num_stages))]
        places = [*enumerate(map(int, self.processors) if self.processors else range(num_stages))]
        for b in range(num_microbatches):
            for kind, order in ((TaskKind.FORWARD, places), (TaskKind.BACKWARD, reversed(places))):
                for stage, processor in order:
                    lists[processor].append(Task(stage=stage, microbatch=b, kind=kind))
        return tuple(map(tuple, lists))

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GPipe(WarmupSchedule):
    """All forwards, then all backwards."""

    @property
    def name(self) -> str:
        return "gpipe"

    @property
    def overlaps_transfers(self) -> bool:
        return True

    def num_warmup(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return num_microbatches


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OneFOneB(WarmupSchedule):
    """1F1B: as many warm-up forwards as there are later stages, so that backwards start and free memory earliest."""

    @property
    def name(self) -> str:
        return "1f1b"

    def num_warmup(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        # Micro-batch 0 reaches the last stage while this stage runs one forward for each later stage. More of them
        # would hold more memory, and let no backward start earlier.
        return num_stages - stage - 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EagerOneFOneB(WarmupSchedule):
    """1F1B with twice the warm-up, so that a stage computes another micro-batch during each transfer.

    Under 1F1B the last two stages wait for a transfer in every iteration of the steady state. Zhuang et al., "On
    Optimizing the Communication of Model Parallelism" (MLSys'23), section 4.
    """

    @property
    def name(self) -> str:
        return "eager-1f1b"

    @property
    def overlaps_transfers(self) -> bool:
        return True

    def num_warmup(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        # As many again, one for each transfer that a micro-batch takes on its way to the last stage.
        return 2 * (num_stages - stage - 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved1F1B(Schedule):
    """1F1B on processors with `num_chunks` stages each: a bubble `num_chunks` times smaller, but more transfers.

    A processor runs the forwards of its stages from first to last for p micro-batches at a time, and their backwards
    from last to first; therefore m must be a multiple of p. With one chunk this is 1F1B, for any m.
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (SC'21).
    """

    num_chunks: int = 2

    @property
    def name(self) -> str:
        return "interleaved-1f1b"

    @property
    def stages_per_processor(self) -> int:
        if self.num_chunks < 1:
            raise PlanError(f"Each group of devices needs at least one chunk of the model, not {self.num_chunks}.")
        return self.num_chunks

    def num_warmup(self, processor: int, num_stages: int, num_microbatches: int) -> int:
        """Return the number of forwards that `processor` runs, over all of its stages, before it alternates."""
        p = self.num_processors(num_stages)
        # With chunks a processor first runs all but the last chunk of p micro-batches, whatever its place.
        warmup = 2 * (p - processor - 1) + (self.num_chunks - 1) * p if self.num_chunks > 1 else p - processor - 1
        return min(warmup, num_microbatches * self.num_chunks)

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        p = self.num_processors(num_stages)
        check_numbers(num_stages, num_microbatches)
        if self.num_chunks > 1 and num_microbatches % p:
            raise PlanError(
                f"{self.name} on {p} groups of devices runs {p} micro-batches at a time, so that it cannot run"
                f" {num_microbatches}. Use num_microbatches={max(1, num_microbatches // p) * p} or another multiple"
                f" of {p}."
            )
        return tuple(self._tasks_on(processor, num_stages, num_microbatches) for processor in range(p))

    def _tasks_on(self, processor: int, num_stages: int, num_microbatches: int) -> tuple[Task, ...]:
        p, v = self.num_processors(num_stages), self.num_chunks
        # Micro-batches in groups of p; with one chunk the size of the groups makes no difference.
        groups = [range(b, min(b + p, num_microbatches)) for b in range(0, num_microbatches, p)]
        turns = [(chunk, b) for group in groups for chunk in range(v) for b in group]
        forwards = [Task(stage=c * p + processor, microbatch=b, kind=TaskKind.FORWARD) for c, b in turns]
        # The last chunk comes first in the backward direction.
        backwards = [Task(stage=(v - c - 1) * p + processor, microbatch=b, kind=TaskKind.BACKWARD) for c, b in turns]
        return warmed_up(forwards, backwards, self.num_warmup(processor, num_stages, num_microbatches))

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        # Counted in the list: chunks of one processor have different numbers of warm-up forwards.
        tasks = self._tasks_on(self.processor_of(stage, num_stages), num_stages, num_microbatches)
        return peak_in_flight([task for task in tasks if task.stage == stage])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBubbleH1(Schedule):
    """1F1B with split backward passes: weight gradients, which no other stage needs, fill the bubble.

    Stage s runs the weight gradients of a micro-batch s micro-batches after its input gradients, so that no stage holds
    more micro-batches than the first stage of 1F1B.
    """

    @property
    def name(self) -> str:
        return "zero-bubble-h1"

    def waiting_share(self, postponed: float, num_stages: int, num_microbatches: int) -> float:
        # (tf + ti - tw) / (tf + ti + tw) for as many micro-batches as stages, and tw of at most tf and ti. With fewer
        # micro-batches fewer gradients of weights fill the time in which the first stage waits for its last one.
        filled = min(1.0, (num_microbatches - 1) / max(1, num_stages - 1))
        return max(1 - postponed * (1 + filled), 1 / 3)

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        check_numbers(num_stages, num_microbatches)
        lists: list[tuple[Task, ...]] = []
        # The order of 1F1B, with each backward pass replaced by its input gradients and the weight gradients of an
        # earlier micro-batch: what is postponed at the end fills the time in which stages wait.
        for stage, warm in enumerate(OneFOneB().tasks(num_stages, num_microbatches)):
            tasks: list[Task] = []
            for task in warm:
                if task.kind is TaskKind.FORWARD:
                    tasks.append(task)
                    continue
                tasks.append(replace(task, kind=TaskKind.INPUT_GRADIENT))
                # The first backward passes of a stage have no micro-batch so far behind.
                if task.microbatch >= stage:
                    tasks.append(_weights(stage, task.microbatch - stage))
            late = range(max(0, num_microbatches - stage), num_microbatches)
            lists.append((*tasks, *(_weights(stage, b) for b in late)))
        return tuple(lists)

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        # As 1F1B does, stage s holds p - s micro-batches, and s more whose weight gradients are still to come.
        return min(num_stages, num_microbatches)


def _weights(stage: int, microbatch: int) -> Task:
    return Task(stage=stage, microbatch=microbatch, kind=TaskKind.WEIGHT_GRADIENT)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Inference(Schedule):
    """Forward passes only, one micro-batch after the other, for functions without gradients."""

    @property
    def name(self) -> str:
        return "inference"

    @property
    def overlaps_transfers(self) -> bool:
        return True

    def tasks(self, num_stages: int, num_microbatches: int) -> TaskLists:
        check_numbers(num_stages, num_microbatches)
        return tuple(
            tuple(Task(stage=stage, microbatch=b, kind=TaskKind.FORWARD) for b in range(num_microbatches))
            for stage in range(num_stages)
        )

    def in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return 1


def warmed_up(forwards: Sequence[Task], backwards: Sequence[Task], warmup: int) -> tuple[Task, ...]:
    """Return `warmup` forwards, then forwards and backwards alternating, then the remaining backwards."""
    # After `warmup` forwards the n-th backward follows the forward `warmup + n`.
    steady = [task for pair in zip(forwards[warmup:], backwards, strict=False) for task in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])
