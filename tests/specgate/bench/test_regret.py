"""Regret and summaries against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specgate.bench.capacity import Slo
from specgate.bench.record import Record
from specgate.bench.regret import regret
from specgate.bench.report import build_report
from specgate.bench.runner import Cell, Measured, Sample, Turn, rotated
from specgate.bench.summary import acceptance_per_position, compare_texts, policy_mix, speculation

ARMS = ("auto", "baseline", "ngram")
SLOW, FAST = Cell("a", "greedy", 1.0, 0.2), Cell("b", "greedy", 5.0, 1.1)


def record(arm: str, job: str, e2e_ms: float | None = 1.0, task: str = "chat", **fields: object) -> Record:
    policy = "ngram" if arm == "auto" else arm
    told = {"policy": policy, "num_target_steps": 4, "policy_changes": []}
    base = {
        "send_lag_ms": 0.0,
        "e2e_ms": e2e_ms,
        "ttft_ms": 1.0,
        "num_output_tokens": 10,
        "policy": policy,
        "specgate": told,
    }
    return Record(job, job, task, arm, 0.0, **(base | fields))  # type: ignore[arg-type]


def measured(times: dict[Cell, dict[str, list[float]]]) -> Measured:
    samples, turns = [], []
    for cell, arms in times.items():
        for arm, values in arms.items():
            turns.append(Turn(cell, arm, 2.0))
            samples += [
                Sample(cell, "s", record(arm, f"{cell.name}{i}", value)) for i, value in enumerate(values)
            ]
    return Measured(tuple(samples), tuple(turns))


TIMES = {
    SLOW: {"auto": [110.0] * 6, "baseline": [100.0] * 6, "ngram": [200.0] * 6},
    FAST: {"auto": [80.0] * 6, "baseline": [400.0] * 6, "ngram": [100.0] * 6},
}


def test_regret_of_each_cell_is_against_its_own_best_arm() -> None:
    slow, fast = regret(measured(TIMES), ARMS)["cells"]
    assert (slow["best_fixed"], fast["best_fixed"]) == ("baseline", "ngram")
    assert slow["regret"] == pytest.approx({"value": 0.1, "low": 0.1, "high": 0.1})
    assert fast["regret"]["value"] == pytest.approx(-0.2)
    assert fast["vs_baseline"]["value"] == pytest.approx(-0.8)
    assert slow["e2e_mean_ms"] == pytest.approx({"auto": 110.0, "baseline": 100.0, "ngram": 200.0})


def test_overall_is_a_geometric_mean_over_cells() -> None:
    overall = regret(measured(TIMES), ARMS)["overall"]
    # Geometric means: auto sqrt(110 * 80), baseline sqrt(100 * 400) = 200, ngram sqrt(200 * 100).
    assert overall["best_single_fixed"] == "ngram"
    assert overall["e2e_geometric_mean_ms"]["baseline"] == pytest.approx(200.0)
    assert overall["vs_best_single_fixed"]["value"] == pytest.approx((110 * 80 / 20000) ** 0.5 - 1)
    assert overall["vs_best_fixed_of_each_cell"]["value"] == pytest.approx((1.1 * 0.8) ** 0.5 - 1)
    assert overall["vs_baseline"]["value"] == pytest.approx((110 * 80 / 40000) ** 0.5 - 1)


def test_only_requests_that_every_arm_answered_are_compared() -> None:
    samples = list(measured({SLOW: TIMES[SLOW]}).samples)
    samples.append(Sample(SLOW, "s", record("auto", "more", 1e6)))
    samples += [
        Sample(SLOW, "s", record(arm, "failed", 1e6, error="429" if arm == "ngram" else None)) for arm in ARMS
    ]
    (cell,) = regret(Measured(tuple(samples), (Turn(SLOW, "auto", 1.0),)), ARMS)["cells"]
    assert cell["n"] == 6
    assert cell["regret"]["value"] == pytest.approx(0.1)


def test_each_start_of_the_servers_is_told_apart() -> None:
    """And its requests are pooled: a ratio of means, no mean of ratios."""
    starts = [{**TIMES[SLOW], "auto": [90.0] * 6}, {**TIMES[SLOW], "auto": [130.0] * 6}]
    parts = []
    for number, times in enumerate(starts):
        part = measured({SLOW: times})
        named = [
            replace(s, record=replace(s.record, job_id=f"{number}/{s.record.job_id}")) for s in part.samples
        ]
        parts.append(replace(part, samples=tuple(named)).of_repeat(number))
    (cell,) = regret(Measured.joined(parts), ARMS)["cells"]
    assert cell["by_repeat"] == pytest.approx([-0.1, 0.3])
    assert (cell["n"], cell["regret"]["value"]) == (12, pytest.approx(0.1))


def test_tasks_tell_the_winner_its_margin_and_what_auto_did() -> None:
    slow, fast = regret(measured(TIMES), ARMS)["tasks"]
    assert (slow["task"], slow["best_fixed"], slow["is_clear"]) == ("chat", "baseline", True)
    assert slow["margin"] == pytest.approx(1.0)
    assert slow["auto_policy_mix"] == {"ngram": 1.0}
    assert (slow["auto_picked_best"], fast["auto_picked_best"]) == (False, True)


def test_clear_wins_are_counted_by_winner() -> None:
    wins = regret(measured(TIMES), ARMS)["clear_wins"]
    assert wins["cells"] == {"baseline": {"num": 1, "auto_picked": 0}, "ngram": {"num": 1, "auto_picked": 1}}
    close = {SLOW: {"auto": [100.0] * 6, "baseline": [100.0] * 6, "ngram": [109.0] * 6}}
    assert regret(measured(close), ARMS)["clear_wins"]["cells"] == {}


def test_without_auto_or_a_fixed_arm_there_is_no_regret() -> None:
    assert regret(measured(TIMES), ("baseline", "ngram")) == {}
    assert regret(measured(TIMES), ("auto",)) == {}


def test_texts_are_compared_job_by_job() -> None:
    baseline = {"1": record("baseline", "1", text_sha256="a"), "2": record("baseline", "2", text_sha256="b")}
    same = [record("ngram", "1", text_sha256="a"), record("ngram", "2", text_sha256="b")]
    assert compare_texts(same, baseline)["identical_to_baseline"] is True
    other = [same[0], record("ngram", "2", text_sha256="c"), record("ngram", "3", text_sha256="d")]
    found = compare_texts(other, baseline)
    assert (found["identical_to_baseline"], found["texts"]) == (False, {"compared": 2, "identical": 1})
    assert compare_texts(other, {})["identical_to_baseline"] is None
    shorter = [record("ngram", "1", text_sha256="a", num_output_tokens=9)]
    assert compare_texts(shorter, baseline)["identical_to_baseline"] is False


def test_counts_are_summed_before_ratios_are_taken() -> None:
    told = [
        {"num_drafts": 8, "num_accepted_tokens": 8, "num_target_steps": 5, "accepted_per_position": [6, 2]},
        {"num_drafts": 2, "num_accepted_tokens": 0, "num_target_steps": 10, "accepted_per_position": [0]},
    ]
    records = [record("ngram", str(i), specgate=one) for i, one in enumerate(told)]
    found = speculation(records)
    assert found["mean_acceptance_length"] == pytest.approx(1.8)  # not the mean of 2 and 1
    assert found["target_steps_saved"] == 5
    assert acceptance_per_position(records) == {"ngram": pytest.approx([0.6, 0.2])}
    assert policy_mix([]) == {}


def test_the_report_has_the_promised_shape() -> None:
    document = build_report("sweep", {"model": {}}, measured(TIMES), ARMS, Slo(ttft_ms=2.0))
    assert [(row["arm"], row["fraction"]) for row in document["rows"]] == [
        (arm, cell.fraction) for cell in (SLOW, FAST) for arm in ARMS
    ]
    row = document["rows"][0]
    promised = {
        "arm", "rate", "fraction", "n", "errors", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "queue_wait_ms",
        "output_tokens_per_s", "mean_acceptance_length", "identical_to_baseline", "by_task",
    }  # fmt: skip
    assert promised <= set(row)
    assert set(row["e2e_ms"]) == {"mean", "p50", "p95", "p99"}
    assert row["output_tokens_per_s"] == pytest.approx(60 / 2.0)
    assert row["goodput_per_s"] == pytest.approx(6 / 2.0)
    assert set(row["by_task"]) == {"chat"}
    assert set(document["latency_model"]) == {"r2", "mape"}


def test_a_late_load_generator_is_owned_up_to() -> None:
    samples = tuple(Sample(SLOW, "s", record("auto", str(i), send_lag_ms=80.0)) for i in range(5))
    late = Measured(samples, (Turn(SLOW, "auto", 1.0),))
    (note,) = build_report("run", {}, late, ("auto",), Slo())["meta"]["notes"]
    assert "more than 80 ms after they were due" in note
    assert build_report("run", {}, measured(TIMES), ARMS, Slo())["meta"]["notes"] == []


def test_every_arm_starts_as_often_as_the_others() -> None:
    orders = [rotated(ARMS, number) for number in range(3)]
    assert sorted(order[0] for order in orders) == sorted(ARMS)
    assert all(sorted(order) == sorted(ARMS) for order in orders)
