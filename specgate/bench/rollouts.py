"""A simulated month of rollouts: how often a slower candidate is caught, and a neutral one let through.

    python -m specgate.bench.rollouts [--runs N] [--series FILE] [--rate R] [--slower PERCENT]

The rollouts are real (`policy.canary`), the clock is not. Latencies are resampled from a run of the
default model in blocks of neighbouring requests, which keeps their autocorrelation (moving block
bootstrap, Kuensch 1989); requests of the two arms are neighbours in the series.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specgate.config.rollout import OverlayConfig, RolloutConfig
from specgate.policy.assignment import CANDIDATE, CONTROL
from specgate.policy.canary import Rollout, Status
from specgate.policy.guardrails import PASS_ERROR_CHANCE, ArmSample, Limits, make_guardrails
from specgate.policy.sequential import required_batches

SERIES = Path(__file__).with_name("latency_series.json")
BLOCK = 40  # requests that stay together
TEN_PERCENT = 1.1


@dataclass(frozen=True, slots=True)
class Ending:
    """How one rollout ended."""

    status: Status
    why: str
    stage: int  # the highest it reached
    num_requests: int  # of the candidate, until the end
    hours: float


@dataclass(frozen=True, slots=True)
class Needs:
    """What one guardrail needs, from its noise under no difference."""

    name: str
    sd: float  # of one batch's log ratio
    margin: float  # log distance of no difference, and of the slower candidate, from the limit
    num_samples: int  # requests of each arm


def load_series(path: Path = SERIES) -> list[ArmSample]:
    """Requests in order of arrival. Raises OSError, KeyError or ValueError."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return [
        ArmSample(
            num_prompt_tokens=prompt, num_output_tokens=output, ttft_s=ttft / 1e3,
            tpot_s=None if tpot is None else tpot / 1e3, e2e_s=e2e / 1e3, queue_wait_s=wait / 1e3,
        )
        for prompt, output, ttft, tpot, e2e, wait in document["requests"]
    ]  # fmt: skip


def slowed(sample: ArmSample, factor: float) -> ArmSample:
    """The same request, everything `factor` times as long."""
    return replace(
        sample,
        ttft_s=None if sample.ttft_s is None else sample.ttft_s * factor,
        tpot_s=None if sample.tpot_s is None else sample.tpot_s * factor,
        e2e_s=None if sample.e2e_s is None else sample.e2e_s * factor,
    )


def places(num: int, rng: random.Random) -> Iterator[int]:
    """Endless indices into a series of `num`, in blocks of neighbours."""
    while True:
        start = rng.randrange(num)
        for offset in range(BLOCK):
            yield (start + offset) % num


def run_one(
    config: RolloutConfig, arms: dict[str, Sequence[ArmSample]], requests_per_s: float, rng: random.Random
) -> Ending:
    """One rollout from its start to its end; `arms` holds what each arm's requests would measure."""
    now_s, num, highest = 0.0, 0, 0
    rollout = Rollout(config, now_s)
    source = places(len(arms[CONTROL]), rng)
    while rollout.status is Status.RUNNING:
        if rollout.share >= 1:
            now_s += max(config.min_stage_s, 1.0)
            rollout.advance(now_s)
            continue
        rate = 2 * rollout.share * requests_per_s
        for _ in range(config.batch_samples):  # between two looks at the clock alone
            now_s += rng.expovariate(rate)
            arm = CANDIDATE if rng.random() < 0.5 else CONTROL
            num += arm == CANDIDATE
            if rollout.observe(arm, arms[arm][next(source)], now_s) is not None:
                break
        rollout.advance(now_s)
        highest = max(highest, rollout.stage)
    return Ending(rollout.status, rollout.why, highest, num, now_s / 3600)


def run_many(
    config: RolloutConfig, series: Sequence[ArmSample], factor: float, num_runs: int, requests_per_s: float
) -> list[Ending]:
    """Independent rollouts of a candidate that takes `factor` times as long."""
    arms = {CONTROL: series, CANDIDATE: [slowed(sample, factor) for sample in series]}
    return [run_one(config, arms, requests_per_s, random.Random(f"{factor} {i}")) for i in range(num_runs)]


