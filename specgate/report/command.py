"""`specgate report`: arguments, the tables for the terminal, and the JSON."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specgate.config import load_config
from specgate.errors import ConfigError
from specgate.report.read import Reading, read_lines
from specgate.report.summary import FEW_TOKENS, HOW, Summary, Totals, summarise

_AGO = re.compile(r"(\d+)([hdw])")
_UNIT_S = {"h": 3600, "d": 86400, "w": 7 * 86400}
_TITLES = {"by_month": "By month", "by_tenant": "By tenant", "by_task": "By task", "by_policy": "By policy"}


class ReportError(Exception):
    """There is nothing to report on. The message says what to do."""


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--log", type=Path, metavar="FILE", help="the decision log; default: the config's")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="whose log; default: the shipped local config"
    )
    parser.add_argument(
        "--since", metavar="WHEN", help="30d, 12h, 2w, 2026-11, 2026-11-01 or 2026-11-01T03:00; default: all"
    )
    parser.add_argument("--until", metavar="WHEN", help="the same; that moment is not included")
    parser.add_argument(
        "--month", metavar="YYYY-MM", help="that calendar month, instead of --since and --until"
    )
    parser.add_argument(
        "--price-per-device-hour", type=float, metavar="PRICE", help="instead of the price that was logged"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_report(args: argparse.Namespace, now: float | None = None) -> None:
    """Print it. Raises ReportError."""
    now = time.time() if now is None else now
    since, until = _span(args, now)
    path = args.log or _configured(args.config)
    reading = Reading()
    summary = summarise(read_lines(path, since, until, reading), args.price_per_device_hour)
    if not reading.files:
        raise ReportError(f"there is no decision log {path}: give --log FILE, or set decision_log.path")
    for fault in reading.faults:
        print(f"specgate: {fault}", file=sys.stderr)  # noqa: T201
    if args.json:
        told = {
            "files": reading.files,
            "num_lines": reading.num_lines,
            "num_damaged_lines": reading.num_damaged,
            "faults": reading.faults,
            "since": None if math.isinf(since) else since,
            "until": None if math.isinf(until) else until,
        }
        print(json.dumps(told | summary.describe(), indent=2))  # noqa: T201
        return
    _print(Console(soft_wrap=False, width=None if sys.stdout.isatty() else 150), summary, reading)


def _span(args: argparse.Namespace, now: float) -> tuple[float, float]:
    if args.month is not None:
        if args.since is not None or args.until is not None:
            raise ReportError("give either --month, or --since and --until")
        if not re.fullmatch(r"\d{4}-\d\d", args.month):
            raise ReportError(f"--month {args.month}: write it as 2026-11")
        start = datetime.fromtimestamp(moment(args.month, now))
        after = start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)
        return start.timestamp(), after.timestamp()
    return (
        -math.inf if args.since is None else moment(args.since, now),
        math.inf if args.until is None else moment(args.until, now),
    )


def moment(text: str, now: float) -> float:
    """A Unix time: so long ago, or a date and time, local unless it has a zone. Raises ReportError."""
    if ago := _AGO.fullmatch(text):
        return now - int(ago[1]) * _UNIT_S[ago[2]]
    try:
        return datetime.fromisoformat(f"{text}-01" if re.fullmatch(r"\d{4}-\d\d", text) else text).timestamp()
    except ValueError:
        raise ReportError(f"{text!r} is no time: write 30d, 12h, 2026-11 or 2026-11-01T03:00") from None


def _configured(config: Path | None) -> Path:
    try:
        path = load_config(config).decision_log.path
    except ConfigError as error:
        raise ReportError(str(error)) from error
    if path is None:
        raise ReportError("the config keeps no decision log: give --log FILE, or set decision_log.path")
    return Path(path)


def _print(console: Console, summary: Summary, reading: Reading) -> None:
    console.print("\n".join(_headline(summary, reading)), highlight=False)
    if not summary.total.num_requests:
        return
    for name, title in _TITLES.items():
        rows = summary.groups[name]
        if name != "by_month" or len(rows) > 1:
            console.print(_table(title, rows, summary))
    console.print(_device_table(summary))
    if summary.total.saved_s is None:
        console.print("No token was decoded plainly in this span: what was saved cannot be estimated.")
    else:
        console.print(HOW.format(few=FEW_TOKENS), highlight=False)


def _headline(summary: Summary, reading: Reading) -> Iterator[str]:
    total = summary.total
    span = ""
    if summary.first is not None and summary.last is not None:
        span = ", " + " to ".join(
            time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (summary.first, summary.last)
        )
    yield f"{total.num_requests} requests{span}, from {', '.join(reading.files)}"
    if reading.num_damaged:
        yield f"{reading.num_damaged} of {reading.num_lines} lines are damaged and left out."
    if summary.num_without_device:
        yield f"{summary.num_without_device} requests tell no device time: run elsewhere, or ended before it."
    if len(summary.currencies) > 1:
        names = ", ".join(sorted(summary.currencies))
        yield f"Amounts are sums over several currencies ({names}): split the span."


_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], Any], str], ...] = (
    ("requests", lambda r: r["num_requests"], "d"),
    ("failed", lambda r: r["num_failed"], "d"),
    ("prompt tokens", lambda r: r["num_prompt_tokens"], "d"),
    ("output tokens", lambda r: r["num_output_tokens"], "d"),
    ("target steps", lambda r: r["num_target_steps"], "d"),
    ("steps saved", lambda r: r["num_target_steps_saved"], "d"),
    ("device s", lambda r: r["device_s"], ".2f"),
    ("saved s", lambda r: r["saved_s"], ".2f"),
    ("saved", lambda r: r["saved_ratio"], ".1%"),
)
_MONEY: tuple[tuple[str, Callable[[dict[str, Any]], Any], str], ...] = (
    ("cost", lambda r: r["amount"], ".4g"),
    ("saved", lambda r: r["saved_amount"], ".4g"),
    ("per 1k tokens", lambda r: r["amount_per_1k_tokens"], ".4g"),
)


def _table(title: str, rows: dict[str, Totals], summary: Summary) -> Table:
    columns = list(_COLUMNS)
    if summary.total.amount is not None:
        unit = "/".join(sorted(summary.currencies)) or "by the given price"
        columns += [
            (f"{name}, {unit}" if name == "cost" else name, value, form) for name, value, form in _MONEY
        ]
    if summary.total.network_s is not None:
        columns.append(("network s", lambda r: r["network_s"], ".2f"))
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("")
    for name, _, _ in columns:
        table.add_column(name, justify="right")
    shown = sorted(rows.items(), key=lambda item: (title != "By month") * -item[1].device_s)
    for key, row in [*shown, ("total", summary.total)]:
        cells = row.describe()
        values = [_cell(value(cells), form) for _, value, form in columns]
        is_total = row is summary.total
        if is_total:
            table.add_section()
        table.add_row(key or "(no key)", *values, style="bold" if is_total else "")
    return table


def _device_table(summary: Summary) -> Table:
    table = Table(title="Device time by method", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in ("", "draft s", "forward s", "verify s"):
        table.add_column(name, justify="right" if name else "left")
    for method, parts in summary.device.items():
        table.add_row(method, *(f"{parts[part]:.2f}" for part in ("draft_s", "forward_s", "verify_s")))
    if summary.checks_s:
        table.caption = (
            f"{summary.checks_s:.2f} s of it for consistency checks, which are in no request's cost"
        )
    return table


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return f"{value:,d}" if form == "d" else format(value, form)
