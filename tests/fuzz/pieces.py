"""The pieces of random train steps, as lines of Python.

A piece is a few lines that work on these names:

    x, y, s   the batch: features ``[n, D]``, labels from 0 to D - 1 ``[n]``, sequences ``[n, T, D]``
    w         a weight of each sample ``[n]``, which depends on data alone
    h         the hidden values ``[n, D]``
    n         the number of samples
    more      a scalar that is added to the loss
    value     the loss
    $a, $k    a parameter of the piece's own (any letter but k); a random key of its own

What a piece does with samples is its label, which `test_grammar` checks by numbers:

    ""        each sample by itself, or a sum over them
    "mixed"   samples that depend on parameters meet: no sum over samples
    "pairs"   only neighbours meet (2i and 2i + 1): a sum over micro-batches with an even number of samples
    "unknown" a sum or not, but one that may be refused: it depends on positions, on `n`, or mixes what is returned
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Lines of a step.

    Attributes:
        code: the lines; see above.
        params: shapes of the parameters, as in ``"a=D,D b=D"``.
        label: what the piece does with samples.
        state: parts of the state that the piece needs: ``"name=shape"``, where the shape "net" means one like the
            parameters.
        tolerance: relative difference that rounding may make.
        dtype: of the parameters.
    """

    code: str
    params: str = ""
    label: str = ""
    state: str = ""
    tolerance: float = 0.0
    dtype: str = "float32"


