"""The ops of the instructions of compiled programs, read from their text."""

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.errors import ExecutionError
from alpa_lite.runtime.execute.hlo_kernels import hlo_kernels


def text_of(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text()


def loop(x, w):
    """Op 3 is a loop with op 5 in its body; op 7 multiplies."""

    def body(h, _):
        with jax.named_scope("body0"), jax.named_scope("op5"):
            return jnp.sin(h) @ w, None

    with jax.named_scope("op3"):
        h, _ = jax.lax.scan(body, x, length=3)
    with jax.named_scope("op7"):
        h = h @ w
    with jax.named_scope("sums"):
        return jnp.cos(h)


def test_paths_are_those_of_the_scopes():
    kernels = hlo_kernels(text_of(loop, (8, 8), (8, 8)))
    (outer,) = [k for k in kernels.values() if k.opcode == "while"]
    assert outer.ops[0] == (3,) and (3, 0, 5) in outer.ops and outer.calls
    products = {k.ops[0] for k in kernels.values() if k.product and k.opcode != "while"}
    assert products == {(3, 0, 5), (7,)}
    assert any(k.sums and not k.ops for k in kernels.values())
    # What an instruction calls is in the text as well.
    assert all(kernels.keys() >= k.calls for k in kernels.values())


def test_fusions_run_the_ops_of_their_computation():
    def fused(x):
        with jax.named_scope("op0"):
            y = jnp.sin(x)
        with jax.named_scope("op1"):
            return y * x

    kernels = hlo_kernels(text_of(fused, (64, 64)))
    assert any(k.opcode == "fusion" and set(k.ops) == {(0,), (1,)} for k in kernels.values())


def test_names_of_functions_are_no_scopes():
    def op2(x):
        return jnp.sin(x)

    kernels = hlo_kernels(text_of(lambda x: jax.jit(op2)(x), (4,)))
    assert not any(k.ops for k in kernels.values())


def test_results_that_are_tuples_and_comments():
    line = (
        '  %a.1 = (f32[8]{0}, /*index=1*/(s32[], f32[2,3]{1,0})) custom-call(%p), metadata={op_name="jit(f)/op4/b/op5"}'
    )
    kernels = hlo_kernels(f"ENTRY %main (p: f32[]) -> f32[] {{\n{line}\n}}\n")
    assert kernels["a.1"].opcode == "custom-call" and kernels["a.1"].ops == ((4,),)


def test_other_text_is_refused():
    with pytest.raises(ExecutionError, match="no instructions"):
        hlo_kernels("module @jit_f {}")
