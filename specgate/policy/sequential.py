"""Tests that may be looked at after every observation without raising more false alarms.

Both are e-processes: under the hypothesis their expected value never exceeds 1 at any stopping
time, so "stop when it reaches 1/alpha" errs with probability at most alpha however often one
looks (Ville's inequality; Ramdas et al. 2023, arXiv:2210.01948).

* `MeanTest`: is a mean above or below a limit, variance unknown? The right-Haar mixture t-test:
  effect sizes mean/sd are normal around none (Hendriksen, de Heide, Gruenwald 2021; Perez-Ortiz
  et al. 2024, arXiv:2208.07610). Observations are batch statistics, so that what is correlated
  within a batch does not pass for independent evidence.
* `EventTest`: do events (errors) come more often from one arm than the tolerated ratio allows?
  Given an event, its arm is a biased coin; a mixture of likelihood ratios over stronger biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

PRIOR_VARIANCE = 0.25  # of the effect size per batch: differences of half a standard deviation are typical
_RATIOS = (1.5, 3.0, 10.0)  # how much worse than tolerated, in equal parts of the mixture


@dataclass(slots=True)
class MeanTest:
    """Numbers with unknown mean and variance against one limit. `min_sd`: below it differences are noise."""

    limit: float
    min_sd: float = 1e-3
    num: int = 0
    mean: float = 0.0
    sum_squares: float = 0.0  # of deviations from the mean (Welford 1962)

    def add(self, value: float) -> None:
        """One more observation."""
        self.num += 1
        delta = value - self.mean
        self.mean += delta / self.num
        self.sum_squares += delta * (value - self.mean)

    @property
    def sd(self) -> float | None:
        """Of one observation; None for fewer than two."""
        return max(self.min_sd, math.sqrt(self.sum_squares / (self.num - 1))) if self.num > 1 else None

    @property
    def log_evidence(self) -> float:
        """Logarithm of the e-value against "the mean equals the limit"."""
        sd = self.sd
        if sd is None:
            return 0.0
        return log_evidence(self.num, math.sqrt(self.num) * (self.mean - self.limit) / sd)

    def is_above(self, alpha: float) -> bool:
        """The mean exceeds the limit. True by chance with probability at most `alpha`."""
        return self.mean > self.limit and self.log_evidence >= -math.log(alpha)

    def is_below(self, alpha: float) -> bool:
        """The mean is less than the limit. True by chance with probability at most `alpha`."""
        return self.mean < self.limit and self.log_evidence >= -math.log(alpha)

    def state(self) -> dict[str, float]:
        """To go on from after a restart."""
        return {"num": self.num, "mean": self.mean, "sum_squares": self.sum_squares}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from `state`. Raises KeyError, TypeError or ValueError for what is none."""
        num, mean, squares = int(state["num"]), float(state["mean"]), float(state["sum_squares"])
        if num < 0 or not math.isfinite(mean) or not 0 <= squares < math.inf:
            raise ValueError("no state of a mean")
        self.num, self.mean, self.sum_squares = num, mean, squares


def log_evidence(num: int, t: float) -> float:
    """Log e-value of a one-sample t statistic over `num` > 1 observations."""
    freedom, spread = num - 1, 1 + num * PRIOR_VARIANCE
    t2 = t * t / freedom
    return -0.5 * math.log(spread) + 0.5 * num * (math.log1p(t2) - math.log1p(t2 / spread))


def critical_t(num: int, alpha: float) -> float:
    """The |t| at which the e-value over `num` observations reaches 1/alpha; infinite if none does."""
    if log_evidence(num, 1e9) < -math.log(alpha):
        return math.inf
    low, high = 0.0, 1e9
    for _ in range(100):
        middle = (low + high) / 2
        if log_evidence(num, middle) < -math.log(alpha):
            low = middle
        else:
            high = middle
    return high


def required_batches(sd: float, margin: float, alpha: float, power: float = 0.95) -> int:
    """Fewest batches after which a mean `margin` from the limit is told apart with chance `power`.

    `sd` is that of one batch's statistic. The t statistic is taken as normal around its mean with
    the variance of a noncentral t, which is close from ten batches on.
    """
    z = _normal_quantile(power)
    num = 3
    while num < 10_000_000:
        shift = math.sqrt(num) * margin / sd
        spread = math.sqrt(1 + shift * shift / (2 * (num - 1)))
        if shift - z * spread >= critical_t(num, alpha):
            return num
        num += max(1, num // 100)
    raise ValueError(f"a margin of {margin:g} cannot be told from noise of {sd:g}")


def _normal_quantile(probability: float) -> float:
    low, high = -10.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 * math.erfc(-middle / math.sqrt(2)) < probability:
            low = middle
        else:
            high = middle
    return high


@dataclass(slots=True)
class EventTest:
    """Events of two arms: is the candidate's rate more than `limit` times the control's?"""

    limit: float
    exposure_candidate: int = 0
    exposure_control: int = 0
    num_candidate: int = 0
    num_control: int = 0
    log_ratios: tuple[float, ...] = (0.0,) * len(_RATIOS)

    def add(self, is_candidate: bool, is_event: bool) -> None:
        """One more request of an arm, with or without an event."""
        if is_candidate:
            self.exposure_candidate += 1
            self.num_candidate += is_event
        else:
            self.exposure_control += 1
            self.num_control += is_event
        if not is_event or not self.exposure_candidate or not self.exposure_control:
            return
        odds = self.limit * self.exposure_candidate / self.exposure_control
        self.log_ratios = tuple(
            log_ratio + math.log(_share(odds * ratio, is_candidate) / _share(odds, is_candidate))
            for log_ratio, ratio in zip(self.log_ratios, _RATIOS, strict=True)
        )

    @property
    def log_evidence(self) -> float:
        """Logarithm of the e-value against "the candidate's rate is at most `limit` times the control's"."""
        top = max(self.log_ratios)
        return top + math.log(sum(math.exp(r - top) for r in self.log_ratios) / len(self.log_ratios))

    def is_above(self, alpha: float) -> bool:
        """More than tolerated. True by chance with probability at most `alpha`."""
        return self.log_evidence >= -math.log(alpha)

    def state(self) -> dict[str, object]:
        """To go on from after a restart."""
        return {
            "exposure": [self.exposure_candidate, self.exposure_control],
            "events": [self.num_candidate, self.num_control],
            "log_ratios": list(self.log_ratios),
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Go on from `state`. Raises KeyError, TypeError or ValueError for what is none."""
        exposure, events, ratios = state["exposure"], state["events"], state["log_ratios"]
        if not (isinstance(exposure, list) and isinstance(events, list) and isinstance(ratios, list)):
            raise TypeError("no state of events")
        log_ratios = tuple(float(r) for r in ratios)
        if len(log_ratios) != len(_RATIOS) or not all(map(math.isfinite, log_ratios)):
            raise ValueError("no state of events")
        self.exposure_candidate, self.exposure_control = map(int, exposure)
        self.num_candidate, self.num_control = map(int, events)
        self.log_ratios = log_ratios


def _share(odds: float, is_candidate: bool) -> float:
    """Chance that an event is the candidate's (or the control's)."""
    return odds / (1 + odds) if is_candidate else 1 / (1 + odds)
