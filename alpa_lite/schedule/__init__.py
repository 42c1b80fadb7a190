"""Pipeline schedules: the order in which each processor runs the tasks of its stages.

Comes in: the numbers of stages and micro-batches, and for a simulation the seconds of each task and transfer.
Goes out: one ordered task list per processor (`orders`), which is then validated, linearized and simulated (`clock`).
Read `tasks` first, then `orders`.

A schedule is a frozen value that only orders tasks; their durations are arguments of `simulate`. A processor is the
group of devices that a stage runs on. There is one per stage, unless the schedule gives each processor v stages (the
chunks of an interleaved pipeline): `processor_of` says where each of p*v stages runs, by default stage i on i mod p.

    tasks             tasks, task lists, and the peak memory that a list needs
    ordering          the base class of schedules
    orders            1F1B and those like it, with chunks, and for inference
    list_scheduling   orders that follow from times and memory
    waves             schedules made so, above all those that go back and forth over the processors
    asynchronous      orders in which weights are updated several times per step
    servers           the order of workers and servers of a parameter server
    messages          no fixed order: what has arrived is computed
    known_schedules   all of them
    synthesis         the shortest order that is found for given times, with a bound
    clock             validation, linearization and simulation of task lists
"""

from alpa_lite.schedule import asynchronous as _asynchronous
from alpa_lite.schedule.asynchronous import AsynchronousSchedule as AsynchronousSchedule
from alpa_lite.schedule.clock import Span as Span
from alpa_lite.schedule.clock import Timeline as Timeline
from alpa_lite.schedule.clock import linearize as linearize
from alpa_lite.schedule.clock import simulate as simulate
from alpa_lite.schedule.clock import validate as validate
from alpa_lite.schedule.known_schedules import SCHEDULES as SCHEDULES
from alpa_lite.schedule.messages import MessageDriven as MessageDriven
from alpa_lite.schedule.ordering import Schedule as Schedule
from alpa_lite.schedule.ordering import schedule_named as schedule_named
from alpa_lite.schedule.orders import EagerOneFOneB as EagerOneFOneB
from alpa_lite.schedule.orders import GPipe as GPipe
from alpa_lite.schedule.orders import Inference as Inference
from alpa_lite.schedule.orders import Interleaved1F1B as Interleaved1F1B
from alpa_lite.schedule.orders import OneFOneB as OneFOneB
from alpa_lite.schedule.orders import Sequential as Sequential
from alpa_lite.schedule.orders import WarmupSchedule as WarmupSchedule
from alpa_lite.schedule.orders import ZeroBubbleH1 as ZeroBubbleH1
from alpa_lite.schedule.servers import ServerSchedule as ServerSchedule
from alpa_lite.schedule.synthesis import Synthesised as Synthesised
from alpa_lite.schedule.tasks import Task as Task
from alpa_lite.schedule.tasks import TaskKind as TaskKind
from alpa_lite.schedule.tasks import TaskLists as TaskLists
from alpa_lite.schedule.tasks import kinds_of as kinds_of
from alpa_lite.schedule.tasks import passes_of as passes_of
from alpa_lite.schedule.tasks import peak_held as peak_held
from alpa_lite.schedule.tasks import peak_in_flight as peak_in_flight
from alpa_lite.schedule.tasks import processors_of as processors_of
from alpa_lite.schedule.tasks import splits_backward as splits_backward
from alpa_lite.schedule.waves import DualPipeV as DualPipeV
from alpa_lite.schedule.waves import ListSchedule as ListSchedule
from alpa_lite.schedule.waves import Wave as Wave
from alpa_lite.schedule.waves import ZeroBubbleH2 as ZeroBubbleH2
from alpa_lite.schedule.waves import ZeroBubbleV as ZeroBubbleV

# Their planners have these names in `alpa_lite.planners`; a class has a name of its own.
PipeDream = _asynchronous.PipeDreamSchedule
"""1F1B in which every micro-batch is a mini-batch with an update of its own; no stage waits for another's update."""
PipeDream2BW = _asynchronous.PipeDream2BWSchedule
"""1F1B with an update for every group of micro-batches, whose weights lack exactly one update on all stages."""