HIDDEN = {
    "dense": Piece(code="h = jnp.tanh(h @ $a + $b)", params="a=D,D b=D"),
    "residual": Piece(code="h = h + jax.nn.gelu(h @ $a) @ $b", params="a=D,D b=D,D"),
    "einsum": Piece(code='h = jnp.einsum("nd,df->nf", h, $a)', params="a=D,D"),
    "transposed_dense": Piece(code="h = ($a.T @ h.T).T", params="a=D,D"),
    "gated": Piece(
        code="h, g = jnp.split(h @ $a, 2, axis=1)\nh = jnp.concatenate([h * jax.nn.sigmoid(g), g], axis=1)",
        params="a=D,D",
    ),
    "layer_norm": Piece(
        code="h = (h - h.mean(1, keepdims=True)) * jax.lax.rsqrt(h.var(1, keepdims=True) + 0.1) * $a", params="a=D"
    ),
    "rms_norm": Piece(code="h = h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 0.1)"),
    "softmax": Piece(code="h = jax.nn.softmax(h) * h"),
    "elementwise": Piece(code="h = jnp.where(h > 0, jnp.sin(h), jnp.clip(0.3 * h, -0.5, 0.5)) + abs(h) * 0.1"),
    "stacked_with_data": Piece(code="h = jnp.stack([h, x], axis=1).max(1)"),
    "stacked_in_front": Piece(code="h = jnp.stack([h, 2 * x]).sum(0)"),
    "convolution_1d": Piece(
        code="z = jax.lax.conv_general_dilated(h[:, None], $a, (1,), 'SAME', dimension_numbers=('NCW', 'WIO', 'NWC'))\n"
        "h = z.sum(2)",
        params="a=3,1,2",
    ),
    "convolution_2d": Piece(
        code="z = (h[:, None] + s)[..., None]\n"
        "z = jax.lax.conv_general_dilated(z, $a, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))\n"
        "h = jnp.tanh(z).mean((1, 3))",
        params="a=2,3,1,2",
    ),
    "attention": Piece(
        code="z = h[:, None] + s\nh = (jax.nn.softmax((z @ $a) @ z.swapaxes(1, 2)) @ (z @ $b)).sum(1)",
        params="a=D,D b=D,D",
    ),
    "heads_in_the_batch": Piece(
        code="z = (h[:, None] + s).reshape(n, T, 2, D // 2).transpose(0, 2, 1, 3).reshape(2 * n, T, D // 2)\n"
        "z = jax.nn.softmax(z @ z.swapaxes(1, 2)) @ z\n"
        "h = z.reshape(n, 2, T, D // 2).transpose(0, 2, 1, 3).reshape(n, T, D).mean(1) @ $a",
        params="a=D,D",
    ),
    "flattened_tokens": Piece(
        code="z = jnp.tanh((h[:, None] + s).reshape(-1, D) @ $a)\nh = z.reshape(-1, T, D).mean(1)", params="a=D,D"
    ),
    "experts_of_tokens": Piece(
        code="z = (h[:, None] + s).reshape(-1, D)\n"
        "gates = jax.nn.one_hot((z @ $a).argmax(1), 2) * jax.nn.softmax(z @ $a)\n"
        "h = jnp.einsum('ne,nd,edf->nf', gates, z, $b).reshape(n, T, D).max(1)",
        params="a=D,2 b=2,D,D",
    ),
    "embedding": Piece(code="h = h + $a[y]", params="a=D,D"),
    "embedding_of_others": Piece(code="h = h * $a.at[(y + 1) % D].get(mode='clip')", params="a=D,D"),
    "one_hot": Piece(code="h = h + jax.nn.one_hot(y, D) @ $a", params="a=D,D"),
    "one_hot_by_set": Piece(code="h = h * (1 + jnp.zeros((n, D)).at[jnp.arange(n), y].set(1.0))"),
    "taken_along_features": Piece(code="h = h * jnp.take_along_axis(h, y[:, None], axis=1)"),
    "own_row": Piece(code="h = h * h[jnp.arange(n), y][:, None]"),
    "own_row_added": Piece(code="h = h.at[jnp.arange(n), y].add(0.5)"),
    "own_row_set": Piece(code="h = h.at[jnp.arange(n), y].set(x[:, 0])"),
    "own_row_multiplied": Piece(code="h = h.at[jnp.arange(n), (y + 1) % D].multiply(2.0)"),
    "scattered_in_a_row": Piece(
        code="h = jnp.zeros((n, D)).at[jnp.arange(n)[:, None], (y[:, None] + jnp.arange(D)) % D].add(h)"
    ),
    "sorted_features": Piece(code="h = jnp.sort(h, axis=1)"),
    "running_features": Piece(code="h = jnp.cumsum(h, axis=1) / D"),
    "rolled_features": Piece(code="h = jnp.roll(h, 1, axis=1) - h[:, ::-1]"),
    "best_features": Piece(code="h = jax.lax.top_k(h, D)[0]"),
    "sliced_features": Piece(
        code="h = jnp.pad(h[:, 1:], ((0, 0), (1, 0))) + jnp.concatenate([h[:, 2:], h[:, :2]], axis=1)"
    ),
    "window_over_features": Piece(code="h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2), (1, 1), 'SAME')"),
    "fourier": Piece(code="h = jnp.abs(jnp.fft.rfft(h, axis=1)).sum(1, keepdims=True) * 0.1 + h"),
    "scan_over_layers": Piece(
        code="h, _ = jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), None), h, $a)", params="a=2,D,D"
    ),
    "scan_with_sums_of_parameters": Piece(
        code="h, r = jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), (v**2).sum()), h, $a)\nmore = more + 0.1 * r.sum()",
        params="a=2,D,D",
    ),
    "scan_with_a_counter": Piece(
        code="def layer(c, v):\n"
        "    return (jnp.tanh(c[0] @ v) / (1 + c[1]), c[1] + 1), c[1]\n"
        "(h, c), r = jax.lax.scan(layer, (h, 0.0), $a)\n"
        "h = h * (c + r.sum())",
        params="a=2,D,D",
    ),
    "scan_with_hidden_outputs": Piece(
        code="h, r = jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), h.sum(1)), h, $a)\nmore = more + (r**2).mean()",
        params="a=2,D,D",
    ),
    "scan_with_labels": Piece(
        code="h, r = jax.lax.scan(lambda h, v: (jnp.tanh(h @ v), h[jnp.arange(n), y].mean()), h, $a)\n"
        "more = more + r.sum()",
        params="a=2,D,D",
    ),
    "scan_with_a_key": Piece(
        code="def layer(c, v):\n"
        "    own, k = jax.random.split(c[1])\n"
        "    return (jnp.tanh(c[0] @ v) * jax.random.bernoulli(own, 0.7, c[0].shape), k), None\n"
        "(h, _), _ = jax.lax.scan(layer, (h, $k), $a)",
        params="a=2,D,D",
    ),
    "scan_checkpointed": Piece(
        code="h, _ = jax.lax.scan(jax.checkpoint(lambda h, v: (jnp.tanh(h @ v), None)), h, $a)", params="a=2,D,D"
    ),
    "recurrence": Piece(
        code="h, r = jax.lax.scan(lambda c, v: ((u := jnp.tanh(v @ $a + c @ $b)), u), h, s.swapaxes(0, 1))\n"
        "h = h + r.mean(0)",
        params="a=D,D b=D,D",
    ),
    "recurrence_in_reverse": Piece(
        code="h, _ = jax.lax.scan(lambda c, v: (jnp.tanh(v + c @ $a), None), h, s.swapaxes(0, 1), reverse=True)",
        params="a=D,D",
    ),
    "mapped_over_samples": Piece(code="h = jax.lax.map(lambda v: jnp.tanh(v @ $a), h)", params="a=D,D"),
    "scan_without_a_carry": Piece(
        code="_, h = jax.lax.scan(lambda c, v: (c, jnp.tanh(v[0] @ $a) + v[1]), 0.0, (h, x))", params="a=D,D"
    ),
    "cond_on_parameters": Piece(code="h = jax.lax.cond($a.sum() > 0, jnp.tanh, lambda h: 2 * h, h)", params="a=D"),
    "cond_on_parameters_with_products": Piece(
        code="h = jax.lax.cond($b.sum() > 0, lambda h: jnp.tanh(h @ $a), lambda h: h, h)", params="a=D,D b=D"
    ),
    "switch_per_sample": Piece(
        code="h = jax.vmap(lambda v, i: jax.lax.switch(i % 3, [jnp.sin, jnp.tanh, lambda v: 2 * v], v))(h, y)"
    ),
    "while_per_sample": Piece(
        code="def halved(v):\n"
        "    return jax.lax.while_loop(lambda v: abs(v).sum() > 1, lambda v: v / 2, v)\n"
        "c = jax.vmap(halved)(jax.lax.stop_gradient(h))\n"
        "h = h + c",
    ),
    "while_per_sample_of_data": Piece(
        code="c = jax.vmap(lambda v: jax.lax.while_loop(lambda v: abs(v).sum() > 1, lambda v: v / 2, v))(x)\nh = h * c"
    ),
    "while_on_parameters": Piece(
        code="c = jax.lax.while_loop(lambda c: abs(c).sum() > 1, lambda c: c / 2, jax.lax.stop_gradient($a))\n"
        "h = h * c",
        params="a=D",
    ),
    "fori_over_layers": Piece(
        code="h = jax.lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ $a[i]), h)", params="a=2,D,D"
    ),
    "checkpointed": Piece(code="h = jax.checkpoint(lambda h, v: jnp.tanh(h @ v) ** 2)(h, $a)", params="a=D,D"),
    "inner_jit": Piece(code="h = jax.jit(lambda h: jnp.tanh(h @ $a))(h)", params="a=D,D"),
    "own_derivative": Piece(
        code="own = jax.custom_vjp(lambda h: h)\n"
        "own.defvjp(lambda h: (h, h), lambda h, g: (jnp.clip(g * h, -0.1, 0.1),))\n"
        "h = own(h)",
    ),
    "own_derivative_of_a_product": Piece(
        code="own = jax.custom_vjp(lambda h, v: h @ v)\n"
        "own.defvjp(lambda h, v: (h @ v, (h, v)), lambda r, g: (g @ r[1].T, r[0].T @ jnp.tanh(g)))\n"
        "h = own(h, $a)",
        params="a=D,D",
    ),
    "dropout": Piece(code="h = h * jax.random.bernoulli($k, 0.7, h.shape)"),
    "normal_noise": Piece(code="h = h + 0.1 * jax.random.normal($k, h.shape)"),
    "gamma_noise": Piece(code="h = h * jax.random.gamma($k, 2.0, h.shape)"),
    "noise_per_sample": Piece(code="h = h + jax.vmap(lambda k: jax.random.normal(k, (D,)))(jax.random.split($k, n))"),
    "noise_by_position": Piece(
        code="h = h * jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in($k, i), (D,)))(jnp.arange(n))"
    ),
    "features_shuffled": Piece(code="h = jax.vmap(jax.random.permutation)(jax.random.split($k, n), h)"),
    "mask_of_all_samples": Piece(code="h = h * jax.random.bernoulli($k, 0.7, (D,))"),
    "sampled_features": Piece(
        code="h = h * (1 + jax.nn.one_hot(jax.random.categorical($k, jax.lax.stop_gradient(h)), D))"
    ),
    "half_precision": Piece(
        code="h = jnp.tanh(h.astype(jnp.bfloat16) @ $a.astype(jnp.bfloat16)).astype(jnp.float32)",
        params="a=D,D",
        tolerance=5e-2,
    ),
    "half_precision_parameters": Piece(
        code="h = jnp.tanh(h.astype(jnp.bfloat16) @ $a + $b).astype(jnp.float32)",
        params="a=D,D b=D",
        tolerance=5e-2,
        dtype="bfloat16",
    ),
    "bits_of_features": Piece(
        code="c = jnp.bitwise_or.reduce((h > 0).astype(jnp.int32) << jnp.arange(D), axis=1)\n"
        "h = h * (1 + c / 64)[:, None]"
    ),
    "parity_of_features": Piece(code="h = h * jnp.where(jnp.logical_xor.reduce(h > x, axis=1), 1.5, 1.0)[:, None]"),
    "bits_of_all_labels": Piece(code="c = jnp.bitwise_xor.reduce(1 << y)\nh = h * (1 + (c >> y & 1))[:, None]"),
    "bits_in_a_scan": Piece(
        code="def layer(c, v):\n"
        "    return (jnp.tanh(c[0] @ v), c[1] << 1 | (c[0] > 0).any(1)), None\n"
        "(h, c), _ = jax.lax.scan(layer, (h, jnp.zeros(n, jnp.int32)), $a)\n"
        "h = h * (1 + c)[:, None]",
        params="a=2,D,D",
    ),
    "positions": Piece(code="h = h * (1 + jnp.arange(n) % 3)[:, None]"),
    "linspace": Piece(code="h = h + jnp.linspace(0.0, 1.0, n)[:, None]"),
    "encoded_with_data": Piece(
        code="z = jnp.tanh(jnp.concatenate([h, 2 * x]) @ $a)\nh = z[:n] * z[n:]", params="a=D,D"
    ),
    "encoded_in_three": Piece(
        code="u, v, z = jnp.split(jnp.tanh(jnp.concatenate([h, x, h * x]) @ $a), 3)\nh = u * v + z", params="a=D,D"
    ),
    "encoded_in_a_stack": Piece(code="u, v = jnp.tanh(jnp.stack([h, x]) @ $a)\nh = u * v", params="a=D,D"),
    "repeated": Piece(code="h = jnp.tanh(jnp.repeat(h, 2, axis=0) @ $a).reshape(n, 2, D).sum(1)", params="a=D,D"),
    "tiled": Piece(
        code="z = jnp.tanh(jnp.tile(h, (2, 1)) @ $a).reshape(2, n, D)\nh = z[0] + z[1] ** 2", params="a=D,D"
    ),
    "vmapped": Piece(code="h = jax.vmap(lambda v: jnp.tanh($a @ v))(h)", params="a=D,D"),
    "vmapped_over_features": Piece(
        code="h = jax.vmap(lambda v, u: v * u, in_axes=(1, 0), out_axes=1)(h, $a)", params="a=D"
    ),
    "psum_over_time": Piece(
        code="h = h * jax.vmap(jax.vmap(lambda v: jax.lax.psum(jnp.tanh(v @ $a), 't') / T, axis_name='t'))(s)[:, 0]",
        params="a=D,D",
    ),
    "triangular_solve": Piece(
        code="h = jax.lax.linalg.triangular_solve(jnp.tril($a) + 3 * jnp.eye(D), h, left_side=False, lower=True)",
        params="a=D,D",
    ),
    "quantised": Piece(
        code="c = jax.lax.stop_gradient(abs(h).max(1, keepdims=True) + 0.1)\n"
        "h = h + jax.lax.stop_gradient(jnp.round(h / c * 8) * c - h)",
    ),
    "inner_gradient": Piece(code="h = jax.grad(lambda h: (jnp.tanh(h @ $a) ** 3).sum())(h)", params="a=D,D"),
    "inner_step_per_sample": Piece(
        code="def adapted(v):\n"
        "    return jnp.tanh(v @ ($a - 0.1 * jax.grad(lambda q: (jnp.tanh(v @ q) ** 2).sum())($a)))\n"
        "h = jax.vmap(adapted)(h)",
        params="a=D,D",
    ),
    "stopped": Piece(code="h = h * jax.lax.stop_gradient(jnp.tanh(h))"),
    "cast_to_integers": Piece(code="h = h + (h > 0).astype(jnp.int32).sum(1, keepdims=True).astype(jnp.float32) / D"),
    "in_time_and_back": Piece(
        code="h = jnp.swapaxes(jnp.swapaxes(h[:, None] * s, 0, 1) + s.swapaxes(0, 1), 0, 1).mean(1)"
    ),
    "ranks_of_features": Piece(code="h = h * jnp.argsort(h, axis=1)"),
    "associative_over_features": Piece(code="h = jax.lax.associative_scan(jnp.maximum, h, axis=1)"),
    "samples_last": Piece(code="h = jnp.moveaxis(jnp.tanh(jnp.moveaxis(h[:, None] * s, 0, -1).sum(0)), -1, 0)"),
    "statistics_of_data": Piece(code="h = h * ((x - x.mean(0)) / (x.std(0) + 0.1))"),
    "sums_of_classes_of_data": Piece(code="h = h + jnp.zeros((D, D)).at[y].add(x)[y]"),
    "recurrences_in_a_scan_over_layers": Piece(
        code="def layer(h, v):\n"
        "    return jax.lax.scan(lambda c, u: (jnp.tanh(u + c @ v), None), h, s.swapaxes(0, 1))[0], None\n"
        "h, _ = jax.lax.scan(layer, h, $a)",
        params="a=2,D,D",
    ),
    "cond_in_a_scan": Piece(
        code="def layer(h, v):\n"
        "    return jax.lax.cond(v[1] > 0, lambda h: jnp.tanh(h @ v[0]), lambda h: h, h), None\n"
        "h, _ = jax.lax.scan(layer, h, ($a, jnp.arange(2)))",
        params="a=2,D,D",
    ),
    "keys_in_the_xs_of_a_scan": Piece(
        code="def layer(h, v):\n"
        "    return jnp.tanh(h @ v[0]) * jax.random.bernoulli(v[1], 0.7, (n, D)), None\n"
        "h, _ = jax.lax.scan(layer, h, ($a, jax.random.split($k, 2)))",
        params="a=2,D,D",
    ),
    "embeddings_in_a_scan": Piece(
        code="h, r = jax.lax.scan(lambda h, v: (h + v[y], v[y].sum(1)), h, $a)\nmore = more + r.mean()",
        params="a=2,D,D",
    ),
    "one_hots_in_a_scan": Piece(
        code="h, _ = jax.lax.scan(lambda h, v: (h.at[jnp.arange(n), y].add(v), None), h, $a)", params="a=2"
    ),
    "running_time": Piece(code="h = h + (jnp.cumsum(h[:, None] * s, axis=1) @ $a).max(1)", params="a=D,D"),
    "ensemble": Piece(code="h = jax.vmap(lambda v: jnp.tanh(h @ v))($a).mean(0)", params="a=3,D,D"),
    "ensemble_of_samples": Piece(
        code="h = jax.vmap(lambda u, v: jnp.tanh(u @ v), (1, 0), 1)(s[:, :2], $a)[:, 0] * h", params="a=2,D,D"
    ),
    "own_forward_derivative": Piece(
        code="own = jax.custom_jvp(lambda h: jnp.tanh(h))\n"
        "own.defjvp(lambda q, t: (jnp.tanh(q[0]), t[0] * jnp.cos(q[0])))\n"
        "h = own(h)"
    ),
    "sliced_by_parameters": Piece(
        code="h = h * jax.lax.dynamic_slice(h, (0, jnp.argmax($a) % 2), (n, D - 1)).sum(1, keepdims=True)", params="a=D"
    ),
    "features_overwritten": Piece(code="h = h.at[:, 1:3].set(0.5).at[:, 0].multiply(x[:, 1])"),
    "bits_of_labels": Piece(code="h = h * ((y ^ 3) & 5)[:, None]"),
    "solved_per_sample": Piece(
        code="h = jnp.linalg.solve(3 * jnp.eye(D) + h[:, :, None] * x[:, None] * 0.1, h[..., None])[..., 0]"
    ),
    "tokens_of_labels": Piece(code="h = h * s[jnp.arange(n), y % T]"),
    "tokens_overwritten": Piece(code="h = h * s.at[jnp.arange(n), y % T].set(h).sum(1)"),
    "sums_of_tokens": Piece(
        code="h = jax.ops.segment_sum((h[:, None] * s).reshape(-1, D), jnp.repeat(jnp.arange(n), T), n)"
    ),
    "products_of_tokens": Piece(code="h = jnp.einsum('nd,ntd,nte->ne', h, s, s) / T"),
    # --- mixed ---
    "batch_norm": Piece(code="h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1)", label="mixed"),
    "centred": Piece(code="h = h - jax.lax.stop_gradient(h.mean(0))", label="mixed"),
    "scaled_by_the_batch": Piece(code="h = h / (abs(h).max() + 0.1)", label="mixed"),
    "rolled": Piece(code="h = h * jnp.roll(h, 1, axis=0)", label="mixed"),
    "flipped": Piece(code="h = h * h[::-1]", label="mixed"),
    "running": Piece(code="h = jnp.cumsum(h, axis=0) / 8", label="mixed"),
    "sorted_samples": Piece(code="h = h * jnp.sort(h, axis=0)", label="mixed"),
    "attention_between_samples": Piece(code="h = jax.nn.softmax(h @ h.T) @ h", label="mixed"),
    "softmax_over_samples": Piece(code="h = h * jax.nn.softmax(h, axis=0)", label="mixed"),
    "next_sample": Piece(code="h = h * h[jnp.arange(n) + 1]", label="mixed"),
    "sample_of_the_label": Piece(code="h = h * h[y % n]", label="mixed"),
    "added_to_the_next_sample": Piece(code="h = h.at[jnp.arange(n) + 1].add(h)", label="mixed"),
    "running_by_a_scan": Piece(
        code="_, h = jax.lax.scan(lambda c, v: (0.9 * c + v, 0.9 * c + v), jnp.zeros(D), h)", label="mixed"
    ),
    "maximum_by_a_scan": Piece(
        code="c, _ = jax.lax.scan(lambda c, v: (jnp.maximum(c, v), None), jnp.zeros(D), h)\nh = h * c", label="mixed"
    ),
    "permuted": Piece(code="h = h * h[jax.random.permutation($k, n)]", label="mixed"),
    "anchored": Piece(code="h = h - h[0]", label="mixed"),
    "halves_swapped": Piece(code="h = h * jnp.concatenate([h[n // 2 :], h[: n // 2]])", label="mixed"),
    "pmean_between_samples": Piece(
        code="h = jax.vmap(lambda v: v - jax.lax.pmean(v, 'n'), axis_name='n')(h)", label="mixed"
    ),
    "means_of_classes": Piece(code="h = h - (jax.nn.one_hot(y, D).T @ h)[y] / n", label="mixed"),
    "cond_on_a_mean": Piece(code="h = jax.lax.cond(h.mean() > 0.05, lambda h: 2 * h, lambda h: h, h)", label="mixed"),
    "reshaped_across": Piece(code="h = h * h.reshape(D, n).T", label="mixed"),
    "bits_of_samples": Piece(
        code="c = jnp.bitwise_or.reduce(1 << (jnp.arange(n)[:, None] + D) % 7 * (h > 0), axis=0)\nh = h * (1 + c / 64)",
        label="mixed",
    ),
    "parity_of_samples": Piece(
        code="h = h * jnp.where(jnp.logical_xor.reduce(h > 0, axis=0), 1.5, 1.0)", label="mixed"
    ),
    "bits_of_samples_in_a_scan": Piece(
        code="c, _ = jax.lax.scan(lambda c, v: (c & ~(1 << v.argmax()), None), 255, h)\n"
        "h = h * (1 + (c >> jnp.arange(D) & 1))",
        label="mixed",
    ),
    "pairs": Piece(code="h = h * h.reshape(n // 2, 2, D)[:, ::-1].reshape(n, D)", label="pairs"),
    "means_of_pairs": Piece(code="h = h + jnp.repeat(h.reshape(-1, 2, D).mean(1), 2, axis=0)", label="pairs"),
    "strided": Piece(code="h = h * jnp.repeat(h[::2] - h[1::2], 2, axis=0)", label="pairs"),
    "parameters_by_position": Piece(code="h = h * $a[jnp.arange(n)]", params="a=2 * B,D", label="unknown"),
    "parameters_sliced": Piece(code="h = h + $a[:n]", params="a=2 * B,D", label="unknown"),
    "power_of_samples": Piece(code="h = h ** (n // 2)", label="unknown"),
    "column_of_samples": Piece(code="h = h * h[:, n // 4 % D][:, None]", label="unknown"),
    "iterated_by_samples": Piece(
        code="h = jax.lax.fori_loop(0, n, lambda i, h: jnp.tanh(h * 1.1), h)", label="unknown"
    ),
    "rolled_by_samples": Piece(code="h = jnp.roll(h, n // 3, axis=1)", label="unknown"),
    "row_and_column": Piece(code="h = h * h[jnp.arange(n), jnp.arange(n) % D][:, None]", label="unknown"),
}
"""What is done with hidden values: ``[n, D] -> [n, D]``."""


