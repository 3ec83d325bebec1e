"""Makes the latency series that simulated rollouts resample, from a recorded bench run.

    specgate bench run --arm baseline --concurrency 4 --duration 330 --max-tokens 32 --records \\
        --data PROMPTS.jsonl --out out/series
    python scripts/record_latencies.py out/series/records.jsonl specgate/bench/latency_series.json \\
        "the default model on two shared CPU cores, four requests at a time"

Only numbers are kept: sizes and times, in order of arrival.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("num_prompt_tokens", "num_output_tokens", "ttft_ms", "tpot_ms", "e2e_ms", "queue_wait_ms")


def row(record: dict[str, Any]) -> list[float | None]:
    """The numbers of one answer."""
    wait = record["specgate"]["timings"]["queue_wait_ms"]
    times = (record["ttft_ms"], record["tpot_ms"], record["e2e_ms"], wait)
    counts = [record["num_prompt_tokens"], record["num_output_tokens"]]
    return counts + [None if time is None else round(time, 2) for time in times]


def main(source: Path, target: Path, what: str) -> int:
    """Write `target`."""
    records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    whole = [r for r in records if r["error"] is None and r["tpot_ms"] is not None]
    whole.sort(key=lambda r: r["arrival_s"])  # stable: a closed loop has no arrivals, but an order
    lines = ",\n".join(json.dumps(row(record)) for record in whole)
    head = f'{{"what": {json.dumps(what)},\n"columns": {json.dumps(COLUMNS)},\n"requests": [\n'
    target.write_text(f"{head}{lines}\n]}}\n", encoding="utf-8")
    print(f"{target}: {len(whole)} requests of {len(records)}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
