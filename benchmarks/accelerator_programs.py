"""Programs for one GPU, whose steps take 20 to 300 ms on an H100, and small ones of the same kinds (`cases`).

GPT, Llama, mixture of experts, T5, MLP,
ResNet, U-Net, LSTM layers                    the built-in models
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
from alpa_lite.cli.models.encoders import Translator
from alpa_lite.cli.models.model_parts import cross_entropy
from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.cli.models.skip_networks import ResNet, UNet
from alpa_lite.cli.models.train import Adam, Optimizer, Transformation
from alpa_lite.cli.models.transformer import Architecture, Computation, Encoder, Transformer


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


NUM_PREDICTED = 10
"""The first of `cases`, of every kind of model, whose predictions are judged; the others are variants and kernels."""


def cases(*, tiny: bool) -> list[Case]:
    """Return the programs, those first that are to run if time is short; `tiny` ones have the same names."""
    models, samples = _tiny_models() if tiny else _models(), 4 if tiny else 8
    gpt, llama = models["gpt"], models["llama"]
    medium, looped = models["medium"], dataclasses.replace(gpt, scan_layers=True, dtype=jnp.float32)

    def bf16(name: str, model: Any, batch_size: int, **options: Any) -> Case:
        return Case(name=name, model=model, batch_size=batch_size, **options)

    def fp32(name: str, model: Any, batch_size: int) -> Case:
        # XLA rounds the operands of float32 products to TensorFloat-32, whose mantissa has 10 bits.
        return Case(name=name, model=model, batch_size=batch_size, rtol=1e-2, atol=1e-4)

    def kernels(attend: Attend) -> tuple[Case, Case]:
        blocks = dataclasses.replace(models["blocks"], attend=attend)
        alone = dataclasses.replace(models["kernel"], attend=attend)
        return (
            bf16(f"blocks, {attend}", blocks, samples),
            bf16(f"attention alone, {attend}", alone, alone.shape[0], optimizer=descent(1.0)),
        )

    # Pallas interprets its kernel for Triton on CPUs; cuDNN and the other kernel are for GPUs alone.
    some = [row for attend in Attend if not tiny or attend in (Attend.XLA, Attend.TRITON) for row in kernels(attend)]
    return [
        bf16("GPT 124M, bf16", gpt, 2 * samples),
        bf16("Llama 0.5B", llama, samples),
        fp32("GPT 124M, fp32", looped, 2 * samples),
        bf16("mixture of experts", models["mixture"], 2 * samples),
        bf16("ResNet-50, bf16", models["resnet"], 16 * samples),
        bf16("ViT, bf16", models["vision"], 16 * samples),
        bf16("T5, bf16", models["t5"], 4 * samples),
        fp32("U-Net, fp32", models["unet"], samples),
        fp32("LSTM translator, fp32", models["translator"], 16 * samples),
        bf16("Llama 0.5B, 4 micro-batches", llama, samples, num_microbatches=4),
        *some,
        bf16("MLP, bf16", models["mlp"], 1024 * samples),
        bf16("GPT 350M, bf16, remat", dataclasses.replace(medium, remat=True), 2 * samples),
        bf16("GPT 350M, bf16", medium, samples),
        fp32("GPT 350M, fp32", dataclasses.replace(medium, dtype=jnp.float32), samples),
        fp32("GPT 124M, fp32, remat", dataclasses.replace(looped, remat=True), 2 * samples),
    ]


_T5 = Architecture(gated=True, norm="rms", positions="relative", bias=False, tied=False)


def _models() -> dict[str, Any]:
    half: dict[str, Any] = {"dtype": jnp.bfloat16}
    words: dict[str, Any] = {"seq_len": 1024, "vocab_size": 50304, **half}
    attending = Blocks(num_layers=8, hidden=1024, num_heads=16, seq_len=2048, attend=Attend.XLA)
    patches = dataclasses.replace(attending, num_layers=12, seq_len=256, causal=False)
    mixture = dataclasses.replace(moe(768, 8, 8), computation=Computation(num_segments=1, **half))
    return {
        "gpt": GPT(num_layers=12, hidden=768, num_heads=12, **words),
        "medium": GPT(num_layers=24, hidden=1024, num_heads=16, scan_layers=True, **words),
        "llama": Llama(
            vocab_size=32000, num_layers=8, num_heads=16, num_kv_heads=4, hidden=2048, inner=5632, scan_layers=True
        ),
        "mixture": mixture,
        "resnet": ResNet(**half),
        "vision": VisionTransformer(image_size=224, patch=14, blocks=patches),
        "t5": Transformer(
            vocab_size=32128,
            num_layers=12,
            hidden=768,
            num_heads=12,
            inner=2048,
            seq_len=128,
            architecture=_T5,
            encoder=Encoder(num_layers=12, seq_len=512),
            computation=Computation(fused=False),
        ),
        "unet": UNet(),
        "translator": Translator(),
        "mlp": MLP(in_features=8192, hidden=8192, out_features=8192, num_layers=6, **half),
        "blocks": attending,
        "kernel": Kernel(attend=Attend.XLA, shape=(4, 8192, 16, 128)),
    }


def _tiny_models() -> dict[str, Any]:
    """Return models of the same kinds whose steps take milliseconds on a CPU."""
    models = _models()
    words: dict[str, Any] = {"num_layers": 2, "hidden": 32, "num_heads": 2, "seq_len": 16, "vocab_size": 64}
    attending: dict[str, Any] = {"num_layers": 1, "hidden": 32, "num_heads": 2}
    experts = dataclasses.replace(models["mixture"].experts, group_size=16)
    smaller: dict[str, dict[str, Any]] = {
        "gpt": words,
        "medium": words,
        "llama": {**words, "num_heads": 4, "num_kv_heads": 2, "inner": 48},
        "mixture": {**words, "inner": 64, "experts": experts},
        "resnet": {"image_size": 32, "channels": 4, "stage_sizes": (1, 1), "num_classes": 10, "dtype": jnp.float32},
        "t5": {**words, "inner": 64, "encoder": Encoder(num_layers=2, seq_len=16)},
        "unet": {"image_size": 44, "channels": 4, "depth": 2},
        "translator": {
            "source_vocab": 64,
            "target_vocab": 64,
            "num_layers": 2,
            "hidden": 32,
            "source_len": 6,
            "target_len": 6,
        },
        "mlp": {"in_features": 32, "hidden": 32, "out_features": 32, "num_layers": 2},
        "blocks": {**attending, "seq_len": 128},
        "kernel": {"shape": (1, 128, 2, 16)},
    }
    patches = dataclasses.replace(models["vision"].blocks, **attending, seq_len=4)
    smaller["vision"] = {"image_size": 28, "blocks": patches}
    return {name: dataclasses.replace(model, **smaller[name]) for name, model in models.items()}
