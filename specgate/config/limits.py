"""Settings of admission: how much runs at once, how long is waited, and what one key may use."""

# ruff: noqa: RUF009 - `setting` is `dataclasses.field` with a doc

from __future__ import annotations

from dataclasses import dataclass

from specgate.config.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What one key may use. null: no limit of its own."""

    requests_per_minute: int | None = setting(None, "more get a 429; all models together", ge=1)
    tokens_per_minute: int | None = setting(
        None, "of prompts and answers; a request counts what it asks for until it ends", ge=1
    )
    max_concurrent: int | None = setting(None, "answers running at once in one model; more wait", ge=1)
    max_queue: int | None = setting(None, "requests waiting at once for one model; more get a 429", ge=0)
    weight: float = setting(
        1.0, "share of a busy model's slots, against the weights of the other keys that wait", gt=0, le=1000
    )
    priority: int = setting(
        0,
        "smaller numbers are served first; a request may ask for a greater number, not for a smaller",
        ge=-1000,
        le=1000,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """How many answers run at once in one model, and how many wait. `n` answers count n times."""

    max_concurrent: int = setting(64, "answers in the backend at once", ge=1)
    max_queue: int = setting(
        256,
        "requests waiting to be admitted; more get a 429. With several keys, a quarter of it is kept"
        " for those that have nothing waiting",
        ge=0,
    )
    max_wait_s: float | None = setting(
        None, "a request that is predicted to wait longer gets a 429 at once; null: no limit", gt=0
    )
    max_wait_ratio: float | None = setting(
        0.25,
        "the same, as a multiple of how long answers take: what waiting may add to it; null: no limit",
        gt=0,
    )
    per_key: KeyLimits = setting(KeyLimits, "limits of keys that have none of their own")
