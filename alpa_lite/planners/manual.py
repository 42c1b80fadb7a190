"""The classic plans that are priced beside the search, with as many micro-batches as somebody would tune them to have.

    the best plan has one micro-batch     each planner decides
    it has m of them                      m, and fewer while that is faster

What takes much longer than the best is given up (`HOPELESS`), and what certainly takes longer is not planned at all
(`Planner.slowdown`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from alpa_lite.errors import AlpaLiteError, without_frames
from alpa_lite.inter_op.bound import least_loop_seconds, least_seconds
from alpa_lite.plan import Plan
from alpa_lite.planners.data_parallel import DataParallel
from alpa_lite.planners.gshard import GShard
from alpa_lite.planners.megatron import Megatron
from alpa_lite.planners.numbers import microbatch_numbers
from alpa_lite.planners.one_weird_trick import OneWeirdTrick
from alpa_lite.planners.pipeline import Pipeline
from alpa_lite.planners.planner import Planner, PlanRequest
from alpa_lite.planners.zero import FSDP, Zero

MANUAL_PLANNERS: tuple[Planner, ...] = (
    DataParallel(),
    Megatron(),
    Zero(stage=2),
    FSDP(),
    Pipeline(num_stages=2),
    Pipeline(num_stages=4),
    OneWeirdTrick(where_it_pays=True),
    GShard(zero=1),
)
"""The classic plans that are always priced beside the search."""

HOPELESS = 1.1
"""Of what takes this many times as long as the best plan no other numbers are tried."""


def manual_plans(
    planners: Sequence[Planner],
    request: PlanRequest,
    best: Plan | None,
    problems: list[AlpaLiteError],
    *,
    too_large: Collection[int] = (),
) -> Iterator[Plan]:
    """Plans of each planner, with about as many micro-batches as the best plan has, if there is one.

    What cannot be planned is noted in `problems`. `too_large`: numbers at which the micro-batches do not fit.
    """

    def planned(planner: Planner, number: int | str) -> Plan | None:
        try:
            with request.progress.during("manual", planner.name):
                return planner.plan(replace(request, advise=False, num_microbatches=number))
        except AlpaLiteError as error:
            problems.append(without_frames(error))
            return None

    if best is None or best.num_microbatches == 1:
        yield from filter(None, (planned(planner, request.num_microbatches) for planner in planners))
        return
    most, numbers = best.num_microbatches, request.microbatch_choices(microbatch_numbers(request.batch_size or 1))
    fewer = [number for number in reversed(numbers) if max(too_large, default=0) < number <= most]
    alike = not (request.cluster.groups or request.cluster.shared_processor)
    of = (request.step_at(1, 0), request.cluster, request.cost_model_for)
    loop, at_best = least_loop_seconds(*of), least_seconds(*of)
    for planner in planners:
        last = math.inf
        for number in fewer:
            waiting = loop * (planner.slowdown(number) - 1) if alike else 0.0
            if at_best + waiting >= best.prediction.step_seconds:
                break
            plan = planned(planner, number)
            if plan is None or plan.prediction.step_seconds >= last:
                break
            yield plan
            last = plan.prediction.step_seconds
            if last > HOPELESS * best.prediction.step_seconds:
                break
