"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping


def percent(interval: Mapping[str, float | None]) -> str:
    """A relative difference with its interval: "+1.2 % (-0.4 to +2.9)"."""
    if interval.get("value") is None:
        return "-"
    value, low, high = (100 * (interval[name] or 0.0) for name in ("value", "low", "high"))
    return f"{value:+.1f} % ({low:+.1f} to {high:+.1f})"
