"""How a setting is declared: a dataclass field with its meaning and limits."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any, Literal

TaskName = Literal[
    "document_qa",
    "summarization",
    "code_edit",
    "code_completion",
    "chat",
    "reasoning",
    "translation",
    "tool_call",
    "creative_writing",
]


def setting(default: Any, doc: str, *, ge: float | None = None, gt: float | None = None,
            le: float | None = None, pattern: str | None = None) -> Any:  # fmt: skip
    """A field with its meaning and limits. `default=MISSING` makes it required."""
    limits = {"ge": ge, "gt": gt, "le": le, "pattern": pattern}
    metadata = {"doc": doc, **{name: value for name, value in limits.items() if value is not None}}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)
