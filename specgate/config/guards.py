"""Settings of the guards: when a policy is shut, and how it is tried again."""

# ruff: noqa: RUF009 - `setting` is `dataclasses.field` with a doc

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specgate.config.fields import setting

Mode = Literal["enforce", "observe", "off"]
_MODE = "enforce; observe: report only; off"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorTiming:
    """How a door shuts and opens again; for all guards."""

    cooldown_s: float = setting(5.0, "shut for at least this long", gt=0)
    sensed_cooldown_s: float = setting(
        1.0, "the same for guards that see when it is over: queue wait, load, memory", gt=0
    )
    backoff: float = setting(2.0, "each further trip shuts this many times longer", ge=1)
    max_cooldown_s: float = setting(600.0, "but never longer than this", gt=0)
    reopen_ratio: float = setting(0.85, "opens only below this share of the threshold", gt=0, le=1)
    forgive_s: float = setting(300.0, "allowed for this long: trips before are forgotten", gt=0)
    probe_share: float = setting(
        0.05, "of a shut policy's requests, those that may try it again", gt=0, le=0.5
    )
    probe_samples: int = setting(5, "tries after which is decided", ge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueWaitGuard:
    """Requests wait too long: policies that cost capacity are shut."""

    mode: Mode = setting("enforce", _MODE)
    has_forecast: bool = setting(True, "also when the queue as it stands will take longer than the threshold")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGuard:
    """Too many requests, or too near to capacity: policies that cost capacity are shut."""

    mode: Mode = setting("enforce", _MODE)
    max_rho: float | None = setting(
        0.95, "requests/s as a share of predicted plain capacity; null: no limit", gt=0
    )
    min_in_flight: int = setting(
        16, "fewer requests in the server than this are no overload, whatever is predicted", ge=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyGuard:
    """A policy is slower than baseline runs beside it, within task, prompt length and load; or its drafts
    slow down all that is decoded with them."""

    mode: Mode = setting("enforce", _MODE)
    max_decode_ratio: float = setting(
        1.10, "median decode time per output token, in times of baseline's", gt=1
    )
    max_tpot_p95_ratio: float = setting(1.25, "p95 of time per output token, likewise", gt=1)
    max_itl_p99_ratio: float = setting(
        3.0, "p99 of the gap between emissions, likewise; an emission of several tokens may take longer", gt=1
    )
    min_samples: int = setting(20, "requests of each side in a band", ge=5)
    window_s: float = setting(600.0, "how far back requests are compared", gt=0)
    control_share: float = setting(
        0.02,
        "of requests that would draft, those that run as baseline where there is none to compare",
        ge=0,
        le=0.5,
    )
    min_gain: float = setting(
        0.95,
        "pace of all decoding with a policy's drafts, least, in times of that without them: target steps"
        " saved against draft and verify time",
        ge=0,
        le=1,
    )
    min_gain_steps: int = setting(100, "drafted steps before that is judged", ge=1)
    gain_window_s: float = setting(60.0, "how far back steps count for it", ge=10, le=600)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceGuard:
    """Drafts are refused too often to be worth their cost at this load."""

    mode: Mode = setting("enforce", _MODE)
    min_acceptance: float = setting(0.1, "accepted / (accepted + rejected), least at any load", ge=0, le=1)
    margin: float = setting(0.05, "below floor(B, K) by this share before it shuts", ge=0, le=0.5)
    min_drafts: int = setting(30, "drafts in the window", ge=1)
    window_s: float = setting(60.0, "how far back drafts count", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistencyGuard:
    """Greedy answers decoded again plainly when idle; one that differs shuts its policy."""

    mode: Mode = setting("enforce", _MODE)
    share: float = setting(0.01, "of greedy answers that were drafted for", ge=0, le=1)
    max_tokens: int = setting(512, "longer answers are not decoded again", ge=1)
    max_token_share: float = setting(0.02, "tokens spent on it, of all output tokens", ge=0, le=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGuard:
    """KV blocks or memory run out: nothing is drafted, whoever asked for it."""

    mode: Mode = setting("enforce", _MODE)
    min_free_kv_ratio: float = setting(0.05, "free KV blocks, as a share of all", ge=0, le=1)
    max_memory_bytes: int | None = setting(
        None, "resident memory of the server's processes; null: no limit", ge=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterGuard:
    """A drafter fails: it is not asked again for a while."""

    mode: Mode = setting("enforce", _MODE)
    max_errors: int = setting(5, "failures in the window that are still borne", ge=0)
    fatal_kinds: tuple[str, ...] = setting(
        ("oom", "verify_mismatch"),
        "kinds of which one is enough, of exception, oom, timeout, invalid_draft, nan, verify_mismatch",
    )
    window_s: float = setting(60.0, "how far back failures count", gt=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardsConfig:
    """What shuts speculation by itself, and how it comes back. The limits on queue wait and requests/s
    are `policy.max_queue_wait_p95_ms` and `policy.max_requests_per_s`."""

    force_path: str | None = setting(
        None, "file that keeps a kill switch set with persist: true over restarts; null: none is kept"
    )
    timing: DoorTiming = setting(DoorTiming, DoorTiming.__doc__ or "")
    queue_wait: QueueWaitGuard = setting(QueueWaitGuard, QueueWaitGuard.__doc__ or "")
    load: LoadGuard = setting(LoadGuard, LoadGuard.__doc__ or "")
    latency: LatencyGuard = setting(LatencyGuard, LatencyGuard.__doc__ or "")
    acceptance: AcceptanceGuard = setting(AcceptanceGuard, AcceptanceGuard.__doc__ or "")
    consistency: ConsistencyGuard = setting(ConsistencyGuard, ConsistencyGuard.__doc__ or "")
    memory: MemoryGuard = setting(MemoryGuard, MemoryGuard.__doc__ or "")
    drafter: DrafterGuard = setting(DrafterGuard, DrafterGuard.__doc__ or "")
