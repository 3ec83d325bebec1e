"""The tables of the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from specgate.bench.text import percent

Document = Mapping[str, Any]
FINE = 0.03  # a difference that is allowed
_DASH = "–"


def tiles(document: Document) -> str:
    """The few numbers to see first."""
    out = []
    overall = document["regret"].get("overall", {})
    for key, text in (
        ("vs_best_fixed_of_each_cell", "auto against the best fixed arm of each cell, geometric mean of E2E"),
        (
            "vs_best_single_fixed",
            f"auto against the best single fixed arm, {overall.get('best_single_fixed')}",
        ),
        ("vs_baseline", "auto against baseline"),
    ):
        entry = overall.get(key)
        if entry and entry["value"] is not None:
            kind = "good" if entry["value"] <= 0 else "bad" if entry["value"] > FINE else ""
            out.append(_tile(f"{100 * entry['value']:+.1f} %", f"{text}; {_range(entry)}", kind))
    compared = sum(row["texts"]["compared"] for row in document["rows"] if row["arm"] != "baseline")
    identical = sum(row["texts"]["identical"] for row in document["rows"] if row["arm"] != "baseline")
    if compared:
        kind = "good" if identical == compared else "bad"
        out.append(_tile(f"{identical} of {compared}", "texts equal to baseline's", kind))
    errors = sum(row["errors"] for row in document["rows"])
    out.append(_tile(str(errors), "failed requests", "bad" if errors else "good"))
    found = document["meta"]
    if "largest_concurrency" in found:
        value = found["largest_concurrency"]
        out.append(_tile(_DASH if value is None else str(value), "largest concurrency that meets the SLOs"))
    scores = document["latency_model"]
    if scores["r2"] is not None:
        mape = "" if scores["mape"] is None else f"; MAPE {100 * scores['mape']:.1f} %"
        r2 = f"{scores['r2']:.3f}" if scores["r2"] >= 0 else "< 0"
        out.append(_tile(r2, f"R² of the server's step-latency model{mape}"))
    return f'<div class="tiles">{"".join(out)}</div>'


def winners(document: Document) -> str:
    """Who wins each cell and task, and what auto did there."""
    cells = document["regret"].get("cells", ())
    if not cells:
        return ""
    arms = list(cells[0]["e2e_mean_ms"])
    rows: list[str] = []
    for cell in cells:
        tasks = [entry for entry in document["regret"]["tasks"] if entry["cell"] == cell["cell"]]
        rows.append(_head_row(cell["cell"], len(arms) + 7))
        rows += [_winner_row(entry, arms) for entry in (cell, *tasks)]
    names = ["task", "n", *(f"{arm}, ms" for arm in arms), "best fixed", "margin", "auto's tokens"]
    head = _header([*names, "auto against it", "by start"], left={"best fixed"})
    return (
        "<h2>Who wins where</h2><p>Mean E2E on the requests that every arm answered. Margin: how much slower "
        f"the second-best fixed arm is; bold from 10 % on. {escape(_clear_text(document))}</p>"
        + _table(head, rows)
    )


def _winner_row(entry: Mapping[str, Any], arms: Sequence[str]) -> str:
    best = entry["best_fixed"]
    means = "".join(_td(_number(entry["e2e_mean_ms"][arm]), "best" if arm == best else "") for arm in arms)
    value = entry["regret"]["value"]
    kind = "good" if value <= 0 else "bad" if value > FINE else ""
    margin = _DASH if entry["margin"] is None else f"{100 * entry['margin']:.0f} %"
    task = escape(entry["task"]) if entry["task"] else "all tasks"
    starts = ", ".join(f"{100 * one:+.1f}" for one in entry["by_repeat"])
    return (
        f"<tr><td>{task}</td>{_td(entry['n'])}{means}"
        f'<td class="left"><span class="chip s-{escape(best)}">{escape(best)}</span></td>'
        f"{_td(margin, 'best' if entry['is_clear'] else '')}"
        f"<td>{_mix(entry['auto_policy_mix'])}</td>{_td(percent(entry['regret']), kind)}"
        f'<td title="by start of the servers, %">{starts if len(entry["by_repeat"]) > 1 else ""}</td></tr>'
    )


def _clear_text(document: Document) -> str:
    parts = []
    for what in ("cells", "tasks"):
        wins = document["regret"]["clear_wins"][what]
        if wins:
            told = ", ".join(
                f"{arm} {count['num']} (auto mostly did the same in {count['auto_picked']})"
                for arm, count in wins.items()
            )
            parts.append(f"Clear winners of {what}: {told}.")
    return " ".join(parts)


def acceptance(document: Document) -> str:
    """How often the draft token at each depth was accepted, by arm and task."""
    found = {
        (arm, task): values
        for arm, tasks in document["acceptance"].items()
        for task, values in tasks.items()
        if values
    }
    if not found:
        return ""
    depth = max(map(len, found.values()))
    rows = []
    for (arm, task), values in sorted(found.items()):
        cells = "".join(_heat(value) for value in values)
        empty = "<td></td>" * (depth - len(values))
        chip = f'<span class="chip s-{escape(arm)}">{escape(arm)}</span>'
        rows.append(f'<tr><td>{chip}</td><td class="left">{escape(task)}</td>{cells}{empty}</tr>')
    positions = "".join(f'<th class="heat">{position + 1}</th>' for position in range(depth))
    head = f'<tr><th>arm</th><th class="left">task</th>{positions}</tr>'
    return (
        "<h2>Acceptance by task and position</h2><p>Share of drafts, in percent, whose token at this "
        "position was accepted (the tokens before it included).</p>" + _table(head, rows)
    )


_COLUMNS = (
    "n", "errors", "TTFT p50", "p95", "TPOT p50", "p95", "ITL p50", "p95", "E2E mean", "p50", "p95", "p99",
    "accepted", "steps saved", "identical",
)  # fmt: skip


def by_task(document: Document) -> str:
    """Every number by task, folded away cell by cell."""
    parts = []
    for cell in dict.fromkeys(row["cell"] for row in document["rows"]):
        rows = []
        own = [row for row in document["rows"] if row["cell"] == cell]
        for task in sorted({task for row in own for task in row["by_task"]}):
            rows.append(_head_row(task, len(_COLUMNS) + 1))
            rows += [_numbers(row["arm"], row["by_task"][task]) for row in own if task in row["by_task"]]
        table = _table(_header(["arm", *_COLUMNS]), rows, "wide")
        parts.append(f"<details><summary>{escape(cell)}</summary>{table}</details>")
    return f"<h2>By task</h2><p>Times in ms.</p>{''.join(parts)}"


def everything(document: Document) -> str:
    """One line per cell and arm."""
    rows: list[str] = []
    cell = None
    for row in document["rows"]:
        if row["cell"] != cell:
            cell = row["cell"]
            rows.append(_head_row(_cell_title(row), len(_COLUMNS) + 4))
        more = _td(_number(row["queue_wait_ms"]["p95"])) + _td(_number(row["output_tokens_per_s"], 1))
        rows.append(_numbers(row["arm"], row, more + _td(_number(row["goodput_per_s"], 2))))
    head = _header(["arm", *_COLUMNS, "queue wait p95", "tokens/s", "goodput/s"])
    return f"<h2>All cells</h2><p>Times in ms.</p>{_table(head, rows, 'wide')}"


def circumstances(document: Document) -> str:
    """How it was measured, and on what."""
    meta = document["meta"]
    shared = "one server for all arms" if not meta["servers"]["one_per_arm"] else "a server for each arm"
    text = (
        "Requests are sent when they are due, whatever became of those before, and timed from that moment. "
        "All arms get the same requests at the same moments, in slices that take turns; a slice starts on an "
        f"idle server. Here: {shared}."
    )
    pairs = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{_value(value)}</dd>"
        for name, value in meta.items()
        if name != "notes" and value not in (None, {}, [])
    )
    return f'<h2>How it was measured</h2><p>{escape(text)}</p><div class="scroll"><dl>{pairs}</dl></div>'


def _numbers(arm: str, row: Mapping[str, Any], more: str = "") -> str:
    same = {None: _DASH, True: "yes", False: "no"}[row["identical_to_baseline"]]
    saved = row["target_steps_saved_share"]
    cells = [
        _td(row["n"]), _td(row["errors"], "bad" if row["errors"] else ""),
        _td(_number(row["ttft_ms"]["p50"])), _td(_number(row["ttft_ms"]["p95"])),
        _td(_number(row["tpot_ms"]["p50"], 1)), _td(_number(row["tpot_ms"]["p95"], 1)),
        _td(_number(row["itl_ms"]["p50"], 1)), _td(_number(row["itl_ms"]["p95"], 1)),
        *(_td(_number(row["e2e_ms"][point])) for point in ("mean", "p50", "p95", "p99")),
        _td(_number(row["mean_acceptance_length"], 2)),
        _td(_DASH if saved is None else f"{100 * saved:.0f} %"),
        _td(same, "bad" if same == "no" else ""),
    ]  # fmt: skip
    chip = f'<span class="chip s-{escape(arm)}">{escape(arm)}</span>'
    return f"<tr><td>{chip}</td>{''.join(cells)}{more}</tr>"


def _heat(value: float) -> str:
    shade = f"rgba(var(--heat), {0.04 + 0.5 * value:.2f})"
    return f'<td class="heat" style="background: {shade}">{100 * value:.0f}</td>'


def _cell_title(row: Mapping[str, Any]) -> str:
    title = str(row["cell"])
    if row["fraction"] is not None:
        title += f" ({row['rate']:.2f} requests/s)"
    return title + (f": {row['tasks']}" if row.get("tasks") else "")


def _value(value: Any) -> str:
    if isinstance(value, str | int | float):
        return escape(str(value))
    return f"<code>{escape(json.dumps(value, ensure_ascii=False))}</code>"


def _tile(number: str, text: str, kind: str = "") -> str:
    return f'<div class="tile"><b class="{kind}">{escape(number)}</b><span>{escape(text)}</span></div>'


def _range(entry: Mapping[str, float]) -> str:
    return f"95 % interval {100 * entry['low']:+.1f} to {100 * entry['high']:+.1f} %"


def _mix(mix: Mapping[str, float]) -> str:
    parts = "".join(
        f'<i class="s-{escape(name)}" style="width: {100 * share:.1f}%"'
        f' title="{escape(name)}: {100 * share:.0f} %"></i>'
        for name, share in mix.items()
    )
    return f'<span class="mix">{parts}</span>'


def _number(value: float | None, digits: int = 0) -> str:
    return _DASH if value is None else f"{value:.{digits}f}"


def _td(text: object, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(str(text))}</td>' if kind else f"<td>{escape(str(text))}</td>"


def _header(names: Sequence[str], left: set[str] | None = None) -> str:
    cells = (
        f'<th class="left">{escape(n)}</th>' if n in (left or ()) else f"<th>{escape(n)}</th>" for n in names
    )
    return f"<tr>{''.join(cells)}</tr>"


def _head_row(text: str, width: int) -> str:
    return f'<tr class="head"><td class="left" colspan="{width}">{escape(text)}</td></tr>'


def _table(head: str, rows: Sequence[str], kind: str = "") -> str:
    return (
        f'<div class="scroll {kind}"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
