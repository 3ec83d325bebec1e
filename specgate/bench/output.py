"""Everything a bench leaves behind: files, and a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specgate.bench.page import write_page
from specgate.bench.png import write_pngs
from specgate.bench.report import write_json, write_records
from specgate.bench.runner import Measured
from specgate.bench.text import percent

MIN_WIDTH = 118
COLUMNS = (
    "n", "err", "TTFT p50", "p95", "TPOT p50", "p95", "E2E mean", "p95", "tok/s", "accepted", "same"
)  # fmt: skip


def write_all(
    document: Mapping[str, Any], measured: Measured, out: Path | None, *, with_records: bool
) -> None:
    """Write the report's files to `out` (None: nowhere) and print the table."""
    console = Console()
    if not console.is_terminal or console.width < MIN_WIDTH:
        console = Console(width=MIN_WIDTH)
    _print_rows(console, document)
    _print_verdict(console, document)
    if out is None:
        return
    paths = [write_json(document, out), write_page(document, out)]
    if with_records:
        paths.append(write_records(measured, out))
    pngs = write_pngs(document, out)
    for path in [*paths, *(pngs or ())]:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if pngs is None:
        console.print(
            "no PNG files: matplotlib is not installed (pip install 'specgate-gateway[bench]'); "
            "the HTML page has all plots",
            highlight=False, soft_wrap=True, markup=False,
        )  # fmt: skip


def _print_rows(console: Console, document: Mapping[str, Any]) -> None:
    table = Table(title="Measured at the client, times in ms", title_justify="left", title_style="bold")
    table.add_column("cell and arm", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    cell = None
    for row in document["rows"]:
        if row["cell"] != cell:
            table.add_section()
            table.add_row(row["cell"], style="bold")
        table.add_row(
            f"  {row['arm']}", str(row["n"]), str(row["errors"]),
            _number(row["ttft_ms"]["p50"]), _number(row["ttft_ms"]["p95"]),
            _number(row["tpot_ms"]["p50"], 1), _number(row["tpot_ms"]["p95"], 1),
            _number(row["e2e_ms"]["mean"]), _number(row["e2e_ms"]["p95"]),
            _number(row["output_tokens_per_s"], 1), _number(row["mean_acceptance_length"], 2),
            {None: "-", True: "yes", False: "NO"}[row["identical_to_baseline"]],
        )  # fmt: skip
        cell = row["cell"]
    console.print(table)


def _print_verdict(console: Console, document: Mapping[str, Any]) -> None:
    for row in document["rows"]:
        for example in row["error_examples"]:
            console.print(
                f"{row['cell']}, {row['arm']}: {example}", style="red", highlight=False, soft_wrap=True
            )
    for note in document["meta"]["notes"]:
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    if "largest_concurrency" in document["meta"]:
        found = document["meta"]["largest_concurrency"]
        text = "none: not even one request at a time meets them" if found is None else str(found)
        console.print(f"largest concurrency that meets the SLOs: {text}", highlight=False)
    for entry in document["regret"].get("cells", ()):
        console.print(
            f"{entry['cell']}: auto against the best fixed arm, {entry['best_fixed']}: "
            f"{percent(entry['regret'])}{_by_start(entry)}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip


def _by_start(entry: Mapping[str, Any]) -> str:
    """Of each start of the servers, where there was more than one."""
    values = entry["by_repeat"]
    each = ", ".join(f"{100 * value:+.1f}" for value in values)
    return f"; by start {each} %" if len(values) > 1 else ""


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
