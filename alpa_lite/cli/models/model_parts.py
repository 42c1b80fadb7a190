"""What the models share: their interface, weights drawn from shapes, dropout, and losses.

- interface: `Model`, and `Classifier` of images or tokens;
- weights of layers with ``w`` and ``b``: He initialisation, and zeros (`draw_layers`);
- other weights: the name of a shape in a tree decides how it is drawn: ``scale`` as ones, ``bias``, ``b``, ``b_*`` and
  ``vocab_bias`` as zeros, anything else normal(0.02) (`draw_weights`);
- dropout: masks of one byte per number (`drop`);
- cross entropy: ``losses = -log_softmax(logits)[label]`` (`cross_entropy`), in float32;
- reduction: ``mean(losses)`` or ``sum(losses)`` (`reduce_losses`).
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from math import prod
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Tree = Any
"""A pytree: nested dicts and lists whose leaves are arrays."""

Shapes = Tree
"""A pytree of dicts and lists whose leaves are shapes."""


def stacked_shapes(shapes: Shapes, size: int) -> Shapes:
    """Return the shapes of `size` trees of these shapes, stacked along a leading dim."""
    return jax.tree.map(lambda shape: (size, *shape), shapes, is_leaf=_is_shape)


def draw_layers(key: jax.Array, shapes: Shapes, dtype: DTypeLike = jnp.float32) -> Tree:
    """Draw ``{"w": [..., in, out], "b": [out]}`` for each shape of a ``w``: He initialisation, zero biases."""

    def layer(key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        # With a variance of 2 / inputs, relu preserves the variance of activations (He et al. 2015).
        weights = jax.random.normal(key, shape, dtype) * (2.0 / prod(shape[:-1])) ** 0.5
        return {"w": weights, "b": jnp.zeros(shape[-1:], dtype)}

    leaves, structure = jax.tree.flatten(shapes, is_leaf=_is_shape)
    return jax.tree.unflatten(structure, map(layer, jax.random.split(key, len(leaves)), leaves))


def draw_weights(key: jax.Array, shapes: Shapes, dtype: DTypeLike, num_segments: int) -> dict[str, Tree]:
    """Draw weights of shapes in a dict whose ``layers``, and those of its ``encoder`` if there is one, are stacked.

    ``layers`` are split into a list of `num_segments` segments, on which the weights do not depend.
    """
    keys = iter(jax.random.split(key, len(jax.tree.leaves(shapes, is_leaf=_is_shape))))

    def one(path: tuple[Hashable, ...], shape: tuple[int, ...]) -> jax.Array:
        name, leaf_key = jax.tree_util.keystr(path[-1:], simple=True), next(keys)
        if name == "scale" or name.startswith("scale_"):
            return jnp.ones(shape, dtype)
        if name in ("bias", "b", "vocab_bias") or name.startswith("b_"):
            return jnp.zeros(shape, dtype)
        return 0.02 * jax.random.normal(leaf_key, shape, dtype)

    # Whole stacks are drawn before they are cut, so that the weights do not depend on the number of segments.
    params = jax.tree_util.tree_map_with_path(one, shapes, is_leaf=_is_shape)
    for stack in (params, params.get("encoder")):
        if stack is not None:
            stack["layers"] = _cut(stack["layers"], num_segments)
    return params


def segment_sizes(total: int, num_segments: int) -> tuple[int, ...]:
    """Return `num_segments` numbers with the sum `total`, as equal as possible, the larger ones in the middle."""
    size, larger = divmod(total, num_segments)
    first = (num_segments - larger) // 2
    return tuple(size + (first <= i < first + larger) for i in range(num_segments))


def _cut(layers: Tree, num_segments: int) -> list[Tree]:
    """Split the layers of one stack, leaves ``[layers, ...]``, into segments."""
    sizes = segment_sizes(jax.tree.leaves(layers)[0].shape[0], num_segments)
    ends = [sum(sizes[: i + 1]) for i in range(num_segments)]
    return [
        jax.tree.map(lambda leaf, end=end, size=size: leaf[end - size : end], layers)
        for end, size in zip(ends, sizes, strict=True)
    ]


def _is_shape(node: object) -> bool:
    # A tuple would otherwise be a node of the tree, and its numbers the leaves.
    return isinstance(node, tuple)


def drop(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    """Zero entries at a rate of `rate` (to 1/256) and scale up the others; the identity without a key or rate."""
    if key is None or not rate:
        return x
    # `jax.random.bernoulli` draws four bytes per number; one byte is enough for rates that are multiples of 1/256.
    threshold = round(256 * rate)
    keep = jax.random.bits(key, x.shape, jnp.uint8) >= threshold
    return jnp.where(keep, x * jnp.asarray(256 / (256 - threshold), x.dtype), jnp.zeros((), x.dtype))


Reduction = Literal["mean", "sum"]
"""The reduction of the losses of a batch's examples (or tokens) to one number."""


