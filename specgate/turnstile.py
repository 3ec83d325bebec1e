"""Keeps a burst of arrivals from holding up everybody else on the event loop."""

from __future__ import annotations

import asyncio


class Turnstile:
    """Lets a few through per turn of the event loop, in order of arrival.

    To begin a request takes a millisecond or two of work without a pause. Of a hundred that arrive
    at once each would begin in the same turn, and running streams and health probes would wait for
    them all.
    """

    def __init__(self, num_per_turn: int = 2) -> None:
        self._gate = asyncio.Semaphore(num_per_turn)

    async def enter(self) -> None:
        """Wait for one's turn; what follows runs in it."""
        async with self._gate:
            await asyncio.sleep(0)
