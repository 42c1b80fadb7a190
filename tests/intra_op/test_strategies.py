"""Ways to run one op: all of them, none twice, each one reachable; what manual plans leave of them; followers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from alpa_lite.intra_op.strategies import (
    FREE_CHOICE,
    AxisRole,
    BatchSplit,
    LeadingOp,
    OpUse,
    Restriction,
    all_specs,
    axis_choices,
    factor_axes,
    follow,
    placements,
    resolutions,
)
from alpa_lite.plan.walk import operand_specs, raw_result_specs
from alpa_lite.program.ir import Value
from alpa_lite.rules import FactorKind, Rule, rule_of
from alpa_lite.rules.op_info import LayoutClass, OpClass
from alpa_lite.rules.registry import OpView
from alpa_lite.sharding.reshard import reshard
from alpa_lite.sharding.specs import Spec, divides

MESHES: list[dict[str, int]] = [{"x": 1}, {"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 3}]


def _values(*shapes: tuple[int, ...]) -> tuple[Value, ...]:
    return tuple(Value(id=i, shape=shape, dtype="float32") for i, shape in enumerate(shapes))


def _rule(primitive: str, operands: Any, results: Any, **params: Any) -> tuple[Rule, Any, Any]:
    inputs, outputs = _values(*operands), _values(*results)
    return rule_of(OpView(primitive=primitive, operands=inputs, results=outputs, params=params)), inputs, outputs


def _class(primitive: str, operands: Any, results: Any, **params: Any) -> OpClass:
    view = OpView(primitive=primitive, operands=_values(*operands), results=_values(*results), params=params)
    rule = rule_of(view)
    return OpClass(rule=rule, layout=LayoutClass(rule=rule), price=object(), view=view)


def _product(b: int = 8, m: int = 12, k: int = 6, n: int = 4) -> tuple[Rule, Any, Any]:
    """``[b, m, k] @ [k, n] -> [b, m, n]``."""
    dims = (((2,), (0,)), ((), ()))
    return _rule(
        "dot_general", [(b, m, k), (k, n)], [(b, m, n)], dimension_numbers=dims, preferred_element_type="float32"
    )


def _batch_factor(rule: Rule) -> frozenset[int]:
    return frozenset(rule.operands[0][0])


def _axis_choices(
    rule: Rule, sizes: dict[str, int], batch: frozenset[int], restriction: Restriction, *, in_loop: bool
) -> list[tuple[int | None, ...]]:
    use = OpUse(batch_factors=batch, in_loop=in_loop)
    return axis_choices(LeadingOp(rule=rule, operands=(), results=(), use=use), sizes, restriction)


def _addition(rule: Rule, operands: tuple[Value, ...], results: tuple[Value, ...]) -> LeadingOp:
    use = OpUse(keep_partial=True)
    return LeadingOp(rule=rule, operands=operands, results=results, use=use, takes_partial=True)


# --- axis choices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_axis_choices_are_all_assignments_of_axes_to_factors_that_divide(sizes: dict[str, int]) -> None:
    rule, _, _ = _product()
    found = _axis_choices(rule, sizes, frozenset(), FREE_CHOICE, in_loop=True)
    expected = {
        combination
        for combination in itertools.product([None, *range(len(rule.sizes))], repeat=len(sizes))
        if all(
            rule.sizes[f] % prod(n for n, c in zip(sizes.values(), combination, strict=True) if c == f) == 0
            for f in set(combination) - {None}
        )
    }
    assert set(found) == expected and len(found) == len(expected)


def test_batch_axes_split_the_batch_and_nothing_else_in_the_loop() -> None:
    rule, _, _ = _product()
    data = Restriction(roles={"x": AxisRole.BATCH})
    (factor,) = _batch_factor(rule)
    choices = _axis_choices(rule, {"x": 4}, _batch_factor(rule), data, in_loop=True)
    assert choices == [(factor,)]
    without = _axis_choices(rule, {"x": 4}, frozenset(), data, in_loop=True)
    assert without == [(None,)]


def test_model_axes_never_split_the_batch() -> None:
    rule, _, _ = _product()
    model = Restriction(roles={"x": AxisRole.MODEL})
    choices = _axis_choices(rule, {"x": 2}, _batch_factor(rule), model, in_loop=True)
    assert {c for (c,) in choices} == {None, *range(len(rule.sizes))} - _batch_factor(rule)


@pytest.mark.parametrize(
    ("split", "free"), [(BatchSplit.NEVER, False), (BatchSplit.MAY, True), (BatchSplit.MUST, True)]
)
def test_batch_axes_split_updates_only_under_zero(split: BatchSplit, free: bool) -> None:
    rule, _, _ = _product()
    zero = Restriction(roles={"x": AxisRole.BATCH}, optimizer=split)
    choices = _axis_choices(rule, {"x": 2}, frozenset(), zero, in_loop=False)
    assert (len(choices) > 1) == free
    assert zero.may_scatter("x") == free and zero.may_scatter("another")


def test_replicas_split_the_batch_and_never_state() -> None:
    rule, _, _ = _product()
    replica = Restriction(roles={"x": AxisRole.REPLICA}, optimizer=BatchSplit.MUST, parameters=BatchSplit.MUST)
    (factor,) = _batch_factor(rule)
    in_loop = _axis_choices(rule, {"x": 4}, _batch_factor(rule), replica, in_loop=True)
    update = _axis_choices(rule, {"x": 4}, frozenset(), replica, in_loop=False)
    assert in_loop == [(factor,)] and update == [(None,)]
    assert not replica.may_scatter("x")


def test_context_splits_positions_and_never_the_batch() -> None:
    rule, _, _ = _product()
    context = Restriction(roles={"x": AxisRole.CONTEXT})
    choices = _axis_choices(rule, {"x": 2}, _batch_factor(rule), context, in_loop=True)
    positions = rule.operands[0][1][0]
    assert (positions,) in choices and (None,) in choices
    assert not {c for (c,) in choices} & _batch_factor(rule)
    # What has no batch holds no positions either.
    assert _axis_choices(rule, {"x": 2}, frozenset(), context, in_loop=True) == [(None,)]


def _heads(b: int = 8, s: int = 12, g: int = 4, d: int = 6) -> tuple[Rule, Any, Any]:
    """Scores ``[b, s, g, d] x [b, t, g, d] -> [b, g, s, t]``."""
    dims = (((3,), (3,)), ((0, 2), (0, 2)))
    return _rule(
        "dot_general", [(b, s, g, d)] * 2, [(b, g, s, s)], dimension_numbers=dims, preferred_element_type="float32"
    )


def test_tensor_axes_split_weights_by_their_dims_and_attention_by_heads() -> None:
    tensor = Restriction(roles={"x": AxisRole.TENSOR})
    rule, _, _ = _product()
    choices = _axis_choices(rule, {"x": 2}, _batch_factor(rule), tensor, in_loop=True)
    of_weight = {f for factors in rule.operands[1] for f in factors}
    assert {c for (c,) in choices} == of_weight, "rows or columns of the weight; nothing else, and not whole"
    scores, _, _ = _heads()
    choices = _axis_choices(scores, {"x": 2}, _batch_factor(scores), tensor, in_loop=True)
    heads = set(scores.operands[0][2])
    assert {c for (c,) in choices} == heads


def test_tensor_axes_that_divide_no_head_are_free_but_for_the_batch() -> None:
    scores, _, _ = _heads(g=3)
    tensor = Restriction(roles={"x": AxisRole.TENSOR})
    choices = _axis_choices(scores, {"x": 2}, _batch_factor(scores), tensor, in_loop=True)
    assert (None,) in choices and not {c for (c,) in choices} & _batch_factor(scores)


def test_expert_axes_split_the_batch_or_the_experts_that_weights_share_with_tokens() -> None:
    expert = Restriction(roles={"x": AxisRole.EXPERT})
    dims = (((3,), (1,)), ((1,), (0,)))
    # [groups, experts, capacity, m] @ [experts, m, n] -> [experts, groups, capacity, n]
    experts, _, _ = _rule(
        "dot_general", [(8, 4, 6, 12), (4, 12, 4)], [(4, 8, 6, 4)], dimension_numbers=dims,
        preferred_element_type="float32",
    )  # fmt: skip
    choices = _axis_choices(experts, {"x": 2}, _batch_factor(experts), expert, in_loop=True)
    assert {c for (c,) in choices} == _batch_factor(experts) | set(experts.operands[1][0])
    for dense, _, _ in (_product(), _heads()):
        choices = _axis_choices(dense, {"x": 2}, _batch_factor(dense), expert, in_loop=True)
        assert {c for (c,) in choices} == _batch_factor(dense)


def test_dense_axes_split_samples_and_the_weights_of_products_but_not_of_convolutions() -> None:
    dense = Restriction(roles={"x": AxisRole.DENSE})
    product, _, _ = _product()
    choices = _axis_choices(product, {"x": 2}, _batch_factor(product), dense, in_loop=True)
    weights = {f for dim in product.operands[1] for f in dim}
    assert {c for (c,) in choices} == _batch_factor(product) | weights
    convolution = replace(product, work_kind="convolution")
    choices = _axis_choices(convolution, {"x": 2}, _batch_factor(product), dense, in_loop=True)
    assert {c for (c,) in choices} == _batch_factor(product)


def test_gradients_wait_for_all_state_axes_at_once() -> None:
    roles = {"d": AxisRole.BATCH, "c": AxisRole.CONTEXT, "m": AxisRole.MODEL}
    restriction = Restriction(roles=roles)
    whole, model, both = Spec(((), ())), Spec(((), ()), ("m",)), Spec(((), ()), ("c", "d"))
    on_a_dim = Spec((("c",), ()), ("d", "m"))
    specs = [whole, model, both, on_a_dim, Spec(((), ()), ("d",)), Spec(((), ("m",)), ("c",))]
    assert restriction.sums_at_once(specs) == [whole, model, both, on_a_dim]
    data = Spec(((), ()), ("d",))
    assert restriction.on(("d", "m")).sums_at_once([whole, data]) == [whole, data], "an axis of one device is no axis"


def test_axes_that_split_state_lie_on_one_dim_where_that_uses_them_all() -> None:
    roles = {"d": AxisRole.BATCH, "c": AxisRole.CONTEXT, "m": AxisRole.MODEL}
    restriction = Restriction(roles=roles, optimizer=BatchSplit.MUST)
    sizes = {"d": 4, "c": 2, "m": 2}
    specs = all_specs((16, 16), sizes, lambda axis, dim: True)
    found = restriction.on_one_dim(specs)
    assert set(found) == {s for s in specs if not (set(s.dims[0]) & {"d", "c"} and set(s.dims[1]) & {"d", "c"})}
    # Four rows and two columns: both axes can be used on different dims only.
    narrow = all_specs((4, 2), sizes, lambda axis, dim: True)
    assert restriction.on_one_dim(narrow) == narrow


@pytest.mark.parametrize("role", [AxisRole.TENSOR, AxisRole.MODEL, AxisRole.ANY])
@pytest.mark.parametrize("scatter", [True, False])
def test_sums_that_contractions_leave_may_have_to_be_whole(scatter: bool, role: AxisRole) -> None:
    """Of TENSOR axes that is whether there is sequence parallelism."""
    rule, operands, results = _product(b=8, m=8, k=8, n=8)
    restriction = Restriction(roles={"x": role}, scatter_sums=scatter)
    assert restriction.may_scatter("x") == scatter
    found = placements(
        LeadingOp(rule=rule, operands=operands, results=results, use=OpUse(batch_factors=_batch_factor(rule))),
        {"x": 4},
        restriction,
    )
    (k,) = [f for f, kind in enumerate(rule.kinds) if kind is FactorKind.REDUCTION]
    ends = {str(p.results[0]) for p in found if p.factors[k]}
    assert ends == {"[-, -, -]"} | ({"[x, -, -]", "[-, x, -]", "[-, -, x]"} if scatter else set())


@pytest.mark.parametrize("split", BatchSplit)
def test_who_splits_state(split: BatchSplit) -> None:
    """Replicas keep copies; context axes take part as those of the batch do; other axes are free."""
    roles = {role.value: role for role in AxisRole}
    found = {axis: Restriction(roles=roles).state_split(axis, split) for axis in roles}
    assert found["replica"] is BatchSplit.NEVER
    assert found["batch"] is found["context"] is split
    assert {found[axis] for axis in ("any", "model", "tensor")} == {BatchSplit.MAY}


def test_axes_on_one_factor_stay_in_mesh_order() -> None:
    rule, _, _ = _product()
    assert factor_axes(rule, (0, 0), {"x": 2, "y": 2})[0] == ("x", "y")
    assert factor_axes(rule, (None, -1), {"x": 2, "y": 2}) == ((),) * len(rule.sizes)


# --- placements -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_placement_can_be_carried_out_and_none_comes_twice(sizes: dict[str, int], keep: bool) -> None:
    rule, operands, results = _product()
    found = placements(LeadingOp(rule=rule, operands=operands, results=results, use=OpUse(keep_partial=keep)), sizes)
    assert len(set((p.factors, p.partial, p.results) for p in found)) == len(found)
    for p in found:
        for spec, value in zip(operand_specs(rule, operands, p), operands, strict=True):
            assert divides(spec, value.shape, sizes)
        (raw,), (result,) = raw_result_specs(rule, p), p.results
        assert divides(result, results[0].shape, sizes)
        assert reshard(raw, result, results[0].shape, sizes) is not None
        assert keep or not result.partial


def test_a_split_contraction_is_reduced_scattered_or_kept() -> None:
    rule, operands, results = _product(b=8, m=8, k=8, n=8)
    (k,) = [f for f, kind in enumerate(rule.kinds) if kind is FactorKind.REDUCTION]
    for keep, scatter in itertools.product([False, True], repeat=2):
        use = OpUse(keep_partial=keep, scatter=scatter)
        found = placements(LeadingOp(rule=rule, operands=operands, results=results, use=use), {"x": 4})
        ends = {str(p.results[0]) for p in found if p.factors[k]}
        expected = {"[-, -, -]"}
        expected |= {"[-, -, -]+x"} if keep else set()
        expected |= {"[x, -, -]", "[-, x, -]", "[-, -, x]"} if scatter else set()
        assert ends == expected


def test_resolutions_are_the_product_over_axes() -> None:
    raw = Spec(((), ()), ("x", "y"))
    found = resolutions(raw, (8, 8), {"x": 2, "y": 2}, keep=True, may_scatter=lambda _: True)
    # Each axis is kept, summed up, or scattered onto one of two dims.
    assert len(found) == len(set(found)) == 16
    only = resolutions(raw, (8, 8), {"x": 2, "y": 2}, keep=False, may_scatter=lambda a: a == "y")
    assert {str(s) for s in only} == {"[-, -]", "[y, -]", "[-, y]"}


def test_additions_take_partial_sums_only_jointly() -> None:
    rule, operands, results = _rule("add", [(8, 4), (8, 4)], [(8, 4)])
    found = placements(_addition(rule, operands, results), {"x": 4})
    joint = [p for p in found if p.partial]
    assert joint and {p.results[0].partial for p in joint} == {("x",), ()}
    for p in joint:
        assert [s.partial for s in operand_specs(rule, operands, p)] == [("x",), ("x",)]
    product, values, out = _rule("mul", [(8, 4), (8, 4)], [(8, 4)])
    for p in placements(_addition(product, values, out), {"x": 4}):
        assert sum(bool(s.partial) for s in operand_specs(product, values, p)) <= 1


# --- specs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_all_specs_are_all_that_divide(sizes: dict[str, int]) -> None:
    shape = (4, 6)
    found = all_specs(shape, sizes, lambda axis, dim: True)
    expected: set[Spec] = set()
    for homes in itertools.product([-1, 0, 1], repeat=len(sizes)):
        dims = tuple(tuple(a for a, h in zip(sizes, homes, strict=True) if h == d) for d in range(2))
        if divides(Spec(dims), shape, sizes):
            orders = [itertools.permutations(axes) if len(sizes) == 2 else [axes] for axes in dims]
            expected |= set(map(Spec, itertools.product(*orders)))
    assert set(found) == expected and len(found) == len(expected)


def test_only_two_free_axes_split_a_dim_in_any_order() -> None:
    sizes, roles = {"x": 2, "y": 2}, Restriction(roles={"x": AxisRole.BATCH, "y": AxisRole.MODEL})
    for restriction, orders in ((FREE_CHOICE, {("x", "y"), ("y", "x")}), (roles, {("x", "y")})):
        assert set(restriction.orders(("x", "y"), sizes)) == orders
        found = all_specs((8,), sizes, lambda axis, dim: True, restriction)
        assert {spec.dims[0] for spec in found} == orders | {(), ("x",), ("y",)}
    assert set(FREE_CHOICE.orders(("x", "y"), {"x": 2, "y": 2, "z": 2})) == {("x", "y")}


def test_specs_can_be_filtered() -> None:
    found = all_specs((4, 4), {"x": 2, "y": 2}, lambda axis, dim: (axis, dim) == ("x", 1))
    assert {str(s) for s in found} == {"[-, -]", "[-, x]"}


# --- followers --------------------------------------------------------------------------------------------------------


def test_elementwise_ops_take_over_the_spec() -> None:
    kind = _class("tanh", [(8, 4)], [(8, 4)])
    spec = Spec((("x",), ("y",)))
    placement, _ = follow(kind, 0, spec, {"x": 2, "y": 2}, keep_partial=False)
    assert placement.results == (spec,)


def test_a_transpose_carries_the_axes_along() -> None:
    kind = _class("transpose", [(8, 4)], [(4, 8)], permutation=(1, 0))
    placement, _ = follow(kind, 0, Spec((("x",), ())), {"x": 2}, keep_partial=False)
    assert placement.results == (Spec(((), ("x",))),)


def test_partial_sums_pass_linear_ops_and_no_others() -> None:
    summed = Spec(((), ()), ("x",))
    for primitive, params, passes in (
        ("neg", {}, True),
        ("tanh", {}, False),
        ("transpose", {"permutation": (1, 0)}, True),
    ):
        kind = _class(primitive, [(4, 4)], [(4, 4)], **params)
        placement, _ = follow(kind, 0, summed, {"x": 2}, keep_partial=False)
        assert bool(placement.results[0].partial) == passes, primitive


def test_axes_on_dims_that_must_be_whole_are_dropped() -> None:
    kind = _class("cumsum", [(8, 4)], [(8, 4)], axis=0, reverse=False)
    placement, _ = follow(kind, 0, Spec((("x",), ("y",))), {"x": 2, "y": 2}, keep_partial=False)
    assert placement.results == (Spec(((), ("y",))),)


@pytest.mark.parametrize("keep", [False, True])
def test_a_followed_reduction_is_summed_up_unless_its_sum_may_wait(keep: bool) -> None:
    kind = _class("reduce_sum", [(8, 4)], [(4,)], axes=(0,))
    placement, _ = follow(kind, 0, Spec((("x",), ())), {"x": 2}, keep_partial=keep)
    assert placement.results == (Spec(((),), ("x",) if keep else ()),)
