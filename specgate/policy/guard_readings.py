"""What guards measure: sliding windows over outcomes and steps, and the readings taken from them.

Pure: every method is told the time. A policy's latency is compared with baseline requests that ran
in the same minutes, within task, prompt-length band and load band, so that neither a long prefill
nor a busy minute is a fault of speculation. While a door is allowed a reading is the best the truth
may be (three standard errors off), so that chance does not shut it; while it is probed it is the
estimate itself, since then the policy has to show itself good.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.types import BASELINE, StepRecord
from specgate.config.guards import AcceptanceGuard, DrafterGuard, LatencyGuard
from specgate.policy.door import Reading
from specgate.types import RequestOutcome

_MAX_SAMPLES = 300  # of one window: enough for a p95, and quick to sort
_WHOLE_MODEL = 3  # times the drafts of a task, before a policy is shut for all tasks
_FRESH_PER_LOOK = 3  # latency readings taken anew in one look: the event loop has other work
_KEPT_S = 2.0  # a latency reading without new requests is good for so long
_SURE = 3.0  # standard errors
_MIN_ITEMS = 5  # steps or requests before their spread says anything
Scope = tuple[str, str | None]  # policy, task (None: all)


class Costs(Protocol):
    """What the latency model predicts; None where it cannot say."""

    def capacity_ratio(self, policy: str, batch: float) -> float | None:
        """The time a request takes under `policy` among `batch` of its kind, in times of baseline's. Below 1
        a server that runs no more than these at once does more requests a second; without end it is C2R."""
        ...

    def floor_tokens(self, policy: str, batch: float, depth: float) -> float | None:
        """floor(B, K): tokens per drafted step at which drafting breaks even."""
        ...

    def rho(self, answers_per_s: float) -> float | None:
        """Arrivals as a share of plain capacity."""
        ...


class NoCosts:
    """Before there is a model."""

    def capacity_ratio(self, policy: str, batch: float) -> float | None:
        return None

    def floor_tokens(self, policy: str, batch: float, depth: float) -> float | None:
        return None

    def rho(self, answers_per_s: float) -> float | None:
        return None


class Window:
    """Numbers with their times, the last `window_s` seconds of them."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._items: deque[tuple[float, float]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, now_s: float, value: float) -> None:
        """One more."""
        self._items.append((now_s, value))

    def count(self, now_s: float) -> int:
        """How many are not older than the window."""
        while self._items and self._items[0][0] < now_s - self._window_s:
            self._items.popleft()
        return len(self._items)

    def values(self, now_s: float, since_s: float) -> list[float]:
        """Those not older than the window, nor than `since_s`."""
        self.count(now_s)
        return [value for at_s, value in self._items if at_s >= since_s]


@dataclass(frozen=True, slots=True)
class _Quantity:
    name: str
    kind: str
    level: float  # quantile
    error: float  # standard error of its logarithm, in sd/sqrt(n) of a normal distribution
    limit: Callable[[LatencyGuard], float]
    of: Callable[[RequestOutcome], Iterator[float]]


def _tpot(outcome: RequestOutcome) -> Iterator[float]:
    if outcome.timings.tpot_s:
        yield outcome.timings.tpot_s


def _longest_gap(outcome: RequestOutcome) -> Iterator[float]:
    """Of up to 64 gaps. Half of all requests have a longer one than the gaps' p99 (0.99^64 is about a half),
    so its median over requests is that p99; and a stall of the machine, which everything that runs at
    the time has among its gaps, weighs no more than the few requests it hit."""
    longest = max((gap_s for gap_s, _ in outcome.inter_token_s[-64:]), default=0.0)
    if longest > 0:
        yield longest


_QUANTITIES = (
    _Quantity("median decode time per token", "decode_time", 0.5, 1.25, lambda c: c.max_decode_ratio, _tpot),
    _Quantity("TPOT p95", "tpot_p95", 0.95, 2.11, lambda c: c.max_tpot_p95_ratio, _tpot),
    _Quantity("ITL p99", "itl_p99", 0.5, 1.25, lambda c: c.max_itl_p99_ratio, _longest_gap),
)


Band = tuple[int, int]  # of prompt length, of load


