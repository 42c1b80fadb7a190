"""The policy of a device placement: an LSTM with attention that names a device for each group of ops.

With e_1 … e_G what an LSTM makes of the embeddings of G groups, h_t the state of a second LSTM, which begins with the
last state of the first, and E the rows that stand for devices:

    h_t     = LSTM(h_(t-1), e_t + E[a_(t-1)])
    c_t     = Σ_i softmax_i(h_t A e_i) e_i                                              attention
    z_t     = K tanh([h_t, c_t] W / T) + noise
    a_t     ~ softmax(z_t),     log p = Σ_t log softmax(z_t)[a_t]                       `PlacementPolicy.sample`

    LSTM    i, f, o = sigmoid, g = tanh of x U + h V + b;  c' = f c + i g,  h' = o tanh(c')

`gradient` is that of Σ_b w_b log p_b for samples b with weights w: back-propagation through time, written out since
planning imports no JAX. Mirhoseini et al., Device Placement Optimization with Reinforcement Learning (ICML 2017),
section 3.2; A Hierarchical Model for Device Placement (ICLR 2018), whose constants are those of `PolicyShape`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Weights = dict[str, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyShape:
    """The sizes of a policy.

    Attributes:
        num_devices: number of devices.
        embedding: size of the embedding of a group.
        hidden: size of the states of both LSTMs.
        tanh_constant: K, the largest absolute value of a logit.
        temperature: T.
    """

    num_devices: int
    embedding: int
    hidden: int = 512
    tanh_constant: float = 1.0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Cell:
    """One step of an LSTM: its inputs, and what its gradient needs."""

    x: Floats
    h: Floats
    c: Floats
    gates: Floats
    new_c: Floats
    new_h: Floats


def _lstm(weights: Weights, name: str, x: Floats, h: Floats, c: Floats) -> _Cell:
    size = h.shape[-1]
    gates = x @ weights[f"{name}/u"] + h @ weights[f"{name}/v"] + weights[f"{name}/b"]
    gates[:, : 3 * size] = 1 / (1 + np.exp(-gates[:, : 3 * size]))
    gates[:, 3 * size :] = np.tanh(gates[:, 3 * size :])
    i, f, o, g = np.split(gates, 4, axis=1)
    new_c = f * c + i * g
    return _Cell(x, h, c, gates, new_c, o * np.tanh(new_c))


def _lstm_back(weights: Weights, grads: Weights, name: str, cell: _Cell, dh: Floats, dc: Floats) -> tuple[Floats, ...]:
    """Add the gradients of the weights of a step, and return those of its x, h and c."""
    i, f, o, g = np.split(cell.gates, 4, axis=1)
    squashed = np.tanh(cell.new_c)
    dc = dc + dh * o * (1 - squashed**2)
    d = np.concatenate(
        [dc * g * i * (1 - i), dc * cell.c * f * (1 - f), dh * squashed * o * (1 - o), dc * i * (1 - g**2)], axis=1
    )
    grads[f"{name}/u"] += cell.x.T @ d
    grads[f"{name}/v"] += cell.h.T @ d
    grads[f"{name}/b"] += d.sum(0)
    return d @ weights[f"{name}/u"].T, d @ weights[f"{name}/v"].T, dc * f


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """One step of the decoder: its cell, attention, and logits before noise, as shares of K."""

    cell: _Cell
    attention: Floats
    read: Floats
    bounded: Floats
    probabilities: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementSamples:
    """Sampled placements.

    Attributes:
        devices: [samples, groups] the device of each group.
        log_probability: [samples] log p of each placement.
        encoded, chosen: the steps of both LSTMs, which the gradient needs.
    """

    devices: NDArray[np.intp]
    log_probability: Floats
    encoded: list[_Cell] = field(repr=False)
    chosen: list[_Choice] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementPolicy:
    """A policy with its weights, by name."""

    shape: PolicyShape
    weights: Weights

    @staticmethod
    def initial(shape: PolicyShape, random: np.random.Generator, dtype: str = "float32") -> PlacementPolicy:
        """Return a policy with random weights: uniform within one over the root of the inputs, forget bias 1."""
        h, weights = shape.hidden, dict[str, Floats]()

        def uniform(name: str, rows: int, columns: int) -> None:
            limit = 1 / np.sqrt(rows)
            weights[name] = random.uniform(-limit, limit, (rows, columns)).astype(dtype)

        for name, size in (("encoder", shape.embedding), ("decoder", h)):
            uniform(f"{name}/u", size, 4 * h)
            uniform(f"{name}/v", h, 4 * h)
            weights[f"{name}/b"] = np.repeat(np.array([0, 1, 0, 0], dtype), h)
        uniform("devices", shape.num_devices + 1, h)  # the last row stands for no device yet
        uniform("attention", h, h)
        uniform("logits", 2 * h, shape.num_devices)
        return PlacementPolicy(shape=shape, weights=weights)

    def sample(
        self, embeddings: Floats, count: int, random: np.random.Generator, *, noise: float = 0.0
    ) -> PlacementSamples:
        """Sample placements.

        Args:
            embeddings: [groups, embedding].
            count: number of samples.
            random: source of randomness.
            noise: standard deviation of the noise added to logits.
        """
        w, size = self.weights, self.shape.hidden
        dtype = w["logits"].dtype
        encoded, zeros = list[_Cell](), np.zeros((1, size), dtype)
        for row in embeddings.astype(dtype):
            before = (encoded[-1].new_h, encoded[-1].new_c) if encoded else (zeros, zeros)
            encoded.append(_lstm(w, "encoder", row[None], *before))
        memory = np.concatenate([cell.new_h for cell in encoded])
        h, c = (np.repeat(each, count, 0) for each in (encoded[-1].new_h, encoded[-1].new_c))
        last = np.full(count, self.shape.num_devices)
        chosen, devices, total = list[_Choice](), list[NDArray[np.intp]](), np.zeros(count, dtype)
        for row in memory:
            choice = self._choose(memory, _lstm(w, "decoder", w["devices"][last] + row, h, c), random, noise)
            h, c = choice.cell.new_h, choice.cell.new_c
            # The first device whose cumulated probability exceeds a uniform number.
            drawn = choice.probabilities.cumsum(1) < random.random((count, 1))
            last = np.minimum(drawn.sum(1), self.shape.num_devices - 1)
            total += np.log(choice.probabilities[np.arange(count), last])
            chosen.append(choice)
            devices.append(last)
        return PlacementSamples(
            devices=np.stack(devices, axis=1), log_probability=total, encoded=encoded, chosen=chosen
        )

    def _choose(self, memory: Floats, cell: _Cell, random: np.random.Generator, noise: float) -> _Choice:
        attention = _softmax(cell.new_h @ self.weights["attention"] @ memory.T)
        read = np.concatenate([cell.new_h, attention @ memory], axis=1)
        bounded = np.tanh(read @ self.weights["logits"] / self.shape.temperature)
        logits = self.shape.tanh_constant * bounded
        if noise:
            logits = logits + noise * random.standard_normal(logits.shape).astype(logits.dtype)
        return _Choice(cell, attention, read, bounded, _softmax(logits))

    def gradient(self, samples: PlacementSamples, of_samples: Floats) -> Weights:
        """Return the gradient of Σ of_samples · log p with respect to the weights; `of_samples`: [samples]."""
        w, size = self.weights, self.shape.hidden
        grads = {name: np.zeros_like(value) for name, value in w.items()}
        memory = np.concatenate([cell.new_h for cell in samples.encoded])
        dmemory, (count, groups) = np.zeros_like(memory), samples.devices.shape
        dh, dc = (np.zeros((count, size), memory.dtype) for _ in range(2))
        scale = self.shape.tanh_constant / self.shape.temperature
        for t in reversed(range(groups)):
            choice = samples.chosen[t]
            dlogits = -choice.probabilities
            dlogits[np.arange(count), samples.devices[:, t]] += 1
            dlogits = (scale * of_samples[:, None] * dlogits * (1 - choice.bounded**2)).astype(memory.dtype)
            grads["logits"] += choice.read.T @ dlogits
            dread = dlogits @ w["logits"].T
            dcontext = dread[:, size:]
            dmemory += choice.attention.T @ dcontext
            dscores = dcontext @ memory.T
            dscores = choice.attention * (dscores - (dscores * choice.attention).sum(1, keepdims=True))
            query = choice.cell.new_h @ w["attention"]
            dmemory += dscores.T @ query
            dquery = dscores @ memory
            grads["attention"] += choice.cell.new_h.T @ dquery
            dh = dh + dread[:, :size] + dquery @ w["attention"].T
            dx, dh, dc = _lstm_back(w, grads, "decoder", choice.cell, dh, dc)
            before = samples.devices[:, t - 1] if t else np.full(count, self.shape.num_devices)
            np.add.at(grads["devices"], before, dx)
            dmemory[t] += dx.sum(0)
        dh, dc = dh.sum(0, keepdims=True), dc.sum(0, keepdims=True)
        for t in reversed(range(groups)):
            _, dh, dc = _lstm_back(w, grads, "encoder", samples.encoded[t], dh + dmemory[t], dc)
        return grads


def _softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)