DATA = {
    "standardised": Piece(code="x = (x - x.mean(0)) / (x.std(0) + 0.1)"),
    "shuffled": Piece(code="order = jax.random.permutation($k, n)\nx, y = x[order], y[order]"),
    "mixed_up": Piece(code="x = 0.7 * x + 0.3 * x[::-1]"),
    "mixed_up_at_random": Piece(code="x = 0.7 * x + 0.3 * x[jax.random.permutation($k, n)]"),
    "summed_up": Piece(code="x = jnp.cumsum(x, axis=0) / 4"),
    "ranked": Piece(code="w = jnp.argsort(jnp.argsort(x[:, 0])) / n"),
    "weighted_by_softmax": Piece(code="w = jax.nn.softmax(x[:, 0])"),
    "weighted_by_classes": Piece(code="w = 1 / jnp.zeros(D).at[y].add(1.0)[y]"),
    "masked": Piece(code="w = (y > 1).astype(jnp.float32)"),
    "weighted_by_returns": Piece(
        code="_, w = jax.lax.scan(lambda c, r: (r + 0.9 * c, r + 0.9 * c), 0.0, x[:, 0], reverse=True)"
    ),
    "weighted_by_returns_in_time": Piece(
        code="w = jax.lax.scan(lambda c, r: (r + 0.9 * c, None), jnp.zeros(n), s[..., 0].T, reverse=True)[0]"
    ),
    "weighted_by_position": Piece(code="w = jnp.arange(n)[::-1] / n"),
    "weighted_by_cumprod": Piece(code="w = jnp.cumprod(jnp.full(n, 0.9))"),
    "weighted_by_a_kernel": Piece(code="w = jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1)).sum(1)"),
    "noisy": Piece(code="x = x + 0.1 * jax.random.normal($k, x.shape)"),
    "sorted_data": Piece(code="x = jnp.sort(x, axis=0)"),
    "centred_sequences": Piece(code="s = s - s.mean((0, 1))"),
    "labels_shifted": Piece(code="y = (y + 1) % D"),
    "scaled_by_the_largest": Piece(code="x = x / abs(x).max()"),
}
"""What is done with data before the loss."""

