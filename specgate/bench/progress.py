"""Progress on stderr: a bar with the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specgate.clock import Clock

_LINE_EVERY_S = 15.0


class Meter:
    """Says what is going on. `advance` counts in expected seconds of work."""

    def __init__(self, bar: Progress, console: Console, clock: Clock) -> None:
        self._bar = bar
        self._console = console
        self._clock = clock
        self._task: TaskID = bar.add_task("", total=None)
        self._total = self._done = 0.0
        self._began_s = clock.monotonic()
        self._line_s = -_LINE_EVERY_S

    def say(self, text: str) -> None:
        """What happens now."""
        self._bar.update(self._task, description=text)
        now_s = self._clock.monotonic()
        if not self._console.is_terminal and now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            left = ""
            if self._done:
                rest_s = (now_s - self._began_s) * (self._total / self._done - 1)
                left = f"  {self._done / self._total:4.0%}, {rest_s:.0f} s left"
            self._console.print(f"bench: {text}{left}", highlight=False, soft_wrap=True)

    def begin(self, total_s: float) -> None:
        """The measurement proper starts, and is expected to take this long."""
        self._total, self._done = total_s, 0.0
        self._began_s = self._clock.monotonic()
        self._bar.reset(self._task, total=total_s)

    def advance(self, seconds: float, text: str) -> None:
        """So much of the expected time's work is done; `text` is what comes."""
        self._done += seconds
        self._bar.advance(self._task, seconds)
        self.say(text)


@contextlib.contextmanager
def meter(clock: Clock) -> Iterator[Meter]:
    """A meter on stderr for as long as the block runs."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield Meter(bar, console, clock)
