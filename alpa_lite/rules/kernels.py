"""Factor rules of hand-written kernels.

    pallas_call            a grid axis whose steps are independent passes: ([ix,j]) -> ([ix,j]), x rows of a block
    custom_partitioning    the factors of its sharding rule that pass; all others are whole
    attention of cuDNN     ([b,t,kg,h], [b,s,k,h], [b,s,k,v], ...) -> ([b,t,kg,v], [b,kg,t])
                           batch b and heads kg pass, g query heads per head k of the keys; queries t pass where no mask
                           counts positions

A `pallas_call` names its axes in `splits` and their sizes in `sizes` (`alpa_lite.trace.kernels`). A kernel that is
known to be more independent than is proven gets a rule under its own name, `"pallas_call:my_kernel"`, for example of
one line (`notation.rule_from`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

from alpa_lite.program.ir import Value
from alpa_lite.rules.registry import Dims, FactorKind, OpView, Rule, RuleBuilder, opaque_rule, register_rule

#: `mask_type` of cuDNN's attention without a mask, and `layout` of arrays [batch, heads, length, width].
_NO_MASK, _HEADS_FIRST = "NO_MASK", 1
_CAUSAL = ("CAUSAL", "PADDING_CAUSAL")


@register_rule("pallas_call")
def pallas_call(view: OpView) -> Rule:
    """Return a rule in which the blocks along independent grid axes pass."""
    axes = zip(view.params.get("splits", ()), view.params.get("sizes", ()), strict=True)
    proven = [(split, size) for split, size in axes if split["proven"]]
    splits, sizes = [split for split, _ in proven], [size for _, size in proven]
    b = RuleBuilder()
    factors = [b.factor(n) for n in sizes]
    values = (*view.operands, *view.results)
    dims: list[list[tuple[int, ...]]] = [[] for _ in values]
    for i, value in enumerate(values):
        for d, n in enumerate(value.shape):
            pairs = zip(factors, splits, strict=True)
            held = [f for f, split in pairs if (*split["operands"], *split["results"])[i] == d]
            rest = n // prod(sizes[f] for f in held)
            whole = [b.factor(rest, FactorKind.REPLICATED)] if rest > 1 or not held else []
            dims[i].append((*held, *whole))
    return _kernel(view, b, [tuple(d) for d in dims], positional=any(split["rolled"] for split in splits))


def _kernel(view: OpView, b: RuleBuilder, dims: Sequence[Dims], **rest: Any) -> Rule:
    """Return the rule of a kernel, from the dims of its operands and results; it is opaque if it cannot be split."""
    count, flops = len(view.operands), float(view.params.get("flops", 0.0))
    kind = "attention" if view.params.get("has_products") else "elementwise"
    made = b.build(tuple(dims[:count]), tuple(dims[count:]), flops=flops, work_kind=kind, **rest)
    if made.shardable:
        return made
    return b.build(made.operands, made.results, flops=flops, work_kind=kind, opaque=True)


@register_rule("custom_partitioning")
def custom_partitioning(view: OpView) -> Rule:
    """Return the factor rule that a sharding rule states; factors without a consistent size are whole."""
    b = RuleBuilder()
    values = (*view.operands, *view.results)
    named: Sequence[tuple[tuple[str, ...], ...]] = (*view.params["operands"], *view.params["results"])
    sizes, split = dict[str, int](view.params["given"]), set[str](view.params["split"])
    for names, n in _dims_of(named, values):
        if len(names) == 1 and sizes.setdefault(names[0], n) != n:
            split.discard(names[0])
    kinds = {True: FactorKind.PASS, False: FactorKind.REPLICATED}
    fits = {names: prod(sizes.get(name, 0) for name in names) == n for names, n in _dims_of(named, values)}
    split -= {name for names, fit in fits.items() if not fit for name in names}
    factors = {name: b.factor(n, kinds[name in split]) for name, n in sizes.items()}
    made: list[Dims] = []
    for dims, value in zip(named, values, strict=True):
        pairs = zip(dims, value.shape, strict=True)
        made.append(
            tuple(
                tuple(factors[name] for name in names)
                if prod(sizes.get(name, 0) for name in names) == n
                else (b.factor(n, FactorKind.REPLICATED),)
                for names, n in pairs
            )
        )
    return _kernel(view, b, made)


def _dims_of(
    named: Sequence[tuple[tuple[str, ...], ...]], values: Sequence[Value]
) -> list[tuple[tuple[str, ...], int]]:
    """Return the factor names and the size of every dim."""
    return list(chain.from_iterable(zip(dims, v.shape, strict=True) for dims, v in zip(named, values, strict=True)))


#: The operands of cuDNN's attention after queries, keys and values, and the axis names of their dims.
_OTHERS = ("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v")


@register_rule("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
def cudnn_attention(view: OpView) -> Rule:
    """Return the rule of cuDNN's attention, forward or backward, by the contract of its shapes.

    Dropout draws its bits by positions in whole arrays and page tables name blocks of whole arrays: such calls are not
    split. The gradient of a bias that several heads or samples share sums over them inside the kernel.
    """
    backward = view.primitive == "dot_product_attention_bwd_wrapper"
    params, operands = view.params, view.operands
    q, k = operands[:2]
    pages = operands[3 + _OTHERS.index("page_table_k")]
    if params["dropout_rate"] or pages.num_elements:
        return opaque_rule(view)
    heads_first = params["layout"] == _HEADS_FIRST
    length, heads = (2, 1) if heads_first else (1, 2)
    bias = operands[3]
    has_bias = bias.rank == 4 and bias.num_elements > 0
    shared = [has_bias and backward and bias.shape[d] != n for d, n in ((0, q.shape[0]), (1, q.shape[heads]))]
    # Positions count in masks; in the backward pass, the gradients of keys sum over all queries inside the kernel.
    counts = params["mask_type"] != _NO_MASK or params.get("sliding_window_length") is not None
    passes = {True: FactorKind.PASS, False: FactorKind.REPLICATED}
    b = RuleBuilder()
    batch = (b.factor(q.shape[0], passes[not shared[0]]),)
    of_keys = (b.factor(k.shape[heads], passes[not shared[1]]),)
    group = q.shape[heads] // k.shape[heads]
    of_queries = (*of_keys, b.factor(group, FactorKind.REPLICATED)) if group > 1 else of_keys
    queries = (b.factor(q.shape[length], passes[not counts and not backward]),)
    keys = (b.factor(k.shape[length], FactorKind.REPLICATED),)
    width, of_values = ((b.factor(v.shape[3], FactorKind.REPLICATED),) for v in (q, operands[2]))

    def dims(heads: tuple[int, ...], length: tuple[int, ...], width: tuple[int, ...]) -> Dims:
        return (batch, heads, length, width) if heads_first else (batch, length, heads, width)

    def other(name: str, value: Value) -> Dims:
        names = (batch, of_queries, queries, keys) if name == "bias" else (batch,)
        whole = b.factors(value.shape, FactorKind.REPLICATED)
        fits = value.rank >= len(names)
        return tuple(
            names[d] if fits and d < len(names) and prod(b.sizes[f] for f in names[d]) == n else whole[d]
            for d, n in enumerate(value.shape)
        )

    made = dims(of_queries, queries, of_values)
    inputs = [dims(of_queries, queries, width), dims(of_keys, keys, width), dims(of_keys, keys, of_values)]
    others = [other(name, value) for name, value in zip(_OTHERS, operands[3:10], strict=True)]
    # Packed sequences have one row of sums per segment of a sample.
    segments = prod(view.results[1].shape[:1]) // q.shape[0] if not backward and len(view.results) > 1 else 1
    segments = operands[10].shape[0] // q.shape[0] if backward else segments
    sample = (*batch, b.factor(segments, FactorKind.REPLICATED)) if segments > 1 else batch
    sums: Dims = (sample, of_queries, queries)
    if backward:
        results = (*inputs, others[0])[: len(view.results)]
        inputs_all = (*inputs, *others, sums, made, made)
    else:
        results, inputs_all = (made, sums)[: len(view.results)], (*inputs, *others)
    # Two products forward, and five backward, of which one repeats the scores; causal masks skip half of each.
    products = 5 if backward else 2
    half = 0.5 if params["mask_type"] in _CAUSAL else 1.0
    flops = 2.0 * products * half * q.num_elements * k.shape[length]
    return b.build(inputs_all, results, flops=flops, work_kind="attention")
