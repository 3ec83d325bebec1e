"""How long the step planner takes: `python tests/bench/planner.py [--sequences 64]`.

Sequences decode under a scripted acceptance, so that plans change as they do in life. A snapshot
arrives every 20 steps (in `use`, between two steps); new sequences replace finished ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np

from engine.spec.planner import SequenceView, StepView
from engine.types import PolicyAssignment
from router_models.acceptance import Acceptance
from router_models.types import AcceptanceCounts, AcceptanceKey, DraftCoefficients, StepCoefficients
from specgate.policy.plan_step import StepPlanner
from specgate.policy.view import ModelView
from specgate.types import TASKS


def model_view() -> ModelView:
    """Two drafters, nine tasks, a CPU's costs."""
    acceptance = Acceptance()
    for task in TASKS:
        acceptance.learn_one(
            AcceptanceKey("ngram", task), AcceptanceCounts(400, 150, (150,) * 4, (90, 70, 60, 50))
        )
        acceptance.learn_one(
            AcceptanceKey("draft", task), AcceptanceCounts(400, 400, (400,) * 5, (280, 200, 140, 100, 70))
        )
    keys = [
        AcceptanceKey(method, task, band)
        for method in ("ngram", "draft")
        for task in (None, *TASKS)
        for band in ("greedy", "warm")
    ]
    step = StepCoefficients(
        c0_s=0.02, c_seq_s=1e-4, c_tok_s=1.2e-3, c_kv_s=1e-7, c_sample_s=2e-4, c_tok_above_s=1.2e-3,
        knee_tokens=None, p0_s=0.02, p_tok_s=1e-3, p_dec_s=1.2e-3, p_kv_s=0.0,
        drafters={
            "ngram": DraftCoefficients(d_seq_s=3e-5),
            "draft": DraftCoefficients(4e-3, 1e-4, 2e-4, 2e-8, 1.0, 1.0),
        },
        num_steps=1000,
    )  # fmt: skip
    curves = tuple(acceptance.predict_one(key) for key in keys)
    return ModelView(1, step, curves, {"ngram": 4, "draft": 5}, {"ngram": 3600.0, "draft": 3600.0})


def run(num_sequences: int, num_steps: int) -> list[float]:
    """Microseconds of each call of `plan`."""
    random = np.random.default_rng(0)
    planner = StepPlanner()
    model = model_view()
    planner.use(model)
    made = 0

    def new() -> SequenceView:
        nonlocal made
        made += 1
        return SequenceView(
            f"r{made}", PolicyAssignment("draft", 5), TASKS[made % 9], 0.0 if made % 3 else 0.8, 1.0,
            200 + made % 300, 1, 400, 0, 0, 0, "baseline", 0, 0,
        )  # fmt: skip

    sequences = [new() for _ in range(num_sequences)]
    taken = []
    for number in range(num_steps):
        if number % 20 == 0:
            planner.use(replace(model, version=number))
        view = StepView(number, number * 0.05, tuple(sequences), 0, 0, 1000)
        started_s = time.perf_counter()
        plans = planner.plan(view)
        taken.append((time.perf_counter() - started_s) * 1e6)
        for i, s in enumerate(sequences):
            plan = plans.get(s.seq_id)
            drafted = plan.max_draft_tokens if plan is not None else 0
            accepted = int(random.integers(0, drafted + 1)) if drafted else 0
            if s.num_output_tokens > 300:
                sequences[i] = new()
                continue
            sequences[i] = replace(
                s,
                num_tokens=s.num_tokens + accepted + 1,
                num_output_tokens=s.num_output_tokens + accepted + 1,
                num_drafts=s.num_drafts + (drafted > 0),
                num_draft_tokens=s.num_draft_tokens + drafted,
                num_accepted_tokens=s.num_accepted_tokens + accepted,
            )
    return taken[100:]


def main() -> None:
    """Print the quantiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    taken = run(args.sequences, args.steps)
    cuts = statistics.quantiles(taken, n=100)
    print(
        f"{args.sequences} sequences, {len(taken)} steps: mean {statistics.mean(taken):.0f} us, "
        f"p50 {cuts[49]:.0f}, p90 {cuts[89]:.0f}, p99 {cuts[98]:.0f}"
    )


if __name__ == "__main__":
    main()
