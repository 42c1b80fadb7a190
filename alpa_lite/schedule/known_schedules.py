"""All schedules of this package, with their default options."""

from alpa_lite.schedule.asynchronous import PipeDream2BWSchedule, PipeDreamSchedule
from alpa_lite.schedule.messages import MessageDriven
from alpa_lite.schedule.ordering import Schedule
from alpa_lite.schedule.orders import (
    EagerOneFOneB,
    GPipe,
    Inference,
    Interleaved1F1B,
    OneFOneB,
    Sequential,
    ZeroBubbleH1,
)
from alpa_lite.schedule.waves import DualPipeV, Wave, ZeroBubbleH2, ZeroBubbleV

SCHEDULES: tuple[Schedule, ...] = (
    Sequential(),
    GPipe(),
    OneFOneB(),
    EagerOneFOneB(),
    Interleaved1F1B(),
    ZeroBubbleH1(),
    ZeroBubbleH2(),
    ZeroBubbleV(),
    DualPipeV(),
    Wave(),
    MessageDriven(),
    PipeDreamSchedule(),
    PipeDream2BWSchedule(),
    Inference(),
)
