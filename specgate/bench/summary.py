"""Records to numbers: one summary for a set of requests under one arm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specgate.bench.capacity import Slo
from specgate.bench.record import Record
from specgate.bench.stats import mean, percentiles


def latencies(records: Sequence[Record]) -> dict[str, Any]:
    """TTFT, TPOT, ITL, E2E and queue wait of the answered requests, in ms."""
    ok = [record for record in records if record.is_ok]
    e2e = _known(record.e2e_ms for record in ok)
    return {
        "ttft_ms": percentiles(_known(record.ttft_ms for record in ok)),
        "tpot_ms": percentiles(_known(record.tpot_ms for record in ok)),
        "itl_ms": percentiles([gap for record in ok for gap in record.itl_ms]),
        "e2e_ms": {"mean": mean(e2e), **percentiles(e2e)},
        "queue_wait_ms": percentiles(_known(record.queue_wait_ms for record in ok)),
    }


def speculation(records: Sequence[Record]) -> dict[str, Any]:
    """What drafting did: counts summed over the requests, before any ratio is taken."""
    told = [record for record in records if record.is_ok and record.specgate]
    num_drafts = _total(told, "num_drafts")
    num_tokens = sum(record.num_output_tokens or 0 for record in told)
    saved = num_tokens - _total(told, "num_target_steps")
    return {
        "mean_acceptance_length": 1 + _total(told, "num_accepted_tokens") / num_drafts
        if num_drafts
        else None,
        "target_steps_saved": saved if told else None,
        "target_steps_saved_share": saved / num_tokens if num_tokens else None,
        "policy_mix": policy_mix(told),
        "acceptance_per_position": acceptance_per_position(told),
    }


def policy_mix(records: Iterable[Record]) -> dict[str, float]:
    """Share of the output tokens made under each policy."""
    tokens: Counter[str] = Counter()
    for record in records:
        tokens.update(record.policy_tokens())
    total = tokens.total()
    return {policy: count / total for policy, count in sorted(tokens.items())} if total else {}


def acceptance_per_position(records: Iterable[Record]) -> dict[str, list[float]]:
    """Unconditional survival by draft position, for each policy a request was decided for."""
    accepted: dict[str, Counter[int]] = {}
    drafts: Counter[str] = Counter()
    for record in records:
        positions = record.specgate.get("accepted_per_position")
        if record.policy is None or not positions or not record.specgate.get("num_drafts"):
            continue
        drafts[record.policy] += record.specgate["num_drafts"]
        counts = accepted.setdefault(record.policy, Counter())
        for position, count in enumerate(positions):
            counts[position] += count
    return {
        policy: [counts[position] / drafts[policy] for position in range(max(counts, default=-1) + 1)]
        for policy, counts in sorted(accepted.items())
    }


def compare_texts(records: Sequence[Record], baseline: Mapping[str, Record]) -> dict[str, Any]:
    """Whether answers equal those of the baseline arm to the same job: text, length, end."""
    same = compared = 0
    for record in records:
        other = baseline.get(record.job_id)
        if other is None or not (record.is_ok and other.is_ok):
            continue
        compared += 1
        same += (record.text_sha256, record.num_output_tokens, record.finish_reason) == (
            other.text_sha256, other.num_output_tokens, other.finish_reason,
        )  # fmt: skip
    return {
        "identical_to_baseline": same == compared if compared else None,
        "texts": {"compared": compared, "identical": same},
    }


def rates(records: Sequence[Record], seconds: float, slo: Slo) -> dict[str, Any]:
    """Throughput and goodput over the time the arm had."""
    ok = [record for record in records if record.is_ok]
    tokens = sum(record.num_output_tokens or 0 for record in ok)
    goodput = sum(slo.is_met(record) for record in ok) / seconds if slo.is_set and seconds else None
    return {
        "requests_per_s": len(ok) / seconds if seconds else None,
        "output_tokens_per_s": tokens / seconds if seconds else None,
        "goodput_per_s": goodput,
    }


def summarise(records: Sequence[Record], baseline: Mapping[str, Record]) -> dict[str, Any]:
    """All that is said of a set of requests, whatever their number."""
    errors = [record.error for record in records if record.error is not None]
    ok = [record for record in records if record.is_ok]
    return {
        "n": len(records),
        "errors": len(errors),
        "error_examples": sorted(set(errors))[:3],
        **latencies(records),
        **speculation(records),
        **compare_texts(records, baseline),
        "output_tokens_mean": mean([float(record.num_output_tokens or 0) for record in ok]),
        "prompt_tokens_mean": mean([float(record.num_prompt_tokens or 0) for record in ok]),
        "reasons": dict(Counter(record.reason for record in ok if record.reason is not None)),
        "prediction_error": prediction_error(ok),
    }


def prediction_error(records: Iterable[Record]) -> dict[str, float | None]:
    """Median of |predicted - measured| / measured, for what the server predicted. None: nothing."""
    out: dict[str, float | None] = {}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        errors = []
        for record in records:
            told = (record.specgate.get("predicted") or {}).get(name)
            seen = (record.specgate.get("timings") or {}).get(name)
            if told is not None and seen:
                errors.append(abs(told - seen) / seen)
        out[name] = percentiles(errors, (50,))["p50"]
    return out


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _total(records: Iterable[Record], name: str) -> int:
    return sum(int(record.specgate.get(name) or 0) for record in records)
