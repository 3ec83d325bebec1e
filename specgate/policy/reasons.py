"""Why a request runs under its policy. The names are part of the contract."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """One per decision; also given for a change of policy within a request."""

    PREDICTED_FASTEST = "predicted_fastest"
    RULE = "rule"
    OVERRIDE = "override"
    QUEUE_WAIT_GUARD = "queue_wait_guard"
    LOAD_GUARD = "load_guard"
    LATENCY_GUARD = "latency_guard"
    CONSISTENCY_GUARD = "consistency_guard"
    ACCEPTANCE_FLOOR = "acceptance_floor"
    DRAFTER_ERROR = "drafter_error"
    MEMORY_PRESSURE = "memory_pressure"
    UNSUPPORTED_PARAMS = "unsupported_params"
    KILL_SWITCH = "kill_switch"
    CANARY_CONTROL = "canary_control"
    EXPLORATION = "exploration"
    COLD_START = "cold_start"
    SHORT_OUTPUT = "short_output"
    UNLOADED = "unloaded"
