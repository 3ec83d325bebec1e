"""What the latency model makes of a machine that is slow for seconds on end:

    python -m tests.bench.slow_seconds [--steps N] [--seed N] [--most F]

Steps of known costs, batches that grow and shrink over some dozens of steps, drafts in six of ten. The
machine is up to `--most` times slower in stretches. Told: how far off predictions made before each step
were, and between what the ratio of a drafting to a plain step moved in the model's eyes, 10 to 90 % of
the time. That ratio decides whether to draft; here it never changes.
"""

from __future__ import annotations

import argparse
import math
import random

from router_models.step_latency import StepLatency
from router_models.types import StepFeatures, StepTiming

BASE_S, SEQUENCE_S, TOKEN_S, KV_S = 6e-3, 2e-4, 6e-4, 2e-6
NOISE = 0.1
STRETCH = (15, 130)  # steps


def cost_s(x: StepFeatures) -> float:
    """What a step takes on the machine at its usual pace."""
    return BASE_S + SEQUENCE_S * x.num_sequences + TOKEN_S * x.num_tokens + KV_S * x.num_kv_tokens


def work(rng: random.Random, batch: int) -> StepFeatures:
    """A step of `batch` sequences, plain or with two draft tokens for each."""
    tokens = batch * (3 if rng.random() < 0.6 else 1)
    return StepFeatures(batch, tokens, batch * rng.uniform(150, 300))


def ratio(model: StepLatency) -> float:
    """Of eight sequences with two draft tokens each to eight without, as predicted."""
    plain, drafting = (model.predict_one(StepFeatures(8, n, 1800)).seconds for n in (8, 24))
    return drafting / plain


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="The latency model under slow seconds.")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=float, default=1.7, help="times slower in the slowest stretches")
    args = parser.parse_args()
    truth = cost_s(StepFeatures(8, 24, 1800)) / cost_s(StepFeatures(8, 8, 1800))
    print(f"{args.steps} steps, seed {args.seed}; the ratio is {truth:.2f} in truth")
    for most in (1.0, args.most):
        rng, model = random.Random(args.seed), StepLatency()
        for batch in (1, 4, 2, 8, 12) * 4:  # the start: all kinds of work, tried out
            for tokens in (1, 3, 5):
                x = StepFeatures(batch, batch * tokens, batch * rng.uniform(50, 400))
                model.learn_one(x, StepTiming(cost_s(x) * rng.lognormvariate(0, NOISE)))
        batch, pace, until = 4, 1.0, 0
        ratios, errors = [], []
        for number in range(args.steps):
            if number >= until:
                pace, until = most ** rng.choice((0, 0, 0.25, 0.6, 1)), number + rng.randint(*STRETCH)
            batch = min(max(batch + rng.choice((-1, 0, 0, 0, 1)), 1), 24)
            x = work(rng, batch)
            seconds = cost_s(x) * pace * rng.lognormvariate(0, NOISE)
            errors.append(abs(model.predict_one(x).seconds / seconds - 1))
            model.learn_one(x, StepTiming(seconds))
            ratios.append(ratio(model))
        ratios.sort()
        low, high = ratios[len(ratios) // 10], ratios[9 * len(ratios) // 10]
        error = sum(errors) / len(errors)
        print(
            f"up to {most:.1f} times slower: ratio {low:.2f} to {high:.2f}, MAPE {error:.1%}"
            f" (noise alone {math.sqrt(2 / math.pi) * NOISE:.1%}), {model.num_drifts} drift alarms"
        )


if __name__ == "__main__":
    main()
