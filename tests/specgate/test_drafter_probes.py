"""How a drafter that failed comes back."""

from __future__ import annotations

import asyncio

from engine.types import DrafterError, StepRecord
from specgate.config.guards import DoorTiming, DrafterGuard, GuardsConfig
from tests.specgate.gateway import make_config, running


async def test_a_drafter_shut_for_errors_is_tried_again_by_requests_that_name_it() -> None:
    """They get past no such door, but one in so many is its probe; else it would stay shut for ever."""
    timing = DoorTiming(cooldown_s=0.05, backoff=1, probe_share=0.5)
    guards = GuardsConfig(timing=timing, drafter=DrafterGuard(max_errors=0))
    failed = StepRecord(
        1, 0.0, 0.1, "verify", 1, 1, 1, 0, 1, 1, 0, 1, 0.0, 0.0, 0.1, 0.0,
        drafter_errors=(DrafterError("ngram", "exception", "broken"),),
    )  # fmt: skip
    async with running(make_config(guards=guards)) as server:

        async def ask() -> tuple[str, bool]:
            said = (await server.chat(specgate={"policy": "ngram"})).json()["specgate"]
            return said["reason"], said["num_drafts"] > 0

        assert await ask() == ("override", True)
        for listener in server.fake._listeners:
            listener(failed)
        assert await ask() == ("drafter_error", False)
        async with asyncio.timeout(10):  # the cool-down, and the next look at the doors
            while await ask() != ("override", True):  # noqa: ASYNC110 - the door tells nobody
                await asyncio.sleep(0.05)
