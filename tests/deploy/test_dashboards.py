"""Grafana's files: made by `deploy/grafana/build.py`, of the shape Grafana reads, about series that exist."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.deploy.support import DEPLOY, documents, exported, flat, names_in, recorded
from tests.specgate.gateway import running

GRAFANA = DEPLOY / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))


def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grafana_build", GRAFANA / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def test_the_files_are_what_the_script_writes() -> None:
    build = builder()
    assert {path.stem for path in FILES} == set(build.DASHBOARDS)
    for path in FILES:
        assert path.read_text(encoding="utf-8") == build.text_of(path.stem), "run deploy/grafana/build.py"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_have_what_grafana_needs_and_do_not_overlap(path: Path) -> None:
    board = read(path)
    assert board["uid"] == f"specgate-{path.stem}"
    assert len(board["uid"]) <= 40
    assert {"title", "schemaVersion", "time", "templating", "panels"} <= set(board)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] in ("timeseries", "state-timeline")
        assert panel["title"]
        assert panel["targets"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            used = {name for name in ("datasource", "price") if f"${name}" in target["expr"]}
            assert used <= variables
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_dashboards_are_read_by_grafanas_own_types(path: Path) -> None:
    models = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard", reason="grafana-foundation-sdk is not installed"
    )
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    board = read(path)
    board = models.Dashboard.from_json(board)
    again = json.loads(JSONEncoder(sort_keys=True).encode(board))
    assert again["uid"] == read(path)["uid"]
    assert [p["title"] for p in again["panels"]] == [p["title"] for p in read(path)["panels"]]


def test_provisioning_points_to_the_files() -> None:
    (sources,) = documents(GRAFANA / "provisioning" / "datasources" / "prometheus.yaml")
    assert sources["datasources"][0]["uid"] == "prometheus"
    (providers,) = documents(GRAFANA / "provisioning" / "dashboards" / "specgate.yaml")
    (compose,) = documents(DEPLOY / "docker" / "compose.yaml")
    targets = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert providers["providers"][0]["options"]["path"] in targets


async def test_every_series_that_dashboards_ask_for_is_exported() -> None:
    async with running() as server:
        there = exported((await server.client.get("/metrics")).text) | recorded()
    asked = flat(names_in(expr) for path in FILES for expr in expressions(read(path)))
    assert len(asked) > 40
    assert asked <= there
