"""How many tokens a step yields, per policy, task and sampling band.

Survival counts per position serve every drafter: `E(K) = 1 + sum_j S_j`, S_j being the chance that a draft
that was granted j tokens has one there and that it stands. A drafter may stop early by itself (a match that
ends, a model that is not sure): what it drafted is less than what it was granted. Counts are kept with decay
and shrunk: cell (policy, task, band) -> policy and band -> policy -> a weak prior, each level
being a few pseudo-steps of prior for the level below. Counts come from drafts of some mean length;
for other lengths the first position is corrected by the start/continue law, since a step after a
fully accepted draft starts inside a match.

A running request bends its task's curve: `RequestCurves` does that for a whole batch at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from router_models.base import State, StateError, check_header, header
from router_models.types import AcceptanceCounts, AcceptanceCurve, AcceptanceKey, Effect, Explanation

_KIND, _VERSION = "acceptance", 2
MAX_DEPTH = 16
"""Deepest draft position that is counted."""
_LEVEL_STEPS = (4.0, 12.0, 24.0)  # pseudo-steps of prior: weak prior -> policy -> band -> cell
_MEMORY_STEPS = 4000.0  # target steps after which a count has faded to 1/e
_Z = 1.2816  # 10 % and 90 % of a normal distribution
_WEAK_START, _WEAK_CONTINUATION = 0.4, 0.6

Array = NDArray[np.float64]


def sampling_band(temperature: float, top_p: float) -> str:
    """The band of a request: acceptance moves with temperature and top-p.

    `greedy`, `cool` (close to it), `warm` (up to temperature 1) or `hot`.
    """
    if temperature == 0:
        return "greedy"
    sharpness = temperature * min(top_p, 1.0)
    if sharpness <= 0.5:
        return "cool"
    return "warm" if temperature <= 1.0 else "hot"


class _Cell:
    """Discounted counts at one level of the hierarchy."""

    def __init__(self) -> None:
        self.steps = 0.0
        self.drafts = 0.0
        self.allowed: Array = np.zeros(MAX_DEPTH)
        self.drafted: Array = np.zeros(MAX_DEPTH)
        self.accepted: Array = np.zeros(MAX_DEPTH)

    def add(self, steps: float, drafts: float, allowed: Array, drafted: Array, accepted: Array) -> None:
        keep = float(np.exp(-steps / _MEMORY_STEPS))
        self.steps = keep * self.steps + steps
        self.drafts = keep * self.drafts + drafts
        self.allowed = keep * self.allowed + allowed
        self.drafted = keep * self.drafted + drafted
        self.accepted = keep * self.accepted + accepted

    def state(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "drafts": self.drafts,
            "allowed": self.allowed.tolist(),
            "drafted": self.drafted.tolist(),
            "accepted": self.accepted.tolist(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.steps, self.drafts = float(state["steps"]), float(state["drafts"])
        self.allowed = np.array(state["allowed"], dtype=np.float64)
        self.drafted = np.array(state["drafted"], dtype=np.float64)
        self.accepted = np.array(state["accepted"], dtype=np.float64)
        values = np.concatenate([[self.steps, self.drafts], self.allowed, self.drafted, self.accepted])
        if values.shape != (2 + 3 * MAX_DEPTH,) or not np.isfinite(values).all() or (values < 0).any():
            raise StateError(f"{_KIND}: counts do not fit")


@dataclass(frozen=True)
class _Belief:
    """What one level of the hierarchy believes."""

    rate: float  # drafts per granted step
    survive: Array  # [MAX_DEPTH] accepted at position j / allowed there
    reach: Array  # [MAX_DEPTH] drafted at position j / allowed there
    evidence: Array  # [MAX_DEPTH] pseudo-drafts behind both
    depth: float | None  # mean number of tokens granted where `survive` was measured

    @property
    def continuation(self) -> float:
        """b: chance of a further token, given the one before. Mean over positions, by weight."""
        weight = self.evidence[1:] * self.survive[:-1]
        b = float((self.evidence[1:] * self.survive[1:]).sum() / max(float(weight.sum()), 1e-9))
        return min(b, 0.99)


_PRIOR = _Belief(
    rate=1.0,
    survive=np.array([_WEAK_START * _WEAK_CONTINUATION**j for j in range(MAX_DEPTH)]),
    reach=np.ones(MAX_DEPTH),
    evidence=np.full(MAX_DEPTH, _LEVEL_STEPS[0]),
    depth=None,
)


def _update(prior: _Belief, cell: _Cell, weight: float) -> _Belief:
    """The belief at a level, from the belief above it (worth `weight` steps) and its own counts."""
    rate = (cell.drafts + weight * prior.rate) / (cell.steps + weight)
    survive = (cell.accepted + weight * prior.survive) / (cell.allowed + weight)
    reach = (cell.drafted + weight * prior.reach) / (cell.allowed + weight)
    # Positions this cell was never granted go on from the last one seen by the mean continuation.
    seen = cell.allowed > weight / 8
    if seen.any() and not seen.all():
        last = int(np.flatnonzero(seen)[-1])
        below = float(survive[:last].sum()) + 1.0
        b = (float(survive[1 : last + 1].sum()) + prior.continuation) / below
        beyond = np.arange(1, MAX_DEPTH - last)
        survive[last + 1 :] = survive[last] * min(b, 1.0) ** beyond
        own = min(float(reach[last] / max(reach[last - 1], 1e-9)), 1.0) if last else 1.0
        above = prior.reach[last + 1 :] / max(float(prior.reach[last]), 1e-9)
        reach[last + 1 :] = reach[last] * np.minimum(own**beyond, above)
    reach = np.minimum.accumulate(np.clip(reach, 0.0, 1.0))
    survive = np.minimum.accumulate(np.clip(survive, 0.0, reach))
    depth = float(cell.allowed.sum()) / cell.drafts if cell.drafts > 0 else prior.depth
    return _Belief(min(rate, 1.0), survive, reach, cell.allowed + weight, depth)


def start_continue_tokens(start: float, continuation: float, depth: int) -> float:
    """E(K) = [1 + h/(1-b)] / [1 + h*b^K/(1-b^(K+1))]: drafts hard to start and easy to continue.

    Equals (1 - a^(K+1))/(1 - a) for h = b = a.
    """
    h, b = start, min(continuation, 1 - 1e-9)
    return float((1 + h / (1 - b)) / (1 + h * b**depth / (1 - b ** (depth + 1))))


def _start(q: float, b: float, depth: float) -> float:
    """h, from the first position's survival q at draft length `depth`: q = h/(1 - (b-h)*b^K).

    A step that follows a fully accepted draft starts inside a match, so q exceeds h for short drafts.
    """
    return float(q * (1 - b ** (depth + 1)) / max(1 - q * b**depth, 1e-9))


def _length_correction(belief: _Belief, max_depth: int) -> tuple[Array, float]:
    """q_K / q_measured for K = 0..max_depth, and h, under the start/continue law."""
    q, b = belief.rate * float(belief.survive[0]), belief.continuation
    if belief.depth is None:
        return np.ones(max_depth + 1), q
    h = min(_start(q, b, belief.depth), 1.0)
    if h >= b:  # nothing is hard to start: what goes on less is a drafter that stops
        return np.ones(max_depth + 1), h
    depths = np.arange(max_depth + 1)
    factor = (1 - (b - h) * b**belief.depth) / (1 - (b - h) * b**depths)
    return factor, h


class Acceptance:
    """Learns from finished (or running) requests; predicts the curve E(0..K)."""

    def __init__(self, max_depth: int = 8) -> None:
        if not 1 <= max_depth <= MAX_DEPTH:
            raise ValueError(f"max_depth must be 1 to {MAX_DEPTH}, got {max_depth}")
        self.max_depth = max_depth
        self._cells: dict[tuple[str, str, str], _Cell] = {}

    def learn_one(self, x: AcceptanceKey, y: AcceptanceCounts) -> None:
        """Add what one request showed. Raises ValueError, unchanged, for impossible counts."""
        drafted, accepted = _counts(y.drafted_per_position), _counts(y.accepted_per_position)
        allowed = _counts(y.allowed_per_position) if y.allowed_per_position else drafted
        if y.num_steps < 0 or y.num_drafts < 0 or y.num_drafts > y.num_steps:
            raise ValueError(f"{y.num_drafts} drafts in {y.num_steps} steps cannot be")
        if (accepted > drafted).any() or (drafted < 0).any() or (accepted < 0).any():
            raise ValueError("more tokens accepted than drafted at some position")
        if (drafted > allowed).any():
            raise ValueError("more tokens drafted than allowed at some position")
        if y.num_steps == 0:
            return
        for name in self._path(x):
            cell = self._cells.setdefault(name, _Cell())
            cell.add(float(y.num_steps), float(y.num_drafts), allowed, drafted, accepted)

    @staticmethod
    def _path(x: AcceptanceKey) -> list[tuple[str, str, str]]:
        path = [(x.policy, "", ""), (x.policy, "", x.band)]
        return path if x.task is None else [*path, (x.policy, x.task, x.band)]

    def keys(self) -> list[AcceptanceKey]:
        """Everything with evidence of its own; without a task: the policy's average in a band."""
        return [AcceptanceKey(p, task or None, band) for p, task, band in self._cells if band]

    def num_steps(self, policy: str) -> float:
        """Granted target steps that `policy` was seen in, whatever the task; faded."""
        cell = self._cells.get((policy, "", ""))
        return cell.steps if cell is not None else 0.0

    def _belief(self, x: AcceptanceKey) -> _Belief:
        belief = _PRIOR
        for weight, name in zip(_LEVEL_STEPS, self._path(x), strict=False):
            cell = self._cells.get(name)
            if cell is not None:
                belief = _update(belief, cell, weight)
        return belief

    def predict_one(self, x: AcceptanceKey) -> AcceptanceCurve:
        """The curve for depths 0 to `max_depth`."""
        belief = self._belief(x)
        own = self._cells.get(self._path(x)[-1])
        survival = belief.rate * belief.survive[: self.max_depth]
        factor, start = _length_correction(belief, self.max_depth)
        depth = np.arange(self.max_depth + 1)
        tokens = np.minimum(1.0 + factor * np.concatenate([[0.0], np.cumsum(survival)]), depth + 1.0)
        tokens = np.maximum.accumulate(tokens)
        # Positions of one draft stand and fall together: their deviations add up, not their variances.
        sd = np.sqrt(survival * (1 - survival) / belief.evidence[: self.max_depth])
        spread = _Z * np.concatenate([[0.0], np.cumsum(sd)])
        return AcceptanceCurve(
            key=x,
            survival=tuple(survival.tolist()),
            expected_tokens=tuple(tokens.tolist()),
            low_tokens=tuple(np.maximum(tokens - spread, 1.0).tolist()),
            high_tokens=tuple(np.minimum(tokens + spread, depth + 1.0).tolist()),
            draft_rate=belief.rate,
            drafted_tokens=(0.0, *(belief.rate * np.cumsum(belief.reach[: self.max_depth])).tolist()),
            start=start,
            continuation=belief.continuation,
            num_steps=own.steps if own is not None else 0.0,
        )

    def explain_one(self, x: AcceptanceKey) -> Explanation:
        """E at `max_depth`: one bonus token, and per position its survival times the draft rate."""
        belief = self._belief(x)
        per_draft = belief.rate * float(_length_correction(belief, self.max_depth)[0][-1])
        survive = belief.survive[: self.max_depth].tolist()
        effects = [Effect("bonus token", 1.0, 1.0, 1.0)]
        effects += [Effect(f"position {j + 1}", s, per_draft, s * per_draft) for j, s in enumerate(survive)]
        bound = self.predict_one(x).expected_tokens[-1] - sum(e.effect for e in effects)
        if abs(bound) > 1e-9:
            effects.append(Effect("bounds: rising in K, at most K+1", 1.0, bound, bound))
        return Explanation(tuple(effects), sum(e.effect for e in effects), "tokens per step")

    def state(self) -> State:
        """See `Estimator.state`."""
        cells = [{"policy": p, "task": t, "band": b, **c.state()} for (p, t, b), c in self._cells.items()]
        return {**header(_KIND, _VERSION), "max_depth": self.max_depth, "cells": cells}

    @classmethod
    def from_state(cls, state: State) -> Self:
        """See `Estimator.from_state`."""
        check_header(state, _KIND, _VERSION)
        try:
            model = cls(int(state["max_depth"]))
            for part in state["cells"]:
                cell = _Cell()
                cell.load(part)
                model._cells[(str(part["policy"]), str(part["task"]), str(part["band"]))] = cell
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"{_KIND}: {error}") from error
        return model


