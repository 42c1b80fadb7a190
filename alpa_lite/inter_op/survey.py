"""A survey: what stages would take at any number of micro-batches, from a few layers solved at a few numbers of them.

With b samples in a micro-batch, layer l on a logical mesh takes per micro-batch about

    t(l,b) = t(r,b) * loop(l) / loop(r)  +  u(r) * update(l) / update(r) / m                            `Survey.guess`

where r is a layer that stands for l (`representatives`), loop and update are what they take on one device (`profile`),
t(r,b) lies on straight lines through the sizes that were solved (latency and the gathering of weights do not shrink
with b, the rest does) and u is its update. These are guesses: they say where to look first, and the search puts costs
in the place of those that its answer depends on (`stage_search`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.profile import Profile, microbatch_size
from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_costs import StageCosts

FloatArray = NDArray[np.float64]

MAX_REPRESENTATIVES = 4
ENOUGH = 0.6
"""Layers are surveyed until they stand for so much of the time on one device, at most so many of them."""

AGAIN = 1 / 3
"""Of the logical meshes that are surveyed, the part that mostly is promising enough to be surveyed again."""

FAR = 1.4
"""How many times as long as on the best logical mesh of a submesh layers may take on one that is looked at again."""


def representatives(structures: Sequence[object], seconds: FloatArray) -> list[int]:
    """For each layer one that stands for it: an equal one where it is one of the few that take most time, else near.

    `structures`: equal for layers that are alike; `seconds`: of each layer.
    """
    weight: dict[object, float] = {}
    for structure, share in zip(structures, seconds / max(float(seconds.sum()), 1e-30), strict=True):
        weight[structure] = weight.get(structure, 0.0) + float(share)
    chosen: list[object] = []
    for structure in sorted(weight, key=lambda s: -weight[s])[:MAX_REPRESENTATIVES]:
        if sum(weight[s] for s in chosen) < ENOUGH:
            chosen.append(structure)
    first = {s: list(structures).index(s) for s in chosen}
    standing = np.array([i for i, s in enumerate(structures) if s in first])
    nearest = (int(standing[np.abs(standing - i).argmin()]) for i in range(len(structures)))
    return [first[structures[n]] for n in nearest]


class Survey:
    """Seconds of a few layers on every logical mesh of a space, at some numbers of micro-batches."""

    def __init__(self, space: Space, profile: Profile, structures: Sequence[object]) -> None:
        """Nothing is known yet but what layers take on one device, and which are alike (`structures`)."""
        self.space, self.profile = space, profile
        self._stands = representatives(structures, profile.loop_seconds)
        self._loops: dict[float, dict[int, FloatArray]] = {}
        self._updates: dict[int, FloatArray] = {}

    def add(self, costs: StageCosts, *, further: int = 0) -> None:
        """Solve the layers that stand for others at the micro-batches of a step; `further` ones are to follow."""
        progress, possible = costs.progress, self.space.divides(microbatch_size(costs)) & self._promising()
        loops = self._loops.setdefault(float(microbatch_size(costs) or 1), {})
        layers = list(dict.fromkeys(self._stands))
        num_solves = len(layers) * int(possible.sum())
        progress.expect("survey", num_solves * (1 + AGAIN * further))
        for layer in layers:
            loop, update = np.full(possible.shape, np.inf), np.full(possible.shape, np.inf)
            for k, c in np.argwhere(possible).tolist():
                submesh, mesh = self.space.submesh(k), self.space.mesh(k, c)
                found = costs.solution(layer, layer, submesh, mesh, limit_bytes=math.inf)
                if found.choice is not None:
                    loop[k, c] = found.forward_seconds + found.backward_seconds
                    update[k, c] = found.update_seconds
            loops[layer] = loop
            self._updates[layer] = np.minimum(update, self._updates.get(layer, update))
        progress.expect("survey", num_solves * AGAIN * further)

    def _promising(self) -> NDArray[np.bool_]:
        """[kinds, shapes]: what was not far from the best of its kind of submesh so far, for some layer."""
        found = np.zeros((len(self.space.kinds), self.space.most_shapes), dtype=np.bool_)
        for loops in self._loops.values():
            for loop in loops.values():
                found |= loop <= FAR * loop.min(axis=1, keepdims=True)
        return found if self._loops else ~found

    def guess(self, size: float, num_microbatches: int, profile: Profile | None = None) -> FloatArray:
        """[layers, kinds, shapes]: seconds of each layer by itself for micro-batches of `size` samples, and its part
        of the update; infinite where a shape does not divide them.

        `profile`: of layers that compute values again; None: of those that were surveyed.
        """
        sizes, known, found = sorted(self._loops), self.profile, list[FloatArray]()
        alone = profile or known
        for layer, stands in enumerate(self._stands):
            loop = _on_lines(np.array(sizes), np.stack([self._loops[s][stands] for s in sizes]), size)
            work = _ratio(alone.loop_seconds[layer], known.loop_seconds[stands])
            update = _ratio(alone.update_seconds[layer], known.update_seconds[stands])
            # What takes no time at all here takes none there (and infinity times nothing is no number).
            with np.errstate(invalid="ignore"):
                found.append(
                    np.nan_to_num(loop * work + self._updates[stands] * update / num_microbatches, posinf=np.inf)
                )
        return np.where(self.space.divides(int(size)), np.stack(found), np.inf)


def _ratio(value: float, known: float) -> float:
    return float(value / known) if known > 0 else 1.0


def _on_lines(sizes: FloatArray, points: FloatArray, size: float) -> FloatArray:
    """Values at `size` on lines through neighbouring `points` [sizes, ...]; in proportion where there is but one."""
    result = np.full(points.shape[1:], np.inf)
    for at in np.ndindex(result.shape):
        known = np.isfinite(points[(slice(None), *at)])
        if known.any():
            result[at] = _on_line(sizes[known], points[(slice(None), *at)][known], size)
    return result


def _on_line(sizes: FloatArray, values: FloatArray, size: float) -> float:
    if sizes.size == 1:
        return float(values[0] * size / sizes[0])
    right = int(np.clip(np.searchsorted(sizes, size), 1, sizes.size - 1))
    slope = (values[right] - values[right - 1]) / (sizes[right] - sizes[right - 1])
    # What does not shrink with the size takes no less than nothing.
    fixed = max(0.0, float(values[right] - slope * sizes[right]))
    return fixed + (float(values[right]) - fixed) * size / float(sizes[right])
