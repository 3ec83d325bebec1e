"""When the planner need not be asked: what it found holds for some steps, of one batch or of its like."""

from __future__ import annotations

_FROM = 4  # sequences: a smaller batch is where drafts pay most
_STEPS, _MOST_STEPS = 8, 32  # of the first nap, and of any: each is twice as long as the one before
_CHANGE = 1 / 4  # of the batch, that ends a nap by coming or going
_KEPT_STEPS = 8  # for which drafts are granted at once; it looks at what they brought no more often


class Naps:
    """At most one nap at a time, in which nobody drafts, or one plan that is kept. Steps are the engine's."""

    def __init__(self) -> None:
        self._now: tuple[int, int] | None = None  # until which step, and of how many sequences
        self._steps = _STEPS  # of the next one
        self._kept_until = 0

    def begin(self, step: int, num_sequences: int) -> bool:
        """After this step nothing is to be planned for a while. False for a small batch: that is awake."""
        if num_sequences < _FROM:
            self.forget()
            return False
        self._now = step + self._steps, num_sequences
        self._steps = min(2 * self._steps, _MOST_STEPS)
        return True

    def holds(self, step: int, num_sequences: int) -> bool:
        """Whether the batch, so many by now, sleeps on."""
        if self._now is None:
            return False
        until, batch = self._now
        return step < until and abs(num_sequences - batch) <= _CHANGE * batch

    def keep(self, step: int) -> None:
        """This step's plan is to hold for the same sequences in those that follow."""
        self._kept_until = step + _KEPT_STEPS

    def keeps(self, step: int) -> bool:
        """Whether it still does."""
        return step < self._kept_until

    def end(self) -> None:
        """There is news, or a step is planned."""
        self._now, self._kept_until = None, 0

    def forget(self) -> None:
        """Somebody drafts: the next nap is a short one."""
        self._now, self._steps = None, _STEPS
