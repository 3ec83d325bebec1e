"""Server-sent events out of a byte stream, however it is cut. The bytes of an event stay as they were."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLarge(Exception):
    """No end of the event within `MAX_EVENT_BYTES`."""


class EventSplitter:
    """Bytes in, whole events out, blank line included."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> list[bytes]:
        """The events that `data` completes. Raises EventTooLarge."""
        if self._rest:
            data = self._rest + data
        events = []
        start = 0
        while (end := _end_of_event(data, start)) > 0:
            events.append(data[start:end])
            start = end
        self._rest = data[start:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLarge
        return events

    def finish(self) -> list[bytes]:
        """The stream is over: what is left, closed by a blank line, if it holds anything."""
        rest, self._rest = self._rest, b""
        return [rest.rstrip(b"\r\n") + b"\n\n"] if rest.strip() else []


def _end_of_event(data: bytes, start: int) -> int:
    """Index after the next blank line, or -1."""
    plain = data.find(b"\n\n", start)
    if b"\r" not in data:
        return plain + 2 if plain >= 0 else -1
    wide = data.find(b"\r\n\r\n", start)
    ends = [at for at in (plain + 2 if plain >= 0 else -1, wide + 4 if wide >= 0 else -1) if at > 0]
    return min(ends, default=-1)


def payload(event: bytes) -> bytes | None:
    """What its `data:` lines hold, joined; None for comments and the like."""
    if event.startswith(b"data: ") and event.find(b"\n", 0, -2) < 0 and b"\r" not in event:
        return event[6:-2]  # as nearly all are
    lines = event.replace(b"\r\n", b"\n").split(b"\n")
    data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    return b"\n".join(data) if data else None
