"""Count the floating-point operations of a `pallas_call`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite import _jax
from alpa_lite.errors import RuleError
from alpa_lite.program.equations import plain_params
from alpa_lite.program.ir import Value
from alpa_lite.rules import OpView, Rule, has_rule, opaque_rule, rule_of
from alpa_lite.trace.kernels.kernel_machine import MEMORY, Dependent, KernelCall, KernelMachine
from alpa_lite.trace.kernels.step_numbers import Item, Number, Ref, read_item


class _Work(KernelMachine):
    """Count the floating-point operations of a grid step; of loops whose length varies, of the mean length."""

    def __init__(self, call: KernelCall) -> None:
        super().__init__(call, axis=-1, granule=1)
        self.flops, self.products, self.runs = 0.0, 0.0, 1.0

    def equation(self, eqn: Any, known: Mapping[Any, Item], jaxpr: Any) -> list[Item]:
        """Count an equation, and return its results."""
        if not _jax.inner_jaxprs(eqn) and eqn.primitive.name not in MEMORY:
            work = _rule(eqn)
            self.flops += self.runs * work.flops
            self.products += self.runs * (work.flops if work.work_kind != "elementwise" else 0.0)
        return super().equation(eqn, known, jaxpr)

    def counted(self, runs: float, function: Callable[[], list[Item]]) -> list[Item]:
        """Return the results of a function, whose equations run `runs` times."""
        before, self.runs = self.runs, self.runs * runs
        made = function()
        self.runs = before
        return made

    def cond(self, eqn: Any, items: Sequence[Item]) -> list[Item]:
        """Count the branches as if all that may be taken were equally likely."""
        index, branches = items[0], eqn.params["branches"]
        alone = isinstance(index, Number) and index.only is not None
        return self.counted(1 if alone else 1 / len(branches), lambda: super(_Work, self).cond(eqn, items))

    def scan(self, eqn: Any, items: Sequence[Item]) -> list[Item]:
        """Count the trips of a loop."""
        return self.counted(_jax.params_of(eqn)["length"], lambda: super(_Work, self).scan(eqn, items))

    def while_loop(self, eqn: Any, items: Sequence[Item]) -> list[Item]:
        """Count the mean number of trips of a loop that counts up to a bound, one trip of any other."""
        return self.counted(_mean_trips(eqn, items), lambda: super(_Work, self).while_loop(eqn, items))

    def until_stable(
        self, body: Callable[[Sequence[Item]], tuple[list[Item], list[Item]]], carry: Sequence[Item]
    ) -> tuple[list[Item], list[Item]]:
        """Count the last run of the body alone, which has the bounds of all trips."""
        before = self.flops, self.products

        def again(state: Sequence[Item]) -> tuple[list[Item], list[Item]]:
            self.flops, self.products = before
            return body(state)

        return super().until_stable(again, carry)


def _rule(eqn: Any) -> Rule:
    """Return the rule of an equation on arrays, for its work."""
    values = [
        Value(id=i, shape=tuple(v.aval.shape), dtype=str(v.aval.dtype))
        for i, v in enumerate((*eqn.invars, *eqn.outvars))
    ]
    count = len(eqn.invars)
    name, params = eqn.primitive.name, plain_params(eqn.params)
    view = OpView(primitive=name, operands=tuple(values[:count]), results=tuple(values[count:]), params=params)
    return rule_of(view) if has_rule(name) else opaque_rule(view)


def _mean_trips(eqn: Any, items: Sequence[Item]) -> float:
    condition = _jax.open_jaxpr(eqn.params["cond_jaxpr"])
    num_consts = eqn.params["cond_nconsts"]
    carry = items[num_consts + eqn.params["body_nconsts"] :]
    known: dict[Any, Item] = dict(zip(condition.invars, [*items[:num_consts], *carry], strict=True))
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return 1.0
    start, stop = (read_item(v, known) for v in condition.eqns[0].invars)
    if not isinstance(start, Number) or not isinstance(stop, Number):
        return 1.0
    if start.low is None or start.high is None or stop.low is None or stop.high is None:
        return 1.0
    return max(0.0, (stop.low + stop.high - start.low - start.high) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """The floating-point operations of a whole call, and whether they include products of matrices."""

    flops: float
    has_products: bool


def kernel_work(params: Mapping[str, Any]) -> KernelWork:
    """Return the work of a `pallas_call`: as the kernel estimates it, or counted in its program."""
    call = KernelCall.of(params)
    counted = products = 0.0
    if call is not None:
        work = _Work(call)
        try:
            work.run(call.kernel, [Ref(i) for i in range(len(call.kernel.invars))])
            counted, products = work.flops, work.products
        except (Dependent, RuleError):
            pass
        steps = math.prod(n for n in call.grid if isinstance(n, int))
        counted, products = counted * steps, products * steps
    estimate = params.get("cost_estimate")
    told = float(estimate.flops) if estimate is not None and isinstance(estimate.flops, (int, float)) else None
    return KernelWork(flops=(products or counted) if told is None else told, has_products=products > 0)
