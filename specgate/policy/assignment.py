"""Which arm of a rollout a request belongs to: a function of names alone, the same everywhere."""

from __future__ import annotations

import hashlib

CANDIDATE, CONTROL, SHADOW = "candidate", "control", "shadow"


def position(rollout: str, key: str) -> float:
    """Where `key` stands in this rollout, in [0, 1): stable over restarts and replicas.

    The rollout's name is part of the hash, so that it is not always the same users who go first.
    """
    digest = hashlib.blake2b(f"{rollout}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def arm_at(place: float, share: float) -> str | None:
    """The candidate takes the share from below, a control of the same size from above; None: neither.

    Growing shares only ever add keys to the candidate.
    """
    if place < share:
        return CANDIDATE
    return CONTROL if place >= 1 - min(share, 1 - share) else None
