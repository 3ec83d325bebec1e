"""A rollout's state as a page for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def render(name: str, rollout: Mapping[str, Any]) -> RenderableType:
    """One rollout: a headline, what its stage still needs, its guardrails."""
    head = Text.assemble((name, "bold"), f": {rollout['status']}, {rollout['why']}")
    if "stage" not in rollout:
        return head
    samples = ", ".join(f"{number} {arm}" for arm, number in rollout["num_samples"].items())
    parts: list[RenderableType] = [
        head,
        Text(f"  stage {rollout['stage'] + 1} of {rollout['num_stages']}, a share of {rollout['share']:.3g}"),
        Text(f"  requests: {samples}"),
    ]
    if rollout["missing"]:
        parts.append(Text(f"  still needed: {'; '.join(rollout['missing'])}"))
    if any(rail["num_batches"] for rail in rollout["guardrails"]):
        parts.append(_table(rollout["guardrails"]))
    return Group(*parts)


def _table(rails: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=True)
    table.add_column("guardrail")
    for heading in ("reading", "limit", "batches", "verdict"):
        table.add_column(heading, justify="right")
    for rail in rails:
        unit = " ms" if rail["unit"] == "ms" else ""
        reading = "-" if rail["reading"] is None else f"{rail['reading']:.3f}{unit}"
        table.add_row(
            rail["guardrail"], reading, f"{rail['limit']:g}{unit}", str(rail["num_batches"]), rail["verdict"]
        )
    return table