def _counts(values: Sequence[int]) -> Array:
    counts = np.zeros(MAX_DEPTH)
    short = values[:MAX_DEPTH]
    counts[: len(short)] = short
    return counts


_Listed = tuple[list[list[float]], list[float], list[float], float, list[float]]
"""Of a curve: means [powers][K+1], the task's mean and the factor [K+1], the rate, lengths [K+1]."""


class RequestCurves:
    """Curves of several keys, bent to what running requests have shown. Built once per snapshot.

    One number describes a request: a power put on every conditional acceptance (below 1: easier
    text than the task's average). `expected` finds it for a whole batch at once: the mean of
    accepted tokens per draft, shrunk to the task's, looked up in a table over powers; `expected_one` does
    the same for one.
    """

    _POWERS: Array = np.asarray(
        np.concatenate([np.geomspace(12.0, 1.0, 13), np.geomspace(0.8, 0.02, 12)]), dtype=np.float64
    )

    def __init__(self, curves: Sequence[AcceptanceCurve], shrink_drafts: float = 8.0) -> None:
        self._shrink = shrink_drafts
        self.shrink_steps = 2 * shrink_drafts  # granted steps of prior for how often there is a draft
        self._rate: Array = np.array([max(c.draft_rate, 1e-9) for c in curves])  # [curves]
        survival = np.clip(np.array([c.survival for c in curves]) / self._rate[:, None], 0.0, 1.0)
        before = np.concatenate([np.ones((len(curves), 1)), survival[:, :-1]], axis=1)
        conditional = np.divide(survival, before, out=np.zeros_like(survival), where=before > 1e-12)
        bent = np.clip(conditional, 1e-4, 1.0 - 1e-6)[:, None, :] ** self._POWERS[:, None]
        means = np.cumsum(np.cumprod(bent, axis=2), axis=2)
        self._means: Array = np.pad(means, ((0, 0), (0, 0), (1, 0)))  # [curves, powers, K+1]
        self._task: Array = np.pad(np.cumsum(survival, axis=1), ((0, 0), (1, 0)))  # [curves, K+1]
        gain = np.array([c.expected_tokens for c in curves]) - 1.0
        plain = self._rate[:, None] * self._task
        self._factor: Array = np.divide(gain, plain, out=np.ones_like(gain), where=plain > 1e-12)
        self._ceiling: Array = np.arange(1.0, self._task.shape[1] + 1.0)
        self.lengths: Array = np.array([c.drafted_tokens for c in curves]) / self._rate[:, None]
        """[curves, K+1] mean length of a draft that was granted K tokens."""
        self._lists: dict[int, _Listed] = {}
        self._unbent: dict[int, tuple[list[float], float, list[float]]] = {}

    def expected(
        self,
        curve: NDArray[np.intp],
        num_drafts: Array,
        num_granted_tokens: Array,
        num_accepted_tokens: Array,
        num_steps: Array | None = None,
    ) -> Array:
        """E(0..K) per request, from its own counts so far. Arrays [n]; answer [n, K+1].

        `curve` is each request's place in `curves`; `num_granted_tokens` were granted where it had a draft,
        which tells at which depth it was as good as it was. `num_steps`, where known, are the target steps
        granted to the drafter: they tell how often it finds a draft for this request.
        """
        depth = np.divide(num_granted_tokens, num_drafts, out=np.ones(len(curve)), where=num_drafts > 0)
        at = np.clip(np.rint(depth), 1, len(self._ceiling) - 1).astype(np.intp)
        mean = (num_accepted_tokens + self._shrink * self._task[curve, at]) / (num_drafts + self._shrink)
        column = self._means[curve, :, at]  # [n, powers], rising along the powers
        high = np.clip((column < mean[:, None]).sum(axis=1), 1, len(self._POWERS) - 1)
        pick = np.arange(len(at))
        below, above = column[pick, high - 1], column[pick, high]
        part = np.clip((mean - below) / np.maximum(above - below, 1e-12), 0.0, 1.0)[:, None]
        bent = (1 - part) * self._means[curve, high - 1] + part * self._means[curve, high]
        rate = self._rate[curve] if num_steps is None else self.rates(curve, num_drafts, num_steps)
        expected = np.minimum(1.0 + rate[:, None] * self._factor[curve] * bent, self._ceiling)
        rising: Array = np.maximum.accumulate(expected, axis=1)
        return rising

    def rates(self, curve: NDArray[np.intp], num_drafts: Array, num_steps: Array) -> Array:
        """Drafts per granted step of each request, shrunk to its curve's. [n]"""
        found: Array = (num_drafts + self.shrink_steps * self._rate[curve]) / (num_steps + self.shrink_steps)
        return np.minimum(found, 1.0)

    def expected_one(
        self, curve: int, num_drafts: float, num_granted_tokens: float, num_accepted: float, num_steps: float
    ) -> tuple[list[float], float, list[float]]:
        """The same for one request, without numpy, whose calls take longer than their work here; its
        drafts per step; and its curve's row of `lengths`. The lists are shared: not to be changed."""
        if num_steps or num_drafts:
            return self._bend(curve, num_drafts, num_granted_tokens, num_accepted, num_steps)
        found = self._unbent.get(curve)  # of every request that has just come
        if found is None:
            found = self._unbent[curve] = self._bend(curve, 0, 0, 0, 0)
        return found

    def _bend(
        self, curve: int, num_drafts: float, num_granted_tokens: float, num_accepted: float, num_steps: float
    ) -> tuple[list[float], float, list[float]]:
        means, task, factor, rate, lengths = self._listed(curve)
        depth = round(num_granted_tokens / num_drafts) if num_drafts > 0 else 1
        at = min(max(depth, 1), len(task) - 1)
        mean = (num_accepted + self._shrink * task[at]) / (num_drafts + self._shrink)
        high = min(max(bisect_left(means, mean, key=lambda row: row[at]), 1), len(means) - 1)
        low_means, high_means = means[high - 1], means[high]
        part = (mean - low_means[at]) / max(high_means[at] - low_means[at], 1e-12)
        part = min(max(part, 0.0), 1.0)
        rate = min((num_drafts + self.shrink_steps * rate) / (num_steps + self.shrink_steps), 1.0)
        expected: list[float] = []
        most = 0.0
        for k, (low, up, scale) in enumerate(zip(low_means, high_means, factor, strict=True)):
            most = max(most, min(1.0 + rate * scale * ((1 - part) * low + part * up), 1.0 + k))
            expected.append(most)
        return expected, rate, lengths

    def _listed(self, curve: int) -> _Listed:
        found = self._lists.get(curve)
        if found is None:
            arrays = (self._means[curve], self._task[curve], self._factor[curve], self.lengths[curve])
            means, task, factor, lengths = (array.tolist() for array in arrays)
            found = self._lists[curve] = (means, task, factor, float(self._rate[curve]), lengths)
        return found
