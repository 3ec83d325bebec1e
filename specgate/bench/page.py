"""`report.html`: one file that needs nothing else, readable in the light and in the dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from specgate.bench import tables
from specgate.bench.fleet import AUTO
from specgate.bench.report import HTML_NAME
from specgate.bench.svg import Axis, Series, interval_plot, line_plot, stack_plot

Row = Mapping[str, Any]
_TITLES = {
    "sweep": "Arms across rates",
    "run": "One arm under load",
    "replay": "A trace replayed",
    "shift": "A shifting workload",
}


def write_page(document: Mapping[str, Any], out: Path) -> Path:
    """Write `report.html`."""
    path = out / HTML_NAME
    path.write_text(render(document), encoding="utf-8")
    return path


def render(document: Mapping[str, Any]) -> str:
    """The whole page."""
    css = resources.files("specgate.bench").joinpath("page.css").read_text(encoding="utf-8")
    meta = document["meta"]
    model = meta["model"]["id"]
    title = _TITLES.get(document["kind"], document["kind"])
    body = [
        f"<h1>{escape(title)}: {escape(model)}</h1>",
        f'<p class="soft">{escape(_subtitle(document))}</p>',
        *(f'<p class="banner">{escape(note)}</p>' for note in meta.get("notes", ())),
        tables.tiles(document),
    ]
    samplings = dict.fromkeys(row["sampling"] for row in document["rows"])
    body += [
        *(_section(document, sampling) for sampling in samplings),
        tables.winners(document),
        tables.acceptance(document),
        tables.by_task(document),
        tables.everything(document),
        tables.circumstances(document),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>specgate bench: {escape(title)}</title>\n<style>\n{css}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}\n</main>\n</body>\n</html>\n"
    )


def _subtitle(document: Mapping[str, Any]) -> str:
    meta = document["meta"]
    machine = meta["machine"]
    num = sum(row["n"] for row in document["rows"])
    capacity = meta.get("capacity")
    parts = [
        f"{num} requests",
        f"{machine['cpu']}, {machine['num_cpus']} CPUs",
        f"precision {meta['precision']}" if meta.get("precision") else "",
        meta["started"],
    ]
    if capacity:
        how = (
            "as given"
            if capacity["concurrency"] is None
            else f"closed loop of {capacity['concurrency']} on baseline"
        )
        parts.insert(1, f"capacity {capacity['requests_per_s']:.2f} requests/s ({how})")
    return " · ".join(part for part in parts if part)


def _section(document: Mapping[str, Any], sampling: str) -> str:
    """The plots of one sampling setting."""
    rows = [row for row in document["rows"] if row["sampling"] == sampling]
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    at = {(row["cell"], row["arm"]): row for row in rows}
    columns = [_column(at[cell, arms[0]]) for cell in cells]
    if len(cells) == 1 and len(arms) == 1:
        return ""  # nothing to compare: the table says it all
    plots = _latency_plots(at, cells, arms, columns)
    plots += _auto_plots(document, at, cells, arms, columns)
    x_axis = "load"
    if rows[0]["fraction"] is not None:
        x_axis = "rate, as a share of the baseline's capacity"
    elif rows[0]["segment"] is not None:
        x_axis = "time"
    legend = "".join(f'<span class="s-{escape(arm)}">{escape(arm)}</span>' for arm in arms)
    return (
        f"<h2>{escape(_SAMPLING_TITLES.get(sampling, sampling))}</h2>"
        f'<p class="soft">Left to right: {x_axis}.</p>'
        f'<div class="legend">{legend}</div><div class="plots">{"".join(plots)}</div>'
    )


_SAMPLING_TITLES = {
    "greedy": "Greedy decoding",
    "temperature": "Sampled at temperature 0.8",
    "top_p": "Sampled at temperature 0.8, top-p 0.9",
}


def _column(row: Row) -> str:
    if row["fraction"] is not None:
        return f"{row['fraction']:g}\n{row['rate']:.2f}/s"
    if row["segment"] is not None:
        return f"{row['segment'] + 1}" + (f"\n{row['rate']:.1f}/s" if row["rate"] is not None else "")
    return str(row["cell"]).rpartition(", ")[2]


def _latency_plots(
    at: Mapping[tuple[str, str], Row], cells: Sequence[str], arms: Sequence[str], columns: Sequence[str]
) -> list[str]:
    def series(metric: str, point: str) -> list[Series]:
        return [Series(arm, tuple(at[cell, arm][metric][point] for cell in cells)) for arm in arms]

    def card(title: str, text: str, lines: list[Series], axis: Axis) -> str:
        return _card(title, text, line_plot(lines, columns, axis))

    ms = Axis("ms", can_be_log=True)
    plots = [
        card("Mean E2E, ms", "From when a request was due to its last byte.", series("e2e_ms", "mean"), ms),
        card("TTFT p95, ms", "From when a request was due to its first token.", series("ttft_ms", "p95"), ms),
        card(
            "TPOT p50, ms",
            "(E2E - TTFT) / (output tokens - 1).",
            series("tpot_ms", "p50"),
            Axis("ms", digits=1),
        ),
    ]
    if "baseline" in arms and len(arms) > 1:
        lines = [
            Series(arm, tuple(_speed_up(at[cell, "baseline"], at[cell, arm]) for cell in cells))
            for arm in arms
            if arm != "baseline"
        ]
        axis = Axis("speed-up", unit="x", digits=2, reference=1.0, from_zero=False)
        plots.insert(
            1,
            card(
                "Speed-up over baseline", "Mean E2E of baseline / mean E2E. Above 1 is faster.", lines, axis
            ),
        )
    return plots


def _speed_up(baseline: Row, other: Row) -> float | None:
    ours, theirs = other["e2e_ms"]["mean"], baseline["e2e_ms"]["mean"]
    return theirs / ours if ours and theirs else None


def _auto_plots(
    document: Mapping[str, Any],
    at: Mapping[tuple[str, str], Row],
    cells: Sequence[str],
    arms: Sequence[str],
    columns: Sequence[str],
) -> list[str]:
    """What auto chose, and what it lost by not being the best fixed arm."""
    plots = []
    mixes = [at[cell, AUTO]["policy_mix"] for cell in cells] if AUTO in arms else []
    if any(mixes):
        plot = stack_plot(mixes, columns, "policy mix")
        text = "Share of auto's output tokens made under each policy."
        plots.append(_card("What auto chose", text, plot))
    entries = {entry["cell"]: entry for entry in document["regret"].get("cells", ())}
    known = [entries.get(cell) for cell in cells]
    if any(known):
        values = [
            [None if e is None else _percent(e["regret"][k]) for e in known] for k in ("value", "low", "high")
        ]
        series = Series(AUTO, *(tuple(part) for part in values))
        labels = ["" if e is None else f"vs {e['best_fixed']}" for e in known]
        plot = interval_plot(series, labels, columns, Axis("regret", unit=" %", digits=1))
        text = "Mean E2E against the best fixed arm, paired by request; 95 % interval. Below 0 is faster."
        plots.append(_card("Regret of auto", text, plot))
    return plots


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _card(title: str, text: str, plot: str) -> str:
    return f'<div class="card"><h3>{escape(title)}</h3><p>{escape(text)}</p>{plot}</div>'