LOSSES = {
    "mean_of_squares": Piece(code="value = (h**2).mean()"),
    "sum_of_squares": Piece(code="value = ((h - x) ** 2).sum() / 8"),
    "mean_by_python": Piece(code="value = abs(h).sum() / n"),
    "cross_entropy": Piece(code="value = -jax.nn.log_softmax(h)[jnp.arange(n), y].mean()"),
    "cross_entropy_by_take": Piece(
        code="value = -jnp.take_along_axis(jax.nn.log_softmax(h), y[:, None], axis=1).mean()"
    ),
    "cross_entropy_by_one_hot": Piece(code="value = -(jax.nn.log_softmax(h) * jax.nn.one_hot(y, D)).sum() / n"),
    "cross_entropy_of_flat_tokens": Piece(
        code="z = jax.nn.log_softmax((h[:, None] * s).reshape(-1, D))\n"
        "value = -z[jnp.arange(n * T), jnp.repeat(y, T)].mean()"
    ),
    "weighted": Piece(code="value = ((h**2).sum(1) * w).mean()"),
    "masked_mean": Piece(code="value = ((h**2).sum(1) * (y > 1)).sum() / ((y > 1).sum() + 1)"),
    "weighted_mean": Piece(code="value = ((h**2).sum(1) * w).sum() / (w.sum() + 1)"),
    "two_denominators": Piece(code="value = (h * x).sum() / ((y > 1).sum() + abs(x).sum() + 1)"),
    "two_terms": Piece(code="value = (h**2).mean() + ((h * x).sum(1) * (y > 1)).sum() / ((y > 1).sum() + 1)"),
    "z_loss": Piece(code="value = (jax.nn.logsumexp(h, axis=1) ** 2).mean()"),
    "huber": Piece(code="value = jnp.where(abs(h - x) < 1, (h - x) ** 2, abs(h - x)).mean()"),
    "by_psum": Piece(code="value = jax.vmap(lambda v: jax.lax.psum((v**2).sum(), 'n') / 8, axis_name='n')(h)[0]"),
    "by_pmean": Piece(
        code="value = jax.vmap(lambda v: jax.lax.pmean((v**2).sum(), 'n'), axis_name='n', out_axes=None)(h)"
    ),
    "by_map": Piece(code="value = jax.lax.map(lambda v: (v[0] * v[1]).sum(), (h, x)).mean()"),
    "by_vmap": Piece(code="value = jax.vmap(lambda v, i: -jax.nn.log_softmax(v)[i])(h, y).mean()"),
    "by_dot": Piece(code="value = jnp.vdot(h, x) / n"),
    "by_classes": Piece(code="value = jax.ops.segment_sum((h**2).sum(1), y, D).sum() / n"),
    "within_samples": Piece(
        code="z = h[:, None] * s\nvalue = jax.nn.logsumexp(z @ z.swapaxes(1, 2), axis=(1, 2)).mean()"
    ),
    "in_halves": Piece(code="u, v = (h**2).reshape(2, n // 2, D)\nvalue = (u.mean() + v.mean()) / 2", label="pairs"),
    "by_a_scan": Piece(code="value = jax.lax.scan(lambda c, v: (c + (v**2).sum(), None), 0.0, h)[0]", label="unknown"),
    "by_a_scan_from_one": Piece(
        code="value = jax.lax.scan(lambda c, v: (c + (v**2).sum(), None), 1.0, h)[0]", label="unknown"
    ),
    "by_a_fori_loop": Piece(
        code="value = jax.lax.fori_loop(0, n, lambda i, c: c + (h[i] ** 2).sum(), 0.0) / n", label="unknown"
    ),
    "counted_by_positions": Piece(code="value = (h**2).sum() / (jnp.arange(n)[-1] + 1)", label="unknown"),
    "first_half": Piece(code="value = (h[: n // 2] ** 2).mean()", label="unknown"),
    "root": Piece(code="value = jnp.sqrt((h**2).mean())", label="mixed"),
    "logarithm": Piece(code="value = jnp.log((h**2).mean() + 1)", label="mixed"),
    "largest": Piece(code="value = (h**2).sum(1).max()", label="mixed"),
    "logsumexp": Piece(code="value = jax.nn.logsumexp(h.sum(1))", label="mixed"),
    "spread": Piece(code="value = (h**2).sum(1).std()", label="mixed"),
    "product_of_means": Piece(code="value = (h**2).mean() * (h * x).mean()", label="mixed"),
    "contrast": Piece(code="value = -jnp.diagonal(jax.nn.log_softmax(h @ x.T)).mean()", label="unknown"),
    "contrast_of_hidden": Piece(code="value = -jnp.diagonal(jax.nn.log_softmax(h @ h.T)).mean()", label="mixed"),
    "divided_by_hidden": Piece(code="value = (h * x).sum() / ((h**2).sum() + 1)", label="mixed"),
    "hardest": Piece(code="value = jax.lax.top_k((h**2).sum(1), 3)[0].mean()", label="mixed"),
    "ordered": Piece(code="value = (jnp.sort((h**2).sum(1)) * jnp.arange(n)).mean()", label="mixed"),
    "running_mean": Piece(
        code="value = jax.lax.scan(lambda c, v: (0.9 * c + (v**2).sum(), None), 0.0, h)[0]", label="unknown"
    ),
    "balance": Piece(
        code="g = jax.nn.softmax(h)\nvalue = (g.mean(0) * jax.nn.one_hot(g.argmax(1), D).mean(0)).sum()", label="mixed"
    ),
    "squashed": Piece(code="value = jnp.tanh((h**2).mean())", label="mixed"),
}
"""From hidden values to the loss."""

