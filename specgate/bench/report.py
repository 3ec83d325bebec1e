"""The report: `report.json` from what was measured; `page` makes it readable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.types import BASELINE
from specgate.bench.capacity import Slo
from specgate.bench.fleet import Fleet
from specgate.bench.record import Record
from specgate.bench.regret import regret
from specgate.bench.runner import Cell, Measured
from specgate.bench.stats import percentiles
from specgate.bench.summary import acceptance_per_position, rates, summarise

LATE_MS = 50.0  # of the load generator itself; from here on a report says so
JSON_NAME, HTML_NAME = "report.json", "report.html"


def build_report(
    kind: str, meta: Mapping[str, Any], measured: Measured, arms: Sequence[str], slo: Slo
) -> dict[str, Any]:
    """The report's document: meta, one row per cell and arm, regret, latency model."""
    lag = percentiles([sample.record.send_lag_ms for sample in measured.samples])
    notes = list(meta.get("notes", ()))
    if (lag["p95"] or 0.0) > LATE_MS:
        notes.append(
            f"The load generator was late: 5 % of the requests left more than {lag['p95']:.0f} ms after they "
            "were due. Something else kept this machine busy, and the times below hold that too."
        )
    return {
        "kind": kind,
        "meta": {**meta, "notes": notes, "arms": list(arms), "client": {"send_lag_ms": lag}},
        "rows": [_row(cell, arm, measured, slo) for cell in measured.cells() for arm in arms],
        "regret": regret(measured, arms),
        "acceptance": {arm: _acceptance(measured, arm) for arm in arms},
        "latency_model": {"r2": None, "mape": None},
    }


def _row(cell: Cell, arm: str, measured: Measured, slo: Slo) -> dict[str, Any]:
    of_cell = [sample.record for sample in measured.samples if sample.cell == cell]
    own = [record for record in of_cell if record.arm == arm]
    baseline = {record.job_id: record for record in of_cell if record.arm == BASELINE}
    seconds = sum(turn.seconds for turn in measured.turns if (turn.cell, turn.arm) == (cell, arm))
    return {
        "arm": arm,
        "cell": cell.name,
        "sampling": cell.sampling,
        "rate": cell.rate,
        "fraction": cell.fraction,
        "segment": cell.segment,
        "tasks": cell.tasks,
        "seconds": seconds,
        **summarise(own, baseline),
        **rates(own, seconds, slo),
        "by_task": _by_task(own, baseline),
    }


def _by_task(records: Sequence[Record], baseline: Mapping[str, Record]) -> dict[str, Any]:
    tasks = sorted({record.task for record in records})
    return {task: summarise([r for r in records if r.task == task], baseline) for task in tasks}


def _acceptance(measured: Measured, arm: str) -> dict[str, list[float]]:
    """By task, over all cells: survival by draft position, of requests decided for the arm itself."""
    own = [sample.record for sample in measured.samples if sample.record.arm == arm]
    out = {}
    for task in sorted({record.task for record in own}):
        found = acceptance_per_position(record for record in own if record.task == task)
        if arm in found:
            out[task] = found[arm]
    return out


async def latency_model(fleet: Fleet) -> dict[str, Any]:
    """The scores of the server's own step-latency model; null until it reports them."""
    for arm in fleet.arms:
        if not fleet.is_specgate:
            break
        state = await fleet.state(arm)
        for model in (state.get("models") or {}).values():
            found = model.get("latency_model") or {}
            if found.get("r2") is not None or found.get("mape") is not None:
                return {"arm": arm, "r2": found.get("r2"), "mape": found.get("mape"), "state": found}
    return {"r2": None, "mape": None}


def write_json(document: Mapping[str, Any], out: Path) -> Path:
    """Write `report.json`."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / JSON_NAME
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def write_records(measured: Measured, out: Path) -> Path:
    """Write `records.jsonl`: every request, with its text, for whoever wants to count again."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "records.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for sample in measured.samples:
            record = sample.record
            row = {name: getattr(record, name) for name in record.__slots__ if name != "emitted_s"}
            row |= {"cell": sample.cell.name, "slice": sample.slice_name, "repeat": sample.repeat}
            row["specgate"] = dict(record.specgate)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path