def needs(
    limits: Limits, series: Sequence[ArmSample], factor: float, alpha: float, batch_samples: int
) -> list[Needs]:
    """The sample size of each latency guardrail: enough to tell a candidate `factor` times as slow from the
    limit (with `alpha`), and no difference from it, each with a chance of 95 %."""
    rng = random.Random("needs")
    source = places(len(series), rng)
    rails = [rail for rail in make_guardrails(limits) if rail.is_due]
    for _ in range(400):
        batch: list[list[ArmSample]] = [[], []]
        while min(map(len, batch)) < batch_samples:
            arm = batch[rng.randrange(2)]
            sample = series[next(source)]
            if len(arm) < batch_samples:
                arm.append(sample)
        for rail in rails:
            rail.add(*batch)
    out = []
    for rail in rails:
        sd, limit = rail.test.sd or 0.0, rail.test.limit
        down = required_batches(sd, limit, PASS_ERROR_CHANCE)
        is_meant = math.log(factor) > limit + rail.test.min_sd  # else it is for others to catch
        up = required_batches(sd, math.log(factor) - limit, alpha) if is_meant else 0
        out.append(Needs(rail.name, sd, limit, max(down, up) * batch_samples))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m specgate.bench.rollouts", description=__doc__)
    parser.add_argument("--runs", type=int, default=400, help="of each kind (default 400)")
    parser.add_argument("--series", type=Path, default=SERIES, help="latencies to resample")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second in scope (default 5)")
    parser.add_argument("--slower", type=float, default=10.0, metavar="PERCENT", help="default 10")
    args = parser.parse_args(argv)
    series = load_series(args.series)
    config = RolloutConfig(rollout="simulated", overlay=OverlayConfig(drafter="ngram"))
    factor = 1 + args.slower / 100
    print(f"series: {len(series)} requests, autocorrelation of log TPOT {_correlation(series):.2f}")
    alpha = Rollout(config, 0.0).alpha
    for need in needs(config.guardrails, series, factor, alpha, config.batch_samples):
        print(f"{need.name}: a batch of {config.batch_samples} has a log ratio of sd {need.sd:.3f};"
              f" needs {need.num_samples} requests of each arm")  # fmt: skip
    print(
        f"shipped: min_samples {config.min_samples} (each arm and stage), error_chance {config.error_chance}"
    )
    for title, value in ((f"{args.slower:g} % slower", factor), ("neutral", 1.0), ("10 % faster", 1 / 1.1)):
        endings = run_many(config, series, value, args.runs, args.rate)
        print(f"{title}: {_summary(endings)}")
    return 0


def _summary(endings: Sequence[Ending]) -> str:
    num = len(endings)
    back = [e for e in endings if e.status is Status.ROLLED_BACK]
    first = [e for e in back if e.stage == 0]
    promoted = [e for e in endings if e.status is Status.PROMOTED]
    expired = [e for e in back if e.why.startswith("expired")]
    requests = sorted(e.num_requests for e in endings)
    hours = sorted(e.hours for e in endings)
    return (
        f"rolled back {len(back) / num:.1%} (before passing a stage {len(first) / num:.1%},"
        f" expired {len(expired) / num:.1%}), promoted {len(promoted) / num:.1%};"
        f" candidate's requests p50 {requests[num // 2]}, p95 {requests[num * 95 // 100]};"
        f" hours p50 {hours[num // 2]:.1f}"
    )


def _correlation(series: Sequence[ArmSample]) -> float:
    """Of log TPOT with that of the next request."""
    logs = np.array([math.log(s.tpot_s) for s in series if s.tpot_s])
    return float(np.corrcoef(logs[:-1], logs[1:])[0, 1])


if __name__ == "__main__":
    raise SystemExit(main())