def band_of(num_prompt_tokens: int, num_in_flight: int) -> Band:
    """What is compared with each other: prompts within a factor of four, met by loads within a factor of
    two. A policy that ran in a busy minute is not slow because baseline ran in a quiet one."""
    return max(0, (max(1, num_prompt_tokens).bit_length() - 5) // 2), max(num_in_flight, 1).bit_length()


class LatencyBook:
    """Decode times by policy, task, and band of prompt length and load, against baseline's."""

    def __init__(self, config: LatencyGuard) -> None:
        self._config = config
        self._windows: dict[tuple[str, str, Band, int], Window] = {}
        self._bands: dict[str, set[Band]] = {}  # seen, by task
        self._num: dict[tuple[str, str], int] = {}  # requests so far, by policy and task
        self._kept: dict[tuple[str, str], tuple[tuple[object, ...], float, Reading | None]] = {}
        self._num_fresh = 0

    def add(self, outcome: RequestOutcome, now_s: float) -> None:
        """A finished request that kept its policy throughout."""
        if outcome.outcome != "ok" or outcome.policy_changes:
            return
        decision = outcome.decision
        policy, task = decision.policy, decision.task.scope
        band = band_of(outcome.num_prompt_tokens, decision.load.num_admitted)
        self._bands.setdefault(task, set()).add(band)
        self._num[policy, task] = self._num.get((policy, task), 0) + 1
        for index, quantity in enumerate(_QUANTITIES):
            key = (policy, task, band, index)
            window = self._windows.get(key)
            if window is None:
                window = self._windows[key] = Window(self._config.window_s)
            for value in quantity.of(outcome):
                window.add(now_s, math.log(value))

    def begin_look(self) -> None:
        """A new look: some readings may be taken anew, the oldest first."""
        self._num_fresh = _FRESH_PER_LOOK

    def scopes(self) -> list[Scope]:
        """Policies other than baseline, with each task they ran for; those longest unread first."""
        scopes = [scope for scope in self._num if scope[0] != BASELINE]
        return sorted(scopes, key=lambda scope: self._kept[scope][1] if scope in self._kept else -math.inf)

    def lacks_control(self, policy: str, task: str, band: Band, now_s: float) -> bool:
        """Enough of `policy` ran in this band to be judged, and too little of baseline to judge it by."""
        counts = []
        for name in (policy, BASELINE):
            window = self._windows.get((name, task, band, 0))
            counts.append(0 if window is None else window.count(now_s))
        least = self._config.min_samples
        return counts[0] >= least > counts[1]

    def reading(
        self, policy: str, task: str, now_s: float, since_s: float, probe_samples: int | None
    ) -> Reading | None:
        """The quantity that stands worst. None without samples of both sides in any band.

        `probe_samples`: the door is being probed, and that many samples are enough.
        """
        state = (self._num.get((policy, task)), self._num.get((BASELINE, task)), since_s, probe_samples)
        kept = self._kept.get((policy, task))
        if kept is not None and kept[0] == state and now_s - kept[1] < _KEPT_S:
            return kept[2]
        if kept is not None and kept[0][2:] == state[2:] and self._num_fresh <= 0:
            return kept[2]
        self._num_fresh -= 1
        reading = self._worst(policy, task, (now_s, since_s), probe_samples)
        self._kept[policy, task] = state, now_s, reading
        return reading

    def _worst(
        self, policy: str, task: str, times: tuple[float, float], probe_samples: int | None
    ) -> Reading | None:
        readings = [
            reading
            for index in range(len(_QUANTITIES))
            if (reading := self._compare(policy, task, index, times, probe_samples)) is not None
        ]
        enough = [reading for reading in readings if reading.is_enough]
        return max(enough or readings, key=lambda r: r.severity, default=None)

    def _compare(
        self, policy: str, task: str, index: int, times: tuple[float, float], probe_samples: int | None
    ) -> Reading | None:
        """Bands put together by weight, in logarithms."""
        quantity, (now_s, since_s) = _QUANTITIES[index], times
        total = weighted = variance = 0.0
        num = 0
        for band in sorted(self._bands.get(task, ())):
            tried = self._windows.get((policy, task, band, index))
            control = self._windows.get((BASELINE, task, band, index))
            if tried is None or control is None:
                continue
            ours, theirs = tried.values(now_s, since_s), control.values(now_s, 0.0)
            if not ours or len(theirs) < self._config.min_samples:
                continue
            weight = min(len(ours), len(theirs))
            spread = _sd(ours) ** 2 / len(ours) + _sd(theirs) ** 2 / len(theirs)
            weighted += weight * (_quantile(ours, quantity.level) - _quantile(theirs, quantity.level))
            variance += weight**2 * quantity.error**2 * spread
            total += weight
            num += len(ours)
        if not total:
            return None
        doubt = 0.0 if probe_samples is not None else _SURE * math.sqrt(variance) / total
        return Reading(
            value=math.exp(weighted / total - doubt),
            threshold=quantity.limit(self._config),
            unit="x baseline",
            num_samples=num,
            min_samples=probe_samples or self._config.min_samples,
            what=quantity.name if probe_samples is not None else f"{quantity.name}, at least,",
            kind=quantity.kind,
        )


def _sd(values: list[float]) -> float:
    """A pair or less could be anything: half a logarithm."""
    num = len(values)
    if num <= 2:
        return 0.5
    mean = sum(values) / num
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (num - 1))


