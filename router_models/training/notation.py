"""How the pools of wordings write lists."""

from __future__ import annotations


def choices(text: str) -> tuple[str, ...]:
    """The parts of `text` between bars."""
    return tuple(text.split("|"))
