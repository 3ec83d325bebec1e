"""Prometheus rules: valid, ringing when they should, asking only for what a server exports, with runbooks."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest

from specgate import errors
from tests.deploy.support import DEPLOY, RULES, documents, exported, flat, names_in, recorded, rules, tool
from tests.specgate.gateway import running

PROMETHEUS = DEPLOY / "prometheus"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))


def alerts() -> list[dict]:
    return [rule for rule in rules() if "alert" in rule]


def run(*command: object) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_rules_and_config_are_valid() -> None:
    promtool = tool("promtool", "prometheus")
    run(promtool, "check", "rules", *sorted(RULES.glob("*.yml")))
    run(promtool, "check", "config", PROMETHEUS / "prometheus.yml")


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_ring_when_they_should_and_only_then(path: Path) -> None:
    run(tool("promtool", "prometheus"), "test", "rules", path)


def test_every_alert_has_a_case_that_rings_it_and_one_that_does_not() -> None:
    cases = [case for path in TESTS for case in documents(path)[0]["tests"]]
    for name in {rule["alert"] for rule in alerts()}:
        own = [c for case in cases if case["name"].startswith(name) for c in case["promql_expr_test"]]
        ringing = [c for c in own if f'alertname="{name}"' in str(c.get("exp_samples"))]
        assert ringing, f"nothing shows that {name} rings"
        assert any("exp_samples" not in check for check in own), f"nothing shows that {name} can be quiet"


def test_every_alert_says_how_grave_it_is_and_has_a_runbook() -> None:
    for rule in alerts():
        name = rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket"), name
        assert rule["annotations"]["runbook"] == f"deploy/runbooks/{name}.md"
        text = (DEPLOY / "runbooks" / f"{name}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {name}\n")
        for part in ("**Meaning.**", "**First look.**", "**First action.**"):
            assert part in text, f"{name} lacks {part}"
    known = {rule["alert"] for rule in alerts()}
    assert {path.stem for path in (DEPLOY / "runbooks").glob("*.md")} == known


def test_groups_have_names_of_their_own_and_tests_say_in_which_order_they_run() -> None:
    names = [group["name"] for path in RULES.glob("*.yml") for d in documents(path) for group in d["groups"]]
    assert len(set(names)) == len(names)
    for path in TESTS:
        assert sorted(documents(path)[0]["group_eval_order"]) == sorted(names)


def test_recording_rules_are_named_for_the_product() -> None:
    assert all(re.fullmatch(r"specgate:[a-z_]+:[a-z0-9_]+", name) for name in recorded())


async def test_every_series_that_rules_ask_for_is_exported() -> None:
    async with running() as server:
        there = exported((await server.client.get("/metrics")).text) | recorded()
    asked = flat(names_in(rule["expr"]) for rule in rules())
    assert len(asked) > 30
    assert asked <= there


async def test_bucket_edges_that_rules_ask_for_exist() -> None:
    async with running() as server:
        await server.chat(max_tokens=3)
        text = (await server.client.get("/metrics")).text
    edges = flat(set(re.findall(r'(specgate_\w+_bucket)\{le="([\d.]+)"\}', rule["expr"])) for rule in rules())
    assert len(edges) == 3
    for name, edge in edges:
        assert re.search(rf'^{name}\{{.*le="{re.escape(edge)}"', text, re.MULTILINE), (name, edge)


def test_reasons_that_rules_name_are_those_of_errors() -> None:
    kinds = [
        kind for _, kind in inspect.getmembers(importlib.import_module(errors.__name__), inspect.isclass)
    ]
    codes = {getattr(kind, "default_code", None) for kind in kinds}
    named = flat(
        set(found.split("|")) for r in rules() for found in re.findall(r'reason=~"([^"]+)"', r["expr"])
    )
    assert named
    assert named <= codes


def test_runbooks_name_what_exists() -> None:
    for path in (DEPLOY / "runbooks").glob("*.md"):
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([\w.]+)\)", text):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"
        for name in re.findall(r"`(deploy/[\w./-]+)`", text):
            assert (DEPLOY.parent / name).exists(), f"{path.name} names {name}"