EXTRAS = {
    "weight_decay": Piece(code="more = more + 0.01 * sum((v**2).sum() for v in jax.tree.leaves(p))"),
    "constant": Piece(code="more = more + 0.5"),
    "own_parameter": Piece(code="more = more + jnp.tanh($a).sum()", params="a=D"),
    "one_over_samples": Piece(code="more = more + ($a**2).sum() / n", params="a=D"),
    "auxiliary_mean": Piece(code="more = more + 0.1 * (h @ $a).mean()", params="a=D"),
    "slopes": Piece(
        code="more = more + (jax.grad(lambda x: jnp.tanh(x @ $a).sum())(x) ** 2).sum(1).mean()", params="a=D,D"
    ),
    "to_the_power_of_samples": Piece(
        code="more = more + (0.9 * jnp.tanh($a) ** n).sum()", params="a=D", label="unknown"
    ),
    "product_with_the_loss": Piece(code="more = more + 0.1 * (h * x).mean() * (h**2).mean()", label="mixed"),
}
"""What is added to the loss."""

METRICS = {
    "samples": Piece(code="h, h.argmax(1)"),
    "flags": Piece(code="h > 0, jnp.isnan(h).any(1)"),
    "means": Piece(code="h.mean(0), (h**2).sum()"),
    "extremes": Piece(code="h.max(), h.min(0), abs(h).max(0)"),
    "any_and_all": Piece(code="(h > 0.5).any(), (h > -5).all(0)"),
    "accuracy": Piece(code="(h.argmax(1) == y).mean(), (h.argmax(1) == y).sum()"),
    "confusion": Piece(code="jnp.zeros((D, D), jnp.int32).at[y, h.argmax(1)].add(1),"),
    "counts": Piece(code="jnp.bincount(y, length=D), jnp.zeros(D).at[y].add(w)"),
    "sums_of_classes": Piece(code="jax.ops.segment_sum(h, y, D), jax.nn.one_hot(y, D).T @ h"),
    "second_moments": Piece(code="h.T @ h, jnp.linalg.norm(h)"),
    "data": Piece(code="x, x.mean(0), y"),
    "parameters": Piece(code="sum((v**2).sum() for v in jax.tree.leaves(p)),"),
    "derived": Piece(code="jnp.exp((h**2).mean()), (h**2).mean(0) - h.mean(0) ** 2"),
    "number": Piece(code="jnp.float32(n), jnp.arange(n)", label="unknown"),
    "reversed": Piece(code="h[::-1],", label="unknown"),
    "ordered": Piece(code="jnp.sort(h, axis=0), h.argmax(0)", label="unknown"),
    "variance": Piece(code="h.var(0),", label="unknown"),
    "median": Piece(code="jnp.median(h, axis=0),", label="unknown"),
    "first_and_last": Piece(code="h[0], h[-1]", label="unknown"),
    "flattened": Piece(code="h.reshape(-1), h.T", label="unknown"),
    "pairs": Piece(code="h @ h.T,", label="unknown"),
    "running": Piece(code="jnp.cumsum(h, axis=0),", label="unknown"),
    "product": Piece(code="(1 + 0.1 * h).prod(),", label="unknown"),
    "bits": Piece(
        code="jnp.bitwise_or.reduce(1 << h.argmax(1)), jnp.bitwise_and.reduce(~(1 << h.argmax(1))), "
        "jnp.bitwise_xor.reduce((h > 0).astype(jnp.uint8) << jnp.arange(D, dtype=jnp.uint8), axis=0)",
        label="unknown",
    ),
    "bits_by_a_scan": Piece(
        code="jax.lax.scan(lambda c, v: (c | 1 << v.argmax(), None), 1, h)[0], "
        "jax.lax.scan(lambda c, v: (c ^ (v[0] > 0), None), True, h)[0]",
        label="unknown",
    ),
    "flags_by_a_scan": Piece(
        code="jax.lax.scan(lambda c, v: (c | (v > 0.8).any(), None), False, h)[0], "
        "jax.lax.scan(lambda c, v: (c & (v > -0.8).all(), None), True, h)[0]",
        label="unknown",
    ),
    "whole_numbers": Piece(code="(h * 10).astype(jnp.int32).sum(0), (h * 10).astype(jnp.uint8).max(1)"),
    "numbers_by_a_scan": Piece(
        code="jax.lax.scan(lambda c, v: (c + v.argmax(), None), 3, h)[0], "
        "jax.lax.scan(lambda c, v: (jnp.minimum(c, v.argmax()), None), 9, h)[0]",
        label="unknown",
    ),
}
"""What the step returns beside: tuples of arrays."""

