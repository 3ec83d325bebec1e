"""What the tests of `deploy/` share: its files, what they ask of a server, and what a server exports."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules"
_NAME = re.compile(r"\bspecgate[_:][a-zA-Z0-9_:]+")
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}


def tool(name: str, package: str) -> str:
    """The path of a program; skips where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian package {package})")
    return found


def documents(path: Path) -> list[Any]:
    """The YAML documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def rules() -> list[dict[str, Any]]:
    """All recording and alerting rules."""
    groups = [g for path in sorted(RULES.glob("*.yml")) for d in documents(path) for g in d["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    """Series of ours that a PromQL expression asks for. Strings are no names."""
    return set(_NAME.findall(re.sub(r"\"[^\"]*\"|'[^']*'", '""', expression)))


def exported(text: str) -> set[str]:
    """Every series name that an exposition announces, samples or not."""
    families = text_string_to_metric_families(text)
    return {f.name + suffix for f in families for suffix in _SUFFIXES.get(f.type, ("",))}


def recorded() -> set[str]:
    """Names of the recording rules."""
    return {rule["record"] for rule in rules() if "record" in rule}


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def shortened(rule_text: str, factor: int) -> str:
    """Rules whose windows, waits and offsets are `factor` times shorter, at least 4 s: for a rehearsal."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}

    def short(match: re.Match[str]) -> str:
        return f"{max(4, int(match[1]) * units[match[2]] // factor)}s"

    text = re.sub(r"\b(\d+)([smhd])\b", short, rule_text)
    return re.sub(r"interval: \d+s", "interval: 1s", text)


def flat(texts: Iterable[set[str]]) -> set[str]:
    """Their union."""
    return set().union(*texts)
