"""Writes the dashboards: `python deploy/grafana/build.py`. Grafana reads the JSON, people edit panels.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from panels import DASHBOARDS, Panel

FOLDER = Path(__file__).parent / "dashboards"
WIDTH, HEIGHT = 24, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panel(number: int, what: Panel, x: int, y: int, width: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": what.unit, "min": 0 if what.kind == "timeseries" else None}
    if what.kind == "timeseries":
        stacking = {"mode": "normal" if what.is_stacked else "none", "group": "A"}
        defaults["custom"] = {
            "fillOpacity": 30 if what.is_stacked else 0,
            "lineWidth": 1,
            "stacking": stacking,
        }
    if what.states:
        options = {value: {"text": word, "color": colour} for value, word, colour in what.states}
        defaults["mappings"] = [{"type": "value", "options": options}]
    return {
        "id": number,
        "type": what.kind,
        "title": what.title,
        "description": what.about,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": width, "x": x, "y": y},
        "fieldConfig": {"defaults": {k: v for k, v in defaults.items() if v is not None}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(what.queries)
        ],
    }


def dashboard(name: str) -> dict[str, Any]:
    """In Grafana's own shape."""
    title, rows = DASHBOARDS[name]
    panels: list[dict[str, Any]] = []
    for row_number, row in enumerate(rows):
        width = WIDTH // len(row)
        for column, what in enumerate(row):
            panels.append(_panel(len(panels) + 1, what, column * width, row_number * HEIGHT, width))
    variables: list[dict[str, Any]] = [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {"text": "Prometheus", "value": "prometheus"},
        }
    ]
    if any("$price" in target["expr"] for p in panels for target in p["targets"]):
        price = {"text": "1.00", "value": "1.00"}
        variables.append(
            {
                "name": "price",
                "label": "Price per device hour",
                "type": "textbox",
                "query": "1.00",
                "current": price,
            }
        )
    return {
        "uid": f"specgate-{name}",
        "title": f"specgate: {title}",
        "tags": ["specgate"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-3h", "to": "now"},
        "links": [{"type": "dashboards", "title": "specgate", "tags": ["specgate"], "asDropdown": True}],
        "templating": {"list": variables},
        "panels": panels,
    }


def text_of(name: str) -> str:
    """The file's content."""
    return json.dumps(dashboard(name), indent=1) + "\n"


def main() -> None:
    """Write them all."""
    FOLDER.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(text_of(name), encoding="utf-8")
        print(f"wrote {FOLDER / name}.json")


if __name__ == "__main__":
    main()
