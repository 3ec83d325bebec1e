"""The way to production: its commands parse, its paths exist, its settings are settings."""

from __future__ import annotations

import re
import shlex

import pytest

from specgate.cli import build_parser
from specgate.config import config_json_schema, load_config, load_rollout
from tests.deploy.support import ROOT

TEXT = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [
    line.split(" #")[0].strip()
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("specgate ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    build_parser().parse_args(shlex.split(command)[1:])


def test_there_are_commands_for_each_step() -> None:
    names = {shlex.split(command)[1] for command in COMMANDS}
    assert names >= {"check-config", "serve", "bench", "explain", "canary", "report"}


def test_paths_exist() -> None:
    code = "\n".join(BLOCKS + re.findall(r"`([^`\n]+)`", TEXT))
    paths = set(re.findall(r"\b(?:configs|deploy|docs)/[\w./-]*\w", code))
    assert len(paths) >= 8
    for path in paths:
        assert (ROOT / path).exists(), path


def test_settings_that_are_named_exist() -> None:
    schema = config_json_schema()
    sections = "server|auth|policy|guards|costs|telemetry|canary|admission"
    named = set(re.findall(rf"`((?:{sections})\.[\w.]+)`", TEXT))
    assert len(named) >= 8
    for name in named:
        node = schema
        for part in name.split("."):
            node = resolved(schema, node)
            assert part in node["properties"], name
            node = node["properties"][part]


def resolved(schema: dict, node: dict) -> dict:
    """Through references and alternatives to the one that has properties."""
    if "$ref" in node:
        return resolved(schema, schema["$defs"][node["$ref"].rsplit("/", 1)[1]])
    for option in node.get("anyOf", ()):
        found = resolved(schema, option)
        if "properties" in found:
            return found
    return node


def test_the_rollouts_it_names_are_what_it_says() -> None:
    rollout = load_rollout(ROOT / "configs" / "canary" / "ngram-for-documents.yaml")
    assert rollout.rollout == "ngram-for-documents"
    assert rollout.mode == "shadow"
    engine = load_config(ROOT / "configs" / "production.example.yaml").models[0].engine
    assert engine is not None
    assert engine.ngram is not None
    assert (engine.ngram.num_speculative_tokens, engine.ngram.prompt_lookup_min) == (4, 2)
