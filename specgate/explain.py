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
    """What would be (`is_past`: was) decided, what came of it, a row per candidate, and their terms."""
    parts: list[RenderableType] = [_headline(explanation, is_past=is_past)]
    parts += [Text(line) for line in facts(explanation)]
    parts += [Text(line) for line in outcome(explanation)]
    candidates = explanation.get("candidates") or ()
    chosen = str(explanation.get("policy", ""))
    if candidates:
        parts.append(_candidates_table(candidates, chosen))
    told = [candidate for candidate in candidates if candidate.get("terms")]
    if told:
        parts.append(_terms_table(sorted(told, key=lambda c: c["policy"] != chosen)))
    return Group(*parts)


def outcome(explanation: Explanation) -> Iterator[str]:
    """How a past request ended, beside what was predicted; nothing for one that did not run."""
    timings: Mapping[str, float | None] = explanation.get("timings") or {}
    predicted: Mapping[str, float | None] = explanation.get("predicted") or {}
    if "outcome" not in explanation:
        return
    parts = [f"{explanation['outcome']}, {number(explanation.get('num_output_tokens'))} tokens"]
    for name, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E")):
        if timings.get(name) is not None:
            foreseen = predicted.get(name)
            told = "" if foreseen is None else f" (predicted {number(float(foreseen))})"
            parts.append(f"{label} {number(timings[name])} ms{told}")
    yield "ended   " + ", ".join(parts)
    for change in explanation.get("policy_changes") or ():
        yield f"        from token {change['token_index']} on: {change['policy']}, {change['reason']}"


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
    table.add_column("")
    for candidate in candidates:
        predicted: Mapping[str, Any] = candidate.get("predicted") or {}
        policy = str(candidate["policy"])
        table.add_row(
            f"> {policy}" if policy == chosen else f"  {policy}",
            number(candidate.get("num_speculative_tokens")),
            *(number(predicted.get(name)) for name in ("ttft_ms", "tpot_ms", "e2e_ms")),
            _verdict(candidate, is_chosen=policy == chosen),
            style="bold" if policy == chosen else "",
        )
    return table


def _verdict(candidate: Mapping[str, Any], *, is_chosen: bool) -> str:
    why = candidate.get("why_not")
    if is_chosen:
        return "chosen"
    if candidate.get("allowed"):
        return f"allowed; {why}" if why else "allowed"
    return f"not allowed: {why}"


def _terms_table(candidates: Sequence[Mapping[str, Any]]) -> Table:
    """One row per term, one column per candidate: what each term adds to E2E. The first candidate's
    terms are shown in full."""
    first, *others = candidates
    table = _table(f"What makes up E2E: value x coefficient of {first['policy']}, and ms of each")
    table.add_column("term")
    for name in ("value", "coefficient", *(str(c["policy"]) for c in candidates)):
        table.add_column(name, justify="right", no_wrap=True)
    effects = [{term["name"]: term["effect_ms"] for term in c["terms"]} for c in candidates]
    shown = {term["name"]: term for term in first["terms"]}
    for name in dict.fromkeys(name for column in effects for name in column):
        term = shown.get(name, {})
        value = f"{number(term['value'])} {term.get('unit') or ''}".strip() if term else ""
        table.add_row(
            name,
            value,
            number(term["coefficient"]) if term else "",
            *("" if name not in column else number(float(column[name])) for column in effects),
        )
    table.add_section()
    table.add_row("sum", "", "", *(number(float(sum(column.values()))) for column in effects), style="bold")
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
