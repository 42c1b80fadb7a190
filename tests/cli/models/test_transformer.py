"""The configurable transformer: against the models it generalises, its forms against each other, published sizes."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.cli.models.decoders import GPT, Llama
from alpa_lite.cli.models.train import Adam, init_state, make_train_step
from alpa_lite.cli.models.transformer import Architecture, Computation, Encoder, Transformer
from alpa_lite.cli.models.transformer_layers import Experts
from tests.cli.models.draws import drawn


def make_key(seed):
    return jax.random.key(seed, impl="unsafe_rbg")  # compiles twice as fast as the default generator


TINY = Transformer(
    vocab_size=64,
    num_layers=4,
    hidden=16,
    num_heads=4,
    inner=24,
    seq_len=8,
    computation=Computation(dtype=jnp.float32),
)
LLAMA = replace(
    TINY,
    architecture=Architecture(
        num_kv_heads=2, gated=True, activation="silu", norm="rms", positions="rotary", bias=False, tied=False
    ),
)


def computed(model, **changes):
    return replace(model, computation=replace(model.computation, **changes))


FAMILIES = {
    "gpt": TINY,
    "llama": LLAMA,
    "bert": replace(TINY, num_masked=3),
    "moe": replace(TINY, experts=Experts(num_experts=4, group_size=8, capacity_factor=2.0, every=2)),
    "grok": replace(LLAMA, experts=Experts(num_experts=4, group_size=4, capacity_factor=2.0)),
    "t5": computed(
        replace(
            LLAMA,
            architecture=replace(LLAMA.architecture, positions="relative"),
            encoder=Encoder(num_layers=4, seq_len=10),
        ),
        fused=False,
    ),
}


def random_batch(model, size=2):
    """Integers that are legal for every array: small ones."""
    keys = iter(jax.random.split(make_key(7), 8))
    limits = {"types": 2, "follows": 2, "positions": model.seq_len}
    shapes = model.batch_shapes(size)
    return {name: jax.random.randint(next(keys), s.shape, 0, limits.get(name, 64)) for name, s in shapes.items()}


def loss_and_grads(model, params, batch, key=None):
    return jax.jit(jax.value_and_grad(model.loss_fn))(params, batch, key)


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def joined(params):
    """Weights with the segments of each stack put together again."""
    stacks = {"layers": jax.tree.map(lambda *parts: np.concatenate(parts), *params["layers"])}
    return params | stacks | ({"encoder": joined(params["encoder"])} if "encoder" in params else {})


def cut(params, sizes):
    """Weights of one segment per stack, with segments of these sizes."""
    ends, layers = np.cumsum(sizes), params["layers"][0]
    parts = [
        jax.tree.map(lambda w, end=end, n=n: np.asarray(w)[end - n : end], layers)
        for n, end in zip(sizes, ends, strict=True)
    ]
    return params | {"layers": parts} | ({"encoder": cut(params["encoder"], sizes)} if "encoder" in params else {})


@functools.cache
def solved(name):
    """A model, random weights, a batch, and the loss and gradients without segments and recomputation."""
    model, draws = FAMILIES[name], np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, make_key(0))

    def draw(path, leaf):
        return draws.normal(path[-1].key == "scale", 0.2, leaf.shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    batch = random_batch(model)
    return model, params, batch, loss_and_grads(model, params, batch)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_is_used(name):
    _, _, _, (loss, grads) = solved(name)
    assert jnp.isfinite(loss)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.any(np.asarray(grad) != 0.0), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name, sizes", [("moe", [1, 1]), ("t5", [2, 2])])
def test_segments_change_nothing(name, sizes):
    model, params, batch, (loss, grads) = solved(name)
    model, parts = computed(model, num_segments=len(sizes)), cut(params, sizes)
    shapes = jax.eval_shape(model.init, make_key(0))
    assert jax.tree.map(np.shape, parts) == jax.tree.map(lambda s: s.shape, shapes)
    cut_loss, cut_grads = loss_and_grads(model, parts, batch)
    np.testing.assert_allclose(cut_loss, loss, rtol=1e-5)
    assert_close(joined(cut_grads), joined(grads))


@pytest.mark.parametrize(
    "name, recompute",
    [
        ("moe", "full"),
        ("gpt", "selective"),
        ("bert", "dots_without_batch"),
        ("grok", "projections"),
        ("t5", "alternate"),
    ],
)
def test_recomputation_changes_nothing(name, recompute):
    model, params, batch, (loss, grads) = solved(name)
    again_loss, again_grads = loss_and_grads(computed(model, recompute=recompute), params, batch)
    np.testing.assert_allclose(again_loss, loss, rtol=1e-5)
    assert_close(again_grads, grads)


def contractions(jaxpr):
    """Contractions of a jaxpr, loops counted once."""
    found = 0
    for eqn in jaxpr.eqns:
        found += eqn.primitive.name == "dot_general"
        found += sum(
            contractions(getattr(v, "jaxpr", v))
            for v in eqn.params.values()
            if hasattr(v, "eqns") or hasattr(v, "jaxpr")
        )
    return found


@pytest.mark.parametrize(
    "recompute, again",
    [
        ("none", 0),
        ("dots", 0),
        ("selective", 1),  # scores; nothing reads the weighted sum
        ("dots_without_batch", 2),  # scores and weighted sum
        ("projections", 4),  # scores, weighted sum, gate, up
        ("alternate", 4),  # keys, scores, attention's output, up
        ("full", 8),  # all but the last, which nothing reads
    ],
)
def test_recomputation_repeats_what_it_says(recompute, again):
    model = computed(LLAMA, fused=False, recompute=recompute)
    params = jax.eval_shape(model.init, make_key(0))
    closed = jax.make_jaxpr(jax.value_and_grad(model.loss_fn))(params, model.batch_shapes(2))
    # Per layer 4 projections, scores, weighted sum, 3 of the MLP; logits; each twice more in the backward pass.
    assert contractions(closed.jaxpr) == 3 * (4 + 2 + 3 + 1) + again


def test_is_the_gpt():
    gpt = GPT(vocab_size=64, num_layers=2, num_heads=4, hidden=16, seq_len=8, scan_layers=True)
    model = replace(TINY, num_layers=2, inner=64)
    theirs = drawn(gpt.init)
    attention, mlp = theirs["layers"]["attention"], theirs["layers"]["mlp"]
    layer = {
        "norm1": theirs["layers"]["norm1"],
        "attention": {
            "w_qkv": attention["w_qkv"].reshape(2, 16, 3, 4, 4).transpose(0, 1, 3, 2, 4),
            "b_qkv": attention["b_qkv"].reshape(2, 3, 4, 4).transpose(0, 2, 1, 3),
            "w_out": attention["w_out"].reshape(2, 4, 1, 4, 16),
            "b_out": attention["b_out"],
        },
        "norm2": theirs["layers"]["norm2"],
        "mlp": mlp,
    }
    ours = theirs | {"layers": [[layer]]}
    batch = random_batch(model)
    np.testing.assert_allclose(jax.jit(model.loss_fn)(ours, batch), jax.jit(gpt.loss_fn)(theirs, batch), rtol=1e-5)


def test_is_the_llama():
    llama = Llama(
        vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden=16, inner=24, seq_len=8, scan_layers=True,
        dtype=jnp.float32,
    )  # fmt: skip
    model = computed(replace(LLAMA, num_layers=2), fused=False)
    theirs = drawn(llama.init, 0.1)  # attention is not uniform
    w = theirs["layers"]
    layer = {
        "norm1": {"scale": w["attention_norm"]},
        "attention": {
            "w_q": w["w_q"].reshape(2, 16, 2, 2, 4),
            "w_k": w["w_k"].reshape(2, 16, 2, 4),
            "w_v": w["w_v"].reshape(2, 16, 2, 4),
            "w_out": w["w_o"].reshape(2, 2, 2, 4, 16),
        },
        "norm2": {"scale": w["feed_forward_norm"]},
        "mlp": {name: w[name] for name in ("w_gate", "w_up", "w_down")},
    }
    ours = {"token_embedding": theirs["embedding"], "layers": [[layer]], "head": theirs["head"]}
    ours["final_norm"] = {"scale": theirs["final_norm"]}
    batch = random_batch(model)
    np.testing.assert_allclose(jax.jit(model.loss_fn)(ours, batch), jax.jit(llama.loss_fn)(theirs, batch), rtol=1e-5)


@pytest.mark.parametrize("name, backwards", [("gpt", True), ("t5", True), ("bert", False)])
def test_who_looks_ahead(name, backwards):
    model = FAMILIES[name]
    _, params, batch, _ = solved(name)
    changed = batch | {"tokens": batch["tokens"].at[:, 5].add(1)}
    hidden_states = jax.jit(model.hidden_states)
    before, after = (hidden_states(params, b)[:, :5] for b in (batch, changed))
    assert np.allclose(before, after, atol=1e-6) == backwards
    if "inputs" in batch:
        changed = batch | {"inputs": batch["inputs"].at[:, 9].add(1)}
        after = hidden_states(params, changed)
        assert not np.allclose(before[:, 0], after[:, 0], atol=1e-6)


def test_dropout_needs_a_key():
    model = replace(TINY, dropout=0.5)
    params, batch = drawn(model.init), random_batch(model)
    loss_fn = jax.jit(model.loss_fn)
    np.testing.assert_allclose(loss_fn(params, batch), jax.jit(TINY.loss_fn)(params, batch), rtol=1e-6)
    key = make_key(0)
    assert loss_fn(params, batch, key) != loss_fn(params, batch, make_key(1))
    segments = jax.jit(computed(model, num_segments=3).loss_fn)(cut(params, [1, 2, 1]), batch, key)
    np.testing.assert_allclose(segments, loss_fn(params, batch, key), rtol=1e-5)


LLAMA_3 = replace(
    LLAMA, vocab_size=128256, num_heads=32, hidden=4096, architecture=replace(LLAMA.architecture, num_kv_heads=8)
)


@pytest.mark.parametrize(
    "model, billions",
    [
        # Brown et al. 2020, table 2.1
        (Transformer(vocab_size=50257, num_layers=96, hidden=12288, num_heads=96, inner=49152, seq_len=2048), 174.6),
        # Narayanan et al. 2021 (SC21), table 1
        (Transformer(vocab_size=51200, num_layers=105, hidden=20480, num_heads=128, inner=81920, seq_len=2048), 529.6),
        # Llama 3 model cards and config.json
        (replace(LLAMA_3, num_layers=32, hidden=4096, num_heads=32, inner=14336), 8.030),
        (replace(LLAMA_3, num_layers=80, hidden=8192, num_heads=64, inner=28672), 70.55),
        (replace(LLAMA_3, num_layers=126, hidden=16384, num_heads=128, inner=53248), 405.9),
        # xai-org/grok-1
        (
            replace(
                LLAMA, architecture=replace(LLAMA.architecture, num_kv_heads=8, tied=True),
                vocab_size=131072, num_layers=64, hidden=6144, num_heads=48,
                inner=32768, experts=Experts(num_experts=8),
            ),
            315.7,
        ),
        # google/t5-v1_1-xl, config.json
        (
            replace(
                FAMILIES["t5"], vocab_size=32128, num_layers=24,
                architecture=replace(FAMILIES["t5"].architecture, num_kv_heads=32),
                encoder=Encoder(num_layers=24, seq_len=10), hidden=2048, num_heads=32, inner=5120,
            ),
            2.850,
        ),
        # BERT-large with a vocabulary padded to 30528 (NVIDIA DeepLearningExamples)
        (
            replace(
                FAMILIES["bert"], vocab_size=30528, num_layers=24, hidden=1024, num_heads=16, inner=4096, seq_len=512
            ),
            0.3362,
        ),
        # Alpa (OSDI 2022), GPT and MoE rows of its artifact
        (Transformer(vocab_size=51200, num_layers=32, hidden=2560, num_heads=32, inner=10240, seq_len=1024), 2.649),
        (
            Transformer(
                vocab_size=32000, num_layers=16, hidden=1536, num_heads=16, inner=12288, seq_len=1024,
                experts=Experts(num_experts=32, group_size=2048, every=2),
            ),
            10.17,
        ),
    ],
)  # fmt: skip
def test_published_sizes(model, billions):
    assert model.parameter_count() / 1e9 == pytest.approx(billions, rel=1e-3)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == model.parameter_count()


def test_head_width_is_free():
    # MaxText, base.yml of December 2023: 8192 wide attention in a model of width 5120
    model = Transformer(
        vocab_size=32768,
        num_layers=32,
        hidden=5120,
        num_heads=32,
        inner=32768,
        seq_len=2048,
        architecture=Architecture(head_dim=256, bias=False),
    )
    assert model.parameter_count() / 1e9 == pytest.approx(16.28, rel=1e-3)


def test_large_steps_trace_without_arrays():
    model = Transformer(
        vocab_size=51200, num_layers=24, hidden=20480, num_heads=128, inner=81920, seq_len=2048,
        computation=Computation(num_segments=24, recompute="full"),
    )  # fmt: skip
    optimizer = Adam()
    state = jax.eval_shape(lambda: init_state(model.init(make_key(0)), optimizer))
    closed = jax.make_jaxpr(make_train_step(model.loss_fn, optimizer))(state, model.batch_shapes(8))
    bodies = [e.params["jaxpr"] for e in closed.jaxpr.eqns if e.primitive.name == "jit" and holds_scan(e)]
    assert len(bodies) == 2 * 24
    assert len({id(body) for body in bodies}) == 2, "the segments do not share their traces"


def holds_scan(eqn):
    return any(inner.primitive.name == "scan" for inner in eqn.params["jaxpr"].eqns)


DATA, TENSOR = al.planners.DataParallel(), al.planners.Hybrid(tensor=2)


@pytest.mark.parametrize(
    ("name", "planner"),
    [
        ("gpt", DATA),
        ("gpt", TENSOR),
        ("llama", DATA),
        ("bert", TENSOR),
        ("moe", DATA),
        ("grok", TENSOR),
        ("t5", TENSOR),
    ],
)
def test_steps_can_be_planned(name, planner):
    model = computed(FAMILIES[name], recompute="full", num_segments=2)
    optimizer = Adam()
    state = jax.eval_shape(lambda: init_state(model.init(make_key(0)), optimizer))
    step = make_train_step(model.loss_fn, optimizer)
    plan = al.plan(step, state, model.batch_shapes(16), cluster="dgx-a100", planner=planner, num_microbatches=2)
    assert plan.num_microbatches == 2 and plan.prediction.step_seconds > 0.0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"architecture": Architecture(num_kv_heads=3)}, "multiple of num_kv_heads"),
        ({"num_heads": 5}, "heads divide hidden"),
        ({"computation": Computation(num_segments=5)}, "between 1 and the 4"),
        ({"experts": Experts(num_experts=2, every=3)}, "every 3 layers"),
        ({"computation": Computation(recompute="alternate")}, "fused=True"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **options)