WRAPPERS = {
    "plain": Piece(code="(value, aux), grads = jax.value_and_grad(loss, has_aux=True)(p, x, y, s, w, key)"),
    "checkpointed_loss": Piece(
        code="(value, aux), grads = jax.value_and_grad(jax.checkpoint(loss), has_aux=True)(p, x, y, s, w, key)"
    ),
    "pulled_back": Piece(
        code="value, pull, aux = jax.vjp(lambda p: loss(p, x, y, s, w, key), p, has_aux=True)\n"
        "(grads,) = pull(jnp.ones_like(value))"
    ),
    "jitted": Piece(code="(value, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(p, x, y, s, w, key)"),
    "per_sample": Piece(
        code="def one(*sample):\n"
        "    return jax.value_and_grad(loss, has_aux=True)(p, *[a[None] for a in sample], key)\n"
        "(value, aux), grads = jax.vmap(one)(x, y, s, w)\n"
        "value, grads = value.mean(), jax.tree.map(lambda g: g.mean(0), grads)"
    ),
    "per_sample_clipped": Piece(
        code="def one(*sample):\n"
        "    result, grads = jax.value_and_grad(loss, has_aux=True)(p, *[a[None] for a in sample], key)\n"
        "    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)) + 1e-6)\n"
        "    return result, jax.tree.map(lambda g: g * jnp.minimum(1, 0.1 / norm), grads)\n"
        "(value, aux), grads = jax.vmap(one)(x, y, s, w)\n"
        "value, grads = value.mean(), jax.tree.map(lambda g: g.sum(0), grads)"
    ),
    "per_sample_pmean": Piece(
        code="def one(*sample):\n"
        "    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(p, *[a[None] for a in sample], key)\n"
        "    return jax.lax.pmean(value, 'samples'), aux, jax.lax.pmean(grads, 'samples')\n"
        "value, aux, grads = jax.vmap(one, axis_name='samples', out_axes=(None, 0, None))(x, y, s, w)"
    ),
    "accumulated": Piece(
        code="parts = [a.reshape(2, n // 2, *a.shape[1:]) for a in (x, y, s, w)]\n"
        "both = [jax.value_and_grad(loss, has_aux=True)(p, *[a[i] for a in parts], key) for i in range(2)]\n"
        "(value, aux), grads = jax.tree.map(lambda *a: (a[0] + a[1]) / 2 if a[0].ndim < 1 else a, *both)\n"
        "value, grads = both[0][0][0] + both[1][0][0], jax.tree.map(jnp.add, both[0][1], both[1][1])",
        label="pairs",
    ),
    "accumulated_by_a_scan": Piece(
        code="def body(grads, part):\n"
        "    result, own = jax.value_and_grad(loss, has_aux=True)(p, *part, key)\n"
        "    return jax.tree.map(jnp.add, grads, own), result\n"
        "parts = tuple(a.reshape(2, n // 2, *a.shape[1:]) for a in (x, y, s, w))\n"
        "grads, (value, aux) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, p), parts)\n"
        "value = value.mean()",
        label="pairs",
    ),
    "minibatch_descent": Piece(
        code="def body(q, part):\n"
        "    result, own = jax.value_and_grad(loss, has_aux=True)(q, *part, key)\n"
        "    return jax.tree.map(lambda v, g: v - 0.3 * g, q, own), result\n"
        "parts = tuple(a.reshape(2, n // 2, *a.shape[1:]) for a in (x, y, s, w))\n"
        "q, (value, aux) = jax.lax.scan(body, p, parts)\n"
        "value, grads = value.mean(), jax.tree.map(jnp.subtract, p, q)",
        label="mixed",
    ),
    "sharpness_aware": Piece(
        code="first = jax.grad(lambda p: loss(p, x, y, s, w, key)[0])(p)\n"
        "q = jax.tree.map(lambda v, g: v + 0.1 * g, p, first)\n"
        "(value, aux), grads = jax.value_and_grad(loss, has_aux=True)(q, x, y, s, w, key)",
        label="mixed",
    ),
    "slopes_in_one_direction": Piece(
        code="_, t = jax.jvp(lambda p: loss(p, x, y, s, w, key)[0], (p,), (p,))\n"
        "(value, aux), grads = jax.value_and_grad(loss, has_aux=True)(p, x, y, s, w, key)\n"
        "value = value + 0.1 * t"
    ),
    "curvature": Piece(
        code="g = jax.grad(lambda p: loss(p, x, y, s, w, key)[0])\n"
        "value, aux = loss(p, x, y, s, w, key)\n"
        "grads = jax.tree.map(lambda g, v: g + 0.1 * v, *jax.jvp(g, (p,), (p,)))"
    ),
}
"""From the loss to `value`, `aux` and `grads`."""