def _quantile(values: list[float], level: float) -> float:
    ordered = sorted(values)
    place = level * (len(ordered) - 1)
    low = math.floor(place)
    high = min(len(ordered) - 1, low + 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class _Drafted:
    at_s: float
    num_drafts: int
    num_draft_tokens: int
    num_accepted: int
    num_reached: float  # draft tokens that verification came to
    batch: float


def _doubt(items: Sequence[_Drafted]) -> float:
    """Standard error of accepted tokens per draft: from how drafts of this acceptance differ, or, where
    that is more, from how far whole steps or requests lie apart."""
    num = sum(item.num_drafts for item in items)
    accepted, reached = sum(item.num_accepted for item in items), sum(item.num_reached for item in items)
    mean, depth = accepted / num, sum(item.num_draft_tokens for item in items) / num
    share = accepted / reached if reached else 0.0
    squares = sum((2 * j - 1) * share**j for j in range(1, max(round(depth), 1) + 1))
    each = max(squares - mean**2, 0.0) / num
    if len(items) < _MIN_ITEMS:
        return math.sqrt(each)
    apart = sum((item.num_accepted - mean * item.num_drafts) ** 2 for item in items) / num**2
    return math.sqrt(max(each, apart))


class AcceptanceBook:
    """Drafts and what became of them, by policy, and by policy and task."""

    def __init__(self, config: AcceptanceGuard) -> None:
        self._config = config
        self._windows: dict[Scope, deque[_Drafted]] = {}
        self._batch = 1.0

    def add_step(self, record: StepRecord, now_s: float) -> None:
        """Steps are told at once, but not for which task they drafted."""
        self._batch = max(1.0, float(record.num_decode_sequences))
        for work in record.drafts:
            if work.num_draft_tokens:
                # At least so many drafts were refused: each loses no more than its own length.
                lost = work.num_draft_tokens - work.num_accepted_tokens
                reached = work.num_accepted_tokens + lost * work.num_sequences / work.num_draft_tokens
                drafted = _Drafted(
                    now_s, work.num_sequences, work.num_draft_tokens, work.num_accepted_tokens, reached,
                    self._batch,
                )  # fmt: skip
                self._put((work.method, None), drafted)

    def add(self, outcome: RequestOutcome, now_s: float) -> None:
        """A finished request: its draft counts, as far as they are one policy's."""
        for stats in outcome.stats:
            if stats.num_drafts and not outcome.policy_changes:
                drafted = _Drafted(
                    now_s, stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens,
                    sum(stats.drafted_per_position), self._batch,
                )  # fmt: skip
                self._put((outcome.decision.policy, outcome.decision.task.scope), drafted)

    def scopes(self) -> set[Scope]:
        """All that drafted."""
        return set(self._windows)

    def reading(
        self, scope: Scope, costs: Costs, now_s: float, since_s: float, probe_samples: int | None
    ) -> Reading | None:
        """Tokens per drafted step against floor(B, K), or acceptance against the static floor: the
        worse. None without a draft."""
        window = self._windows.get(scope, deque())
        while window and window[0].at_s < now_s - self._config.window_s:
            window.popleft()
        items = [item for item in window if item.at_s >= since_s]
        num = sum(item.num_drafts for item in items)
        if not num:
            return None
        accepted = sum(item.num_accepted for item in items)
        depth = sum(item.num_draft_tokens for item in items) / num
        batch = sum(item.batch * item.num_drafts for item in items) / num
        least = self._config.min_drafts
        if probe_samples is not None:
            least = min(least, probe_samples)
        elif scope[1] is None:
            least *= _WHOLE_MODEL  # tasks are judged on their own first
        readings = []
        sure = 0.0 if probe_samples is not None else _SURE
        num_reached = sum(item.num_reached for item in items)
        if num_reached:
            share = accepted / num_reached
            value = min(share + sure * math.sqrt(share * (1 - share) / num_reached), 1.0)
            floor = self._config.min_acceptance
            readings.append(Reading(value, floor, "acceptance", num, least, True, "acceptance", "acceptance"))
        tokens = costs.floor_tokens(scope[0], batch, depth)
        if tokens is not None:
            at_most = "" if probe_samples is not None else "at most, "
            what = f"tokens per drafted step ({at_most}floor at B={batch:.1f}, K={depth:.1f})"
            floor = tokens * (1 - self._config.margin)
            value = min(1 + accepted / num + sure * _doubt(items), 1 + depth)
            readings.append(Reading(value, floor, "tokens/step", num, least, True, what, "floor"))
        return max(readings, key=lambda reading: reading.severity, default=None)

    def _put(self, scope: Scope, drafted: _Drafted) -> None:
        self._windows.setdefault(scope, deque(maxlen=_MAX_SAMPLES)).append(drafted)


class ErrorBook:
    """Failures of drafters, by kind."""

    def __init__(self, config: DrafterGuard) -> None:
        self._config = config
        self._errors: dict[str, deque[tuple[float, str]]] = {}
        self._tries: dict[str, Window] = {}

    def add_step(self, record: StepRecord, now_s: float) -> None:
        """A step with its drafters' work and failures."""
        for work in record.drafts:
            self._tries.setdefault(work.method, Window(self._config.window_s)).add(now_s, 1.0)
        for error in record.drafter_errors:
            self._errors.setdefault(error.method, deque(maxlen=_MAX_SAMPLES)).append((now_s, error.kind))

    def add_try(self, policy: str, kind: str | None, now_s: float) -> None:
        """A request that other servers were to run under `policy`; `kind` None: they did."""
        self._tries.setdefault(policy, Window(self._config.window_s)).add(now_s, 1.0)
        if kind is not None:
            self._errors.setdefault(policy, deque(maxlen=_MAX_SAMPLES)).append((now_s, kind))

    def policies(self) -> set[str]:
        """Drafters that failed, ever."""
        return set(self._errors)

    def reading(self, policy: str, now_s: float, since_s: float, probe_samples: int | None) -> Reading:
        """Failures in the window against those borne; one of a fatal kind weighs as too many."""
        errors = self._errors.get(policy, deque())
        while errors and errors[0][0] < now_s - self._config.window_s:
            errors.popleft()
        kinds: dict[str, int] = {}
        for at_s, kind in errors:
            if at_s >= since_s:
                kinds[kind] = kinds.get(kind, 0) + 1
        num = sum(kinds.values())
        is_fatal = any(kind in self._config.fatal_kinds for kind in kinds)
        borne = 0 if is_fatal or probe_samples is not None else self._config.max_errors
        tries = self._tries.get(policy)
        num_tries = len(tries.values(now_s, since_s)) if tries is not None else 0
        least = 1 if num > borne or probe_samples is None else probe_samples
        told = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
        what = f"the number of drafter errors ({told})" if told else "the number of drafter errors"
        kind = max(kinds, key=lambda k: (k in self._config.fatal_kinds, kinds[k]), default="")
        return Reading(float(num), borne + 0.5, "errors", max(num_tries, num), least, what=what, kind=kind)


class CheckBook:
    """Consistency checks since a door last changed: how many, and how many differed."""

    def __init__(self) -> None:
        self._checks: dict[str, deque[tuple[float, bool]]] = {}

    def add(self, policy: str, is_match: bool, now_s: float) -> None:
        """One answer decoded again."""
        self._checks.setdefault(policy, deque(maxlen=_MAX_SAMPLES)).append((now_s, is_match))

    def policies(self) -> set[str]:
        """Those ever checked."""
        return set(self._checks)

    def reading(self, policy: str, since_s: float, probe_samples: int | None) -> Reading | None:
        """Answers that differed; none is borne."""
        checks = [is_match for at_s, is_match in self._checks.get(policy, ()) if at_s >= since_s]
        if not checks:
            return None
        bad = float(checks.count(False))
        least = probe_samples if probe_samples is not None and not bad else 1
        what = "the number of greedy answers that differ from baseline's"
        return Reading(bad, 0.5, f"of {len(checks)}", len(checks), least, what=what, kind="mismatch")


def worst(readings: Mapping[str, Reading | None]) -> Reading | None:
    """The most severe of those there are."""
    return max((r for r in readings.values() if r is not None), key=lambda r: r.severity, default=None)
