"""Learn a device placement: REINFORCE over placements that a policy samples, with the cost of each as its reward.

    reward      R = sqrt(seconds), or seconds, or log(1 + seconds)                                    `RewardFunction`
    failing     a placement that does not fit counts as `failing_seconds`; after step `count_failures` it is left out
    baseline    B, a moving average of R:  B <- 0.9 B + 0.1 mean R, beginning with the first mean
    gradient    of  mean (R - B) log p,  which lowers the probability of placements that take longer; scaled to a norm
                of 1 where it is larger
    step        Adam, rate 0.1 · 0.95^((n - 400) / 50) from step 400 on; noise of 0.5 on logits until step 750

The constants are those of the published controller (Mirhoseini et al., A Hierarchical Model for Device Placement, ICLR
2018; tensorflow/tensorflow, grappler's hierarchical controller). The best placement that was seen is the answer, not
the policy's last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from alpa_lite.inter_op.device_placement import Placement
from alpa_lite.inter_op.placement_policy import Floats, PlacementPolicy, PolicyShape, Weights


class RewardFunction(StrEnum):
    """What a number of seconds counts as."""

    SQRT = "sqrt"
    IDENTITY = "identity"
    LOG = "log"

    def of(self, seconds: float) -> float:
        """Return the reward, which is to become small."""
        match self:
            case RewardFunction.SQRT:
                return math.sqrt(seconds)
            case RewardFunction.IDENTITY:
                return seconds
            case RewardFunction.LOG:
                return math.log1p(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce:
    """How a policy is trained; the defaults but `samples` are the published ones.

    Attributes:
        steps: number of gradient steps.
        samples: placements sampled for each.
        hidden: size of the states of the policy.
        reward: what seconds count as.
        failing_seconds: the seconds of a placement that does not fit.
        count_failures: the step from which on placements that do not fit are left out of gradients.
        baseline_decay: weight of the old baseline.
        tanh_constant: the largest absolute value of a logit.
        noise: standard deviation of the noise on logits.
        noise_until: the step from which on there is no noise.
        learning_rate: of Adam.
        rate_decay: factor of the rate every 50 steps from step `decay_from` on.
        decay_from: see there.
        clip: the largest norm of a gradient.
        seed: seed of all randomness.
    """

    steps: int = 100
    samples: int = 4
    hidden: int = 512
    reward: RewardFunction = RewardFunction.SQRT
    failing_seconds: float = 100.0
    count_failures: int = 1000
    baseline_decay: float = 0.9
    tanh_constant: float = 1.0
    noise: float = 0.5
    noise_until: int = 750
    learning_rate: float = 0.1
    rate_decay: float = 0.95
    decay_from: int = 400
    clip: float = 1.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return self.learning_rate * self.rate_decay ** (max(0, step - self.decay_from) / _DECAY_STEPS)


_DECAY_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPlacement:
    """What a search has seen.

    Attributes:
        ranked: the placements that fit, and their seconds, the fastest first.
        mean_seconds: for each step the mean seconds of the sampled placements that fit; infinite where none does.
        num_failed: number of different placements that do not fit.
    """

    ranked: tuple[tuple[Placement, float], ...]
    mean_seconds: tuple[float, ...]
    num_failed: int

    @property
    def best(self) -> Placement:
        """The fastest placement. Raises `LookupError` if none fits."""
        return self.ranked[0][0]


@dataclass(slots=True, kw_only=True)
class _Adam:
    """Adam (Kingma and Ba, 2015) with its published constants."""

    first: Weights
    second: Weights
    count: int = 0

    def step(self, weights: Weights, grads: Weights, rate: float) -> Weights:
        """Return the weights after a step down the gradient."""
        self.count += 1
        scale = rate * math.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
        new = Weights()
        for name, grad in grads.items():
            self.first[name] = 0.9 * self.first[name] + 0.1 * grad
            self.second[name] = 0.999 * self.second[name] + 0.001 * grad**2
            new[name] = (weights[name] - scale * self.first[name] / (np.sqrt(self.second[name]) + 1e-8)).astype(
                grad.dtype
            )
        return new


def learn_placement(
    embeddings: Floats,
    num_devices: int,
    seconds_of: Callable[[Placement], float | None],
    options: Reinforce,
    told: Callable[[int, float], None] = lambda step, best: None,
) -> LearnedPlacement:
    """Search for a placement of groups on devices.

    Args:
        embeddings: [groups, features] what the policy knows of each group.
        num_devices: number of devices.
        seconds_of: returns the seconds of a step by a placement; None if it does not fit.
        options: how the policy is trained.
        told: called after each step with its number and the least seconds so far.
    """
    random = np.random.default_rng(options.seed)
    shape = PolicyShape(
        num_devices=num_devices,
        embedding=embeddings.shape[1],
        hidden=options.hidden,
        tanh_constant=options.tanh_constant,
    )
    policy = PlacementPolicy.initial(shape, random)
    adam = _Adam(
        first={name: np.zeros_like(each) for name, each in policy.weights.items()},
        second={name: np.zeros_like(each) for name, each in policy.weights.items()},
    )
    search = _Seen(seconds_of=seconds_of)
    baseline = math.nan
    for step in range(options.steps):
        noise = options.noise if step < options.noise_until else 0.0
        samples = policy.sample(embeddings, options.samples, random, noise=noise)
        taken = [search.ask(tuple(row)) for row in samples.devices.tolist()]
        search.end_step(taken)
        told(step, search.least)
        rewards = np.array([options.reward.of(options.failing_seconds if s is None else s) for s in taken])
        # Later on, a placement that does not fit says nothing about the others.
        counted = np.array([s is not None or step < options.count_failures for s in taken])
        if not counted.any():
            continue
        mean = float(rewards[counted].mean())
        if math.isnan(baseline):
            baseline = mean
        grads = policy.gradient(samples, np.where(counted, rewards - baseline, 0.0) / counted.sum())
        baseline = options.baseline_decay * baseline + (1 - options.baseline_decay) * mean
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values()))
        if norm > options.clip:
            grads = {name: grad * (options.clip / norm) for name, grad in grads.items()}
        policy = PlacementPolicy(shape=shape, weights=adam.step(policy.weights, grads, options.rate(step)))
    return search.learned()


@dataclass(slots=True, kw_only=True)
class _Seen:
    """The placements whose seconds are known; each is priced once."""

    seconds_of: Callable[[Placement], float | None]
    known: dict[Placement, float | None] = field(default_factory=dict[Placement, "float | None"])
    means: list[float] = field(default_factory=list[float])
    least: float = math.inf

    def ask(self, placement: Placement) -> float | None:
        """Return the seconds of a placement."""
        if placement not in self.known:
            self.known[placement] = self.seconds_of(placement)
        found = self.known[placement]
        self.least = min(self.least, math.inf if found is None else found)
        return found

    def end_step(self, taken: Sequence[float | None]) -> None:
        """Record the mean of the placements of a step."""
        fit = [seconds for seconds in taken if seconds is not None]
        self.means.append(sum(fit) / len(fit) if fit else math.inf)

    def learned(self) -> LearnedPlacement:
        """Return all that was seen."""
        fit = [(placement, seconds) for placement, seconds in self.known.items() if seconds is not None]
        return LearnedPlacement(
            ranked=tuple(sorted(fit, key=lambda each: each[1])),
            mean_seconds=tuple(self.means),
            num_failed=len(self.known) - len(fit),
        )