UPDATES = {
    "descent": Piece(code="new['net'] = jax.tree.map(lambda v, g: v - 0.5 * g, p, grads)"),
    "momentum": Piece(
        code="new['m'] = jax.tree.map(lambda m, g: 0.9 * m + g, state['m'], grads)\n"
        "new['net'] = jax.tree.map(lambda v, m: v - 0.1 * m, p, new['m'])",
        state="m=net",
    ),
    "adam": Piece(
        code="new['m'] = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state['m'], grads)\n"
        "new['v'] = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, state['v'], grads)\n"
        "new['net'] = jax.tree.map(lambda q, m, v: q - 0.1 * m / (jnp.sqrt(abs(v)) + 0.1), p, new['m'], new['v'])",
        state="m=net v=net",
    ),
    "clipped": Piece(
        code="norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)) + 1e-6)\n"
        "new['net'] = jax.tree.map(lambda v, g: v - jnp.minimum(1, 0.5 / norm) * g, p, grads)"
    ),
    "rate_by_the_loss": Piece(code="new['net'] = jax.tree.map(lambda v, g: v - 0.5 / (1 + value**2) * g, p, grads)"),
    "skipped": Piece(
        code="fine = jnp.isfinite(value) & (abs(value) < 100)\n"
        "new['net'] = jax.lax.cond(fine, lambda g: jax.tree.map(lambda v, g: v - 0.3 * g, p, g), lambda g: p, grads)"
    ),
    "rate_by_samples": Piece(
        code="new['net'] = jax.tree.map(lambda v, g: v - 0.05 * n * g, p, grads)", label="unknown"
    ),
    "decay_by_samples": Piece(
        code="new['net'] = jax.tree.map(lambda v, g: v * (0.9 + 0.0 * v) ** n - 0.3 * g, p, grads)", label="unknown"
    ),
}
"""From gradients to new parameters."""

