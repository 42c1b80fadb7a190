"""Feed-forward layers: one MLP for all tokens, or experts of which each token visits a few.

    plain   = act(x w_up + b_up) w_down + b_down                                (`FeedForward.apply`)
    gated   = (act(x w_gate) * (x w_up)) w_down                                  (`FeedForward.apply`)
    experts = sum_e combine[s, e, c] MLP_e(sum_s' dispatch[s', e, c] x[s'])      (`Experts.apply`)

Experts follow GShard (Lepikhin et al. 2020, section 2 and algorithm 1): tokens come in groups of ``S``; in each group
an expert takes at most ``C = ceil(capacity_factor top_k S / num_experts)`` tokens, first choices before second ones,
earlier tokens before later ones, and drops the rest (`route`). The models add no auxiliary loss (`auxiliary_loss`).

Dispatching and combining cost ``4 capacity_factor top_k S hidden`` FLOPs per token, which grow with ``S``; the experts
cost ``4 capacity_factor top_k hidden inner`` (6 where gated). Their ratio is ``S / inner`` (``2 S / (3 inner)``): a
group of 256 tokens costs 0.5 % where `inner` is 32768. Systems that sort tokens instead have no such cost; a small
group with a capacity factor of 1 stands for them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from alpa_lite.cli.models.precision import Einsum

Weights = Mapping[str, jax.Array]
Activation = Literal["gelu", "relu", "squared_relu", "silu"]

NAMES = ("gate", "up", "down")
"""Names of the outputs of the dense contractions (`jax.ad_checkpoint.checkpoint_name`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Sizes and options of an MLP with one inner layer.

    Attributes:
        inner: width of the inner layer.
        gated: multiply the inner layer by an activated second projection.
        bias: whether projections add a bias; never where gated.
        fused: where gated, both inner projections by one contraction.
        einsum: carries out the projections (`precision.narrow_einsum` in a narrow format).
    """

    hidden: int
    inner: int
    activation: Activation
    gated: bool
    bias: bool
    fused: bool
    einsum: Einsum = jnp.einsum

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights by name."""
        hidden, inner = self.hidden, self.inner
        if self.gated and self.fused:
            return {"w_gate_up": (hidden, 2, inner), "w_down": (inner, hidden)}
        shapes: dict[str, tuple[int, ...]] = {"w_gate": (hidden, inner)} if self.gated else {}
        shapes |= {"w_up": (hidden, inner), "w_down": (inner, hidden)}
        return shapes | ({"b_up": (inner,), "b_down": (hidden,)} if self._has_bias else {})

    def apply(self, x: jax.Array, weights: Weights) -> jax.Array:
        """``[batch, seq, hidden] -> [batch, seq, hidden]``."""
        act = activation_function(self.activation)
        if not self.gated:
            up = self.einsum("bsh,hi->bsi", x, weights["w_up"])
            inner = act(checkpoint_name(up + weights["b_up"] if self._has_bias else up, "up"))
        elif self.fused:
            both = checkpoint_name(self.einsum("bsh,hti->bsti", x, weights["w_gate_up"]), "up")
            inner = act(both[:, :, 0]) * both[:, :, 1]
        else:
            gate, up = (self.einsum("bsh,hi->bsi", x, weights[name]) for name in ("w_gate", "w_up"))
            inner = act(checkpoint_name(gate, "gate")) * checkpoint_name(up, "up")
        down = self.einsum("bsi,ih->bsh", inner, weights["w_down"])
        return checkpoint_name(down + weights["b_down"] if self._has_bias else down, "down")

    @property
    def _has_bias(self) -> bool:
        return self.bias and not self.gated


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Options of a mixture of experts; every expert is an MLP of the sizes of the model it stands in.

    Attributes:
        num_experts: MLPs to choose from.
        top_k: experts that each token visits.
        capacity_factor: room of an expert, in units of what it gets when all experts get the same.
        group_size: tokens that are routed together; divides a sequence, or holds whole ones.
        every: the last of every so many layers has experts, the others one MLP.
    """

    num_experts: int
    top_k: int = 2
    capacity_factor: float = 1.0
    group_size: int = 256
    every: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"Each token visits 1 to {self.num_experts} experts; got top_k={self.top_k}.")

    @property
    def capacity(self) -> int:
        """The number of tokens of a group that an expert takes."""
        return max(1, ceil(self.capacity_factor * self.top_k * self.group_size / self.num_experts))

    def shapes(self, mlp: FeedForward) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights by name; those of the MLPs have a leading dim of experts."""
        hidden, inner, count = mlp.hidden, mlp.inner, self.num_experts
        return {
            "w_router": (hidden, count),
            "w_up": (count, hidden, 2, inner) if mlp.gated else (count, hidden, inner),
            "w_down": (count, inner, hidden),
        }

    def apply(self, x: jax.Array, weights: Weights, mlp: FeedForward) -> jax.Array:
        """``[batch, seq, hidden] -> [batch, seq, hidden]``."""
        tokens = self._groups(x)
        logits = jnp.einsum("bgsh,he->bgse", tokens, weights["w_router"])
        combine = route(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), self.top_k, self.capacity)
        dispatch, combine = (combine > 0.0).astype(x.dtype), combine.astype(x.dtype)
        act = activation_function(mlp.activation)
        inputs = jnp.einsum("bgsec,bgsh->ebgch", dispatch, tokens)
        if mlp.gated:
            both = checkpoint_name(mlp.einsum("ebgch,ehti->ebgcti", inputs, weights["w_up"]), "up")
            inner = act(both[..., 0, :]) * both[..., 1, :]
        else:
            inner = act(checkpoint_name(mlp.einsum("ebgch,ehi->ebgci", inputs, weights["w_up"]), "up"))
        outputs = checkpoint_name(mlp.einsum("ebgci,eih->ebgch", inner, weights["w_down"]), "down")
        return jnp.einsum("bgsec,ebgch->bgsh", combine, outputs).reshape(x.shape)

    def _groups(self, x: jax.Array) -> jax.Array:
        """``[batch, seq, hidden] -> [batch, groups, group_size, hidden]``; less batch for longer groups."""
        batch, seq, hidden = x.shape
        if seq % self.group_size and (self.group_size % seq or batch * seq % self.group_size):
            raise ValueError(
                f"A group holds whole sequences or divides one; got groups of {self.group_size} tokens for {batch} "
                f"sequences of {seq}. Choose another group_size or batch."
            )
        return x.reshape(-1, max(seq // self.group_size, 1), self.group_size, hidden)


def route(gates: jax.Array, top_k: int, capacity: int) -> jax.Array:
    """Assign tokens to slots of experts, with weights.

    Args:
        gates: probabilities of the experts, ``[..., tokens, experts]`` float32.
        top_k: experts per token.
        capacity: slots per expert and group.

    Returns:
        ``[..., tokens, experts, capacity]`` float32: the token's gates over its chosen experts, scaled to a sum of one;
        zero where it is not sent, or dropped because the expert is full.
    """
    num_experts = gates.shape[-1]
    remaining, taken = gates, jnp.zeros((*gates.shape[:-2], 1, num_experts), gates.dtype)
    total, combine = jnp.zeros(gates.shape[:-1], gates.dtype), jnp.zeros((*gates.shape, capacity), gates.dtype)
    for _ in range(top_k):
        chosen = jax.nn.one_hot(jnp.argmax(remaining, axis=-1), num_experts, dtype=gates.dtype)
        before = jnp.cumsum(chosen, axis=-2) - chosen + taken
        slot = jnp.sum(before * chosen, axis=-1).astype(jnp.int32)
        slots = jax.nn.one_hot(slot, capacity, dtype=gates.dtype)  # all zero beyond the capacity
        combine = combine + jnp.einsum("...se,...sc->...sec", gates * chosen, slots)
        total = total + jnp.sum(gates * chosen, axis=-1)
        taken = taken + jnp.sum(chosen, axis=-2, keepdims=True)
        remaining = jnp.where(chosen > 0.0, -1.0, remaining)
    return combine / total[..., None, None]


def auxiliary_loss(gates: jax.Array) -> jax.Array:
    """Return a loss that grows as fewer experts get most tokens (Lepikhin et al. 2020, algorithm 1).

    It is ``(1/E) sum_e (c_e / S) m_e``.

    Args:
        gates: probabilities of the experts, ``[..., tokens, experts]`` float32.

    Returns:
        ``[...]``: of each group, with ``c_e`` the tokens whose first choice is expert ``e`` and ``m_e`` its mean gate;
        ``1 / E**2`` where all experts get the same.
    """
    chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), gates.shape[-1], dtype=gates.dtype)
    return jnp.mean(jnp.mean(chosen, axis=-2) * jnp.mean(gates, axis=-2), axis=-1)


def activation_function(name: Activation) -> Callable[[jax.Array], jax.Array]:
    """Return the activation function of that name."""
    functions: dict[str, Callable[[jax.Array], jax.Array]] = {
        "gelu": jax.nn.gelu,
        "relu": jax.nn.relu,
        "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
        "silu": jax.nn.silu,
    }
    if name not in functions:
        raise ValueError(f"An activation is one of {', '.join(functions)}; got {name!r}.")
    return functions[name]
