"""Programs for one GPU, whose steps take 20 to 300 ms on an H100, and small ones of the same kinds (`cases`).

GPT, Llama, mixture of experts, ResNet, MLP   the built-in models
`Blocks`                                      a transformer without embeddings, whose attention is a choice (`Attend`)
`VisionTransformer`                           blocks on patches of images
`Kernel`                                      attention alone, with gradients
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.cli.models.alpa_cases import moe
from alpa_lite.cli.models.decoders import GPT, Llama
from alpa_lite.cli.models.model_parts import cross_entropy
from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.cli.models.skip_networks import ResNet
from alpa_lite.cli.models.train import Adam, Optimizer, Transformation
from alpa_lite.cli.models.transformer import Computation


class Attend(enum.StrEnum):
    """Implementations of attention."""

    XLA = "xla"
    CUDNN = "cudnn"
    TRITON = "pallas triton"
    MOSAIC = "pallas mosaic gpu"

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True) -> jax.Array:
        """Return attention of arrays [batch, length, heads, width]."""
        scale = q.shape[-1] ** -0.5
        if self is Attend.TRITON:
            from jax.experimental.pallas.ops.gpu.attention import mha

            interpret = jax.default_backend() == "cpu"
            return mha(q, k, v, None, sm_scale=scale, causal=causal, interpret=interpret)
        if self is Attend.MOSAIC:
            from jax.experimental.pallas.ops.gpu import attention_mgpu as mgpu

            blocks = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
            tuning = mgpu.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2, causal=causal, **blocks)
            # JAX 0.11 has the blocks of this kernel in float16.
            q, k, v = (x.astype(jnp.float16) for x in (q * scale, k, v))
            made: Any = mgpu.attention(q, k, v, tuning)
            return made.astype(jnp.bfloat16)
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Pre-norm transformer blocks on vectors, trained to map them to others; weights are float32."""

    num_layers: int
    hidden: int
    num_heads: int
    seq_len: int
    attend: Attend
    causal: bool = True

    def init(self, key: jax.Array) -> Any:
        """Draw the weights."""
        n, heads = self.hidden, (self.num_heads, self.hidden // self.num_heads)
        shapes = {name: (n, *heads) for name in "qkv"} | {"out": (*heads, n), "up": (n, 4 * n), "down": (4 * n, n)}
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        layers = self.num_layers
        return {name: 0.02 * jax.random.normal(keys[name], (layers, *shape)) for name, shape in shapes.items()}

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes."""
        shape = jax.ShapeDtypeStruct((batch_size, self.seq_len, self.hidden), jnp.float32)
        return {"x": shape, "y": shape}

    limits: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    def __call__(self, params: Any, x: jax.Array) -> jax.Array:
        """Apply the blocks in bfloat16, [batch, length, hidden] -> same."""

        def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights)
            h = normed(x)
            q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[name]) for name in "qkv")
            x = x + jnp.einsum("bthk,hkd->btd", self.attend(q, k, v, causal=self.causal), w["out"])
            return x + jax.nn.gelu(normed(x) @ w["up"]) @ w["down"], None

        return jax.lax.scan(block, x.astype(jnp.bfloat16), params)[0]

    def loss_fn(self, params: Any, batch: Mapping[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
        """Mean square error."""
        return jnp.mean(jnp.square(normed(self(params, batch["x"])).astype(jnp.float32) - batch["y"]))


def normed(x: jax.Array) -> jax.Array:
    """Divide by the root mean square over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)).astype(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTransformer:
    """A vision transformer: patches by a convolution, blocks, and a class from the mean of the tokens."""

    image_size: int
    patch: int
    blocks: Blocks
    num_classes: int = 1000

    def init(self, key: jax.Array) -> Any:
        """Draw the weights."""
        keys, n = jax.random.split(key, 3), self.blocks.hidden
        patch = 0.02 * jax.random.normal(keys[0], (self.patch, self.patch, 3, n))
        head = 0.02 * jax.random.normal(keys[1], (n, self.num_classes))
        return {"patch": patch, "head": head, "blocks": self.blocks.init(keys[2])}

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes."""
        images = (batch_size, self.image_size, self.image_size, 3)
        labels = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
        return {"images": jax.ShapeDtypeStruct(images, jnp.float32), "labels": labels}

    @property
    def limits(self) -> dict[str, int]:
        """Return the exclusive upper bound of the integers of each array of a batch, by name."""
        return {"labels": self.num_classes}

    def loss_fn(self, params: Any, batch: Mapping[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
        """Mean cross entropy of the classes."""
        strides, layout = (self.patch, self.patch), ("NHWC", "HWIO", "NHWC")
        images, patch = (x.astype(jnp.bfloat16) for x in (batch["images"], params["patch"]))
        x = jax.lax.conv_general_dilated(images, patch, strides, "VALID", dimension_numbers=layout)
        x = self.blocks(params["blocks"], x.reshape(x.shape[0], -1, self.blocks.hidden))
        logits = normed(x).mean(1) @ params["head"].astype(jnp.bfloat16)
        return cross_entropy(logits, batch["labels"]).mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Attention alone, with gradients: the weights are its operands."""

    attend: Attend
    shape: tuple[int, int, int, int]

    def init(self, key: jax.Array) -> Any:
        """Draw queries, keys and values."""
        keys = jax.random.split(key, 3)
        return {name: jax.random.normal(k, self.shape, jnp.bfloat16) for name, k in zip("qkv", keys, strict=True)}

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes; the gradients of the results."""
        return {"g": jax.ShapeDtypeStruct(self.shape, jnp.bfloat16)}

    limits: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])

    def loss_fn(self, params: Any, batch: Mapping[str, jax.Array], key: jax.Array | None = None) -> jax.Array:
        """Return the product of results and gradients."""
        made = self.attend(params["q"], params["k"], params["v"])
        return jnp.mean(made.astype(jnp.float32) * batch["g"].astype(jnp.float32))


def descent(rate: float) -> Optimizer:
    """Return plain gradient descent."""
    return Optimizer(lambda params: (), lambda grads, state, params: (jax.tree.map(lambda g: -rate * g, grads), ()))


_ADAM = Adam(1e-3, eps=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program: a model, samples per step, micro-batches of the plan, and tolerances of the results."""

    name: str
    model: Any
    batch_size: int
    num_microbatches: int = 1
    optimizer: Transformation = _ADAM
    rtol: float = 2e-2
    atol: float = 1e-2


def cases(*, tiny: bool) -> list[Case]:
    """Return the programs, those first that are to run if time is short."""
    bf16, f32 = jnp.bfloat16, jnp.float32
    small = {"num_layers": 12, "hidden": 768, "num_heads": 12, "seq_len": 1024, "vocab_size": 50304}
    medium = {"num_layers": 24, "hidden": 1024, "num_heads": 16, "seq_len": 1024, "vocab_size": 50304}
    medium |= {"scan_layers": True}
    llama = Llama(
        vocab_size=32000, num_layers=8, num_heads=16, num_kv_heads=4, hidden=2048, inner=5632, scan_layers=True
    )
    resnet, mlp = ResNet(dtype=bf16), MLP(in_features=8192, hidden=8192, out_features=8192, num_layers=6, dtype=bf16)
    mixture = dataclasses.replace(moe(768, 8, 8), computation=Computation(num_segments=1, dtype=bf16))
    attending: dict[str, Any] = {"num_layers": 8, "hidden": 1024, "num_heads": 16, "seq_len": 2048}
    vit = Blocks(num_layers=12, hidden=1024, num_heads=16, seq_len=256, attend=Attend.XLA, causal=False)
    vision = VisionTransformer(image_size=224, patch=14, blocks=vit)
    alone, kernels, samples = (4, 8192, 16, 128), [*Attend], 8
    if tiny:
        small = {"num_layers": 2, "hidden": 32, "num_heads": 2, "seq_len": 16, "vocab_size": 64}
        medium = {**small, "scan_layers": True}
        llama = dataclasses.replace(
            llama, vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden=32, inner=48, seq_len=16
        )
        resnet = ResNet(image_size=32, channels=4, stage_sizes=(1, 1), num_classes=10)
        mlp = MLP(in_features=32, hidden=32, out_features=32, num_layers=2, dtype=bf16)
        assert mixture.experts is not None
        experts = dataclasses.replace(mixture.experts, group_size=16)
        mixture = dataclasses.replace(
            mixture, vocab_size=64, num_layers=2, hidden=32, num_heads=2, inner=64, seq_len=16, experts=experts
        )
        attending = {"num_layers": 1, "hidden": 32, "num_heads": 2, "seq_len": 128}
        vision = VisionTransformer(
            image_size=28, patch=14, blocks=dataclasses.replace(vit, num_layers=1, hidden=32, num_heads=2, seq_len=4)
        )
        alone, kernels, samples = (1, 128, 2, 16), [Attend.XLA, Attend.TRITON], 4

    def blocks(attend: Attend) -> Case:
        return Case(name=f"blocks, {attend}", model=Blocks(**attending, attend=attend), batch_size=samples)

    def kernel(attend: Attend) -> Case:
        model = Kernel(attend=attend, shape=alone)
        return Case(name=f"attention alone, {attend}", model=model, batch_size=alone[0], optimizer=descent(1.0))

    def gpt(name: str, sizes: Mapping[str, Any], batch_size: int, dtype: Any, **options: Any) -> Case:
        model = GPT(**sizes, dtype=dtype, **options)
        if dtype == bf16:
            return Case(name=name, model=model, batch_size=batch_size)
        # XLA rounds the operands of float32 products to TensorFloat-32, whose mantissa has 10 bits.
        return Case(name=name, model=model, batch_size=batch_size, rtol=1e-2, atol=1e-4)

    some = {attend: (blocks(attend), kernel(attend)) for attend in kernels}
    by_hand = [row for attend in kernels[1:] for row in some[attend]]
    return [
        gpt("GPT 124M, bf16", small, 2 * samples, bf16),
        Case(name="Llama 0.5B", model=llama, batch_size=samples),
        Case(name="Llama 0.5B, 4 micro-batches", model=llama, batch_size=samples, num_microbatches=4),
        gpt("GPT 124M, fp32", {**small, "scan_layers": True}, 2 * samples, f32),
        *by_hand[:4],
        gpt("GPT 350M, bf16, remat", medium, 2 * samples, bf16, remat=True),
        Case(name="mixture of experts", model=mixture, batch_size=2 * samples),
        Case(name="MLP, bf16", model=mlp, batch_size=1024 * samples),
        *some[Attend.XLA],
        Case(name="ResNet-50, bf16", model=resnet, batch_size=16 * samples),
        Case(name="ViT, bf16", model=vision, batch_size=16 * samples),
        *by_hand[4:],
        gpt("GPT 350M, bf16", medium, samples, bf16),
        gpt("GPT 350M, fp32", medium, samples, f32),
        gpt("GPT 124M, fp32, remat", {**small, "scan_layers": True}, 2 * samples, f32, remat=True),
    ]