STATES = {
    "class_counts": Piece(code="new['n'] = state['n'].at[y].add(1.0)", state="n=D"),
    "token_sums": Piece(code="new['t'] = state['t'].at[jnp.repeat(y, T)].add(s.reshape(-1, D))", state="t=D,D"),
    "steps": Piece(code="new['i'] = state['i'] + 1", state="i="),
    "running_mean_of_data": Piece(code="new['u'] = 0.9 * state['u'] + 0.1 * x.mean(0)", state="u=D"),
    "running_loss": Piece(code="new['l'] = 0.9 * state['l'] + 0.1 * value", state="l="),
    "running_maximum": Piece(code="new['c'] = jnp.maximum(state['c'], abs(x).max(0))", state="c=D"),
    "average_of_parameters": Piece(
        code="new['a'] = jax.tree.map(lambda a, v: 0.9 * a + 0.1 * v, state['a'], p)", state="a=net"
    ),
    "labels_seen": Piece(
        code="new['b'] = (state['b'].astype(jnp.int32) | jnp.bitwise_or.reduce(1 << y)).astype(jnp.float32)", state="b="
    ),
    "samples_seen": Piece(code="new['j'] = state['j'] + n", state="j=", label="unknown"),
    "decay_of_samples": Piece(code="new['d'] = state['d'] ** n", state="d=", label="unknown"),
}
"""What is kept in the state beside."""

SLOTS = {
    "data": DATA,
    "hidden": HIDDEN,
    "loss": LOSSES,
    "extras": EXTRAS,
    "metrics": METRICS,
    "wrapper": WRAPPERS,
    "update": UPDATES,
    "states": STATES,
}