@jax.named_scope("cross_entropy")
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross entropy of each label, float32 in nats: ``[..., num_classes], [...] -> [...]``."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = labels[..., None] == jnp.arange(logits.shape[-1])
    # A masked sum is fused, stays in parts where the classes are split, and has no gradient that must be scattered.
    return -jnp.sum(jnp.where(chosen, log_probs, 0.0), axis=-1)


def reduce_losses(losses: jax.Array, reduction: Reduction) -> jax.Array:
    """Reduce ``[...]`` losses over every dim to a scalar."""
    if reduction == "mean":
        return jnp.mean(losses)
    if reduction == "sum":
        return jnp.sum(losses)
    raise ValueError(f"The reduction of a loss is 'mean' or 'sum'; got {reduction!r}.")


class Model(ABC):
    """The interface of all models, which are frozen dataclasses of their sizes."""

    @abstractmethod
    def init(self, key: jax.Array) -> Tree:
        """Draw the weights."""

    @abstractmethod
    def batch_shapes(self, batch_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch of `batch_size` samples as shapes."""

    @property
    def limits(self) -> Mapping[str, int]:
        """The exclusive upper bound of the integers of each array of a batch, by name."""
        return {}

    @abstractmethod
    def loss_fn(
        self,
        params: Tree,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Return the loss of a batch, a float32 scalar.

        Args:
            params: from `init`.
            batch: arrays of the names and shapes of `batch_shapes`.
            key: draws the dropout masks; None means no dropout. Models that draw nothing take it too.
            reduction: of the losses of all predictions of the batch.
        """

    def parameter_count(self) -> int:
        """Return the number of weights."""
        return sum(prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0))))


class Classifier(Model):
    """A model whose loss is the cross entropy of its logits; the class variables name two arrays of a batch."""

    inputs: ClassVar[str]
    labels: ClassVar[str]

    @abstractmethod
    def logits(self, params: Tree, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return the logits of the classes, ``[..., num_classes]``; a key draws dropout masks."""

    def loss_fn(
        self,
        params: Tree,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Return the cross entropy of the labels, a float32 scalar."""
        return reduce_losses(cross_entropy(self.logits(params, batch[self.inputs], key), batch[self.labels]), reduction)

    def loss_and_metrics(
        self,
        params: Tree,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the loss of `loss_fn`, and ``{"accuracy": float32 scalar}`` as an auxiliary output."""
        logits = self.logits(params, batch[self.inputs], key)
        losses = cross_entropy(logits, batch[self.labels])
        accuracy = jnp.mean((jnp.argmax(logits, axis=-1) == batch[self.labels]).astype(jnp.float32))
        return reduce_losses(losses, reduction), {"accuracy": accuracy}


class ImageClassifier(Classifier):
    """A classifier of square images."""

    inputs, labels = "images", "labels"
    image_size: int
    num_classes: int
    dtype: DTypeLike

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return ``images`` ``[batch, image_size, image_size, 3]`` and integer ``labels`` ``[batch]`` as shapes."""
        images = jax.ShapeDtypeStruct((batch_size, self.image_size, self.image_size, 3), self.dtype)
        return {"images": images, "labels": jax.ShapeDtypeStruct((batch_size,), jnp.int32)}

    @property
    def limits(self) -> dict[str, int]:
        """The exclusive upper bound of the labels."""
        return {"labels": self.num_classes}


class LanguageModel(Classifier):
    """A model that predicts the next token of a sequence."""

    inputs, labels = "tokens", "targets"
    vocab_size: int
    seq_len: int

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the integer arrays ``tokens`` and ``targets``, ``[batch, seq_len]``, as shapes."""
        return dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((batch_size, self.seq_len), jnp.int32))

    @property
    def limits(self) -> dict[str, int]:
        """The exclusive upper bound of the tokens and of the targets."""
        return dict.fromkeys(("tokens", "targets"), self.vocab_size)
