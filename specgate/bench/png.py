"""The main plots as PNG files, for where a page cannot go. Needs matplotlib, an optional extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"auto": "#3b5bdb", "baseline": "#868e96", "ngram": "#0ca678", "draft": "#e8590c"}
_OTHER = "#ae3ec9"
Row = Mapping[str, Any]


def write_pngs(document: Mapping[str, Any], out: Path) -> list[Path] | None:
    """One file per plot and sampling setting; None where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    paths = []
    for sampling in dict.fromkeys(row["sampling"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["sampling"] == sampling]
        cells = list(dict.fromkeys(row["cell"] for row in rows))
        if len(cells) < 2:
            continue
        paths += [
            _lines(rows, cells, ("e2e_ms", "mean"), "mean E2E, ms", out / f"e2e_{sampling}.png"),
            _lines(rows, cells, ("ttft_ms", "p95"), "TTFT p95, ms", out / f"ttft_{sampling}.png"),
            _lines(rows, cells, ("tpot_ms", "p50"), "TPOT p50, ms", out / f"tpot_{sampling}.png"),
        ]
        regret = {entry["cell"]: entry["regret"] for entry in document["regret"].get("cells", ())}
        if all(cell in regret for cell in cells):
            paths.append(
                _regret(
                    [regret[cell] for cell in cells], _columns(rows, cells), out / f"regret_{sampling}.png"
                )
            )
    return paths


def _columns(rows: Sequence[Row], cells: Sequence[str]) -> list[str]:
    first = {row["cell"]: row for row in reversed(rows)}
    names = []
    for number, cell in enumerate(cells):
        row = first[cell]
        names.append(
            str(number + 1) if row["fraction"] is None else f"{row['fraction']:g}\n{row['rate']:.2f}/s"
        )
    return names


def _lines(
    rows: Sequence[Row], cells: Sequence[str], metric: tuple[str, str], title: str, path: Path
) -> Path:
    figure, axes = _figure(title)
    values: list[float] = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        at = {row["cell"]: row[metric[0]][metric[1]] for row in rows if row["arm"] == arm}
        points = [at[cell] for cell in cells]
        values += [point for point in points if point]
        width = 2.6 if arm == "auto" else 1.8
        axes.plot(
            range(len(cells)), points, marker="o", label=arm, color=COLOURS.get(arm, _OTHER), linewidth=width
        )
    if values and max(values) > 8 * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return _save(figure, axes, _columns(rows, cells), path)


def _regret(entries: Sequence[Mapping[str, float]], columns: Sequence[str], path: Path) -> Path:
    figure, axes = _figure("auto against the best fixed arm, mean E2E, %")
    values = [100 * entry["value"] for entry in entries]
    low = [100 * (entry["value"] - entry["low"]) for entry in entries]
    high = [100 * (entry["high"] - entry["value"]) for entry in entries]
    axes.errorbar(range(len(values)), values, yerr=[low, high], fmt="o", color=COLOURS["auto"], capsize=4)
    axes.axhline(0, color="#868e96", linewidth=1)
    return _save(figure, axes, columns, path)


def _figure(title: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", color="#e3e7ed")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, axes: Any, columns: Sequence[str], path: Path) -> Path:
    axes.set_xticks(range(len(columns)), columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
