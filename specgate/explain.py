"""An explanation (`/admin/explain`, or a line of the decision log) as a page for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

NUM_TASKS_SHOWN = 3

Explanation = Mapping[str, Any]


def render(explanation: Explanation, *, is_past: bool) -> RenderableType:
    """What would be (`is_past`: was) decided, then one row per candidate, then the chosen one's terms."""
    parts: list[RenderableType] = [_headline(explanation, is_past=is_past)]
    parts += [Text(line) for line in facts(explanation)]
    candidates = explanation.get("candidates") or ()
    if candidates:
        parts.append(_candidates_table(candidates, str(explanation.get("policy", ""))))
    parts += [_terms_table(c) for c in candidates if c.get("terms")]
    return Group(*parts)


def facts(explanation: Explanation) -> Iterator[str]:
    """Task, output length and load, one sentence each; what is unknown is left out."""
    probabilities: Mapping[str, float] = explanation.get("task_probabilities") or {}
    if explanation.get("task"):
        best = sorted(probabilities.items(), key=lambda item: -item[1])[:NUM_TASKS_SHOWN]
        shown = ", ".join(f"{task} {probability:.2f}" for task, probability in best)
        yield f"task    {explanation['task']}" + (f"  ({shown})" if shown else "")
    length: Mapping[str, float] = explanation.get("output_tokens") or {}
    if length:
        yield "output  " + ", ".join(f"{name} {value:.0f}" for name, value in length.items()) + " tokens"
    load: Mapping[str, Any] = explanation.get("load") or {}
    if load:
        known = {name: value for name, value in load.items() if value is not None}
        yield "load    " + ", ".join(f"{name} {number(value)}" for name, value in known.items())


def one_line(explanation: Explanation) -> str:
    """The decision in one line: what was believed, and why each other policy was not taken."""
    task = str(explanation.get("task"))
    probability = (explanation.get("task_probabilities") or {}).get(task)
    length: Mapping[str, float] = explanation.get("output_tokens") or {}
    words = [task if probability is None else f"{task} {probability:.2f}"]
    words += [f"output {'/'.join(length)} {'/'.join(f'{value:.0f}' for value in length.values())}"]
    others = [c for c in explanation.get("candidates") or () if c["policy"] != explanation.get("policy")]
    reasons = [f"not {c['policy']}: {c['why_not']}" for c in others if c.get("why_not")]
    return " | ".join([", ".join(words), *reasons])


def number(value: Any) -> str:
    """Whole numbers as they are, others with three significant digits, absence as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def _headline(explanation: Explanation, *, is_past: bool) -> Text:
    verb = "was decided" if is_past else "would be decided, without running it"
    return Text.assemble(
        (str(explanation.get("policy")), "bold"), f" {verb}: ", (str(explanation.get("reason")), "bold")
    )


def _candidates_table(candidates: Sequence[Mapping[str, Any]], chosen: str) -> Table:
    table = _table("Candidates")
    table.add_column("policy", no_wrap=True)
    for name in ("draft tokens", "TTFT ms", "TPOT ms", "E2E ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("allowed")
    for candidate in candidates:
        predicted: Mapping[str, Any] = candidate.get("predicted") or {}
        policy = str(candidate["policy"])
        table.add_row(
            f"> {policy}" if policy == chosen else f"  {policy}",
            number(candidate.get("num_speculative_tokens")),
            *(number(predicted.get(name)) for name in ("ttft_ms", "tpot_ms", "e2e_ms")),
            "yes" if candidate.get("allowed") else f"no: {candidate.get('why_not')}",
            style="bold" if policy == chosen else "",
        )
    return table


def _terms_table(candidate: Mapping[str, Any]) -> Table:
    table = _table(f"Terms of {candidate['policy']}")
    table.add_column("term")
    for name in ("value", "coefficient", "effect ms"):
        table.add_column(name, justify="right")
    for term in candidate["terms"]:
        value = f"{number(term.get('value'))} {term.get('unit') or ''}".strip()
        table.add_row(term["name"], value, number(term.get("coefficient")), number(term.get("effect_ms")))
    table.add_section()
    table.add_row("sum", "", "", number(float(sum(term["effect_ms"] for term in candidate["terms"]))))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
