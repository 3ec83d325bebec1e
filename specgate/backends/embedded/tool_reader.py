"""An answer's text, in pieces, into content and tool calls.

The engine's grammar sees to it that what follows the trigger are calls in the model's format and
nothing else; so the reader only has to find names and the ends of arguments. A trigger that is a
special token is not looked for in the text, where its name is as good as any other: whoever reads
the tokens calls `begin`. Arguments are handed on as they come, as the JSON text that the model
writes.
"""

from __future__ import annotations

import hashlib
import json
import re

from specgate.backends.embedded.tool_format import ToolFormat
from specgate.types import ToolCallDelta

_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:')


class ToolReader:
    """The state of one answer. `salt` makes ids that no other answer has."""

    def __init__(self, form: ToolFormat, salt: str, *, is_forced: bool, is_anchored: bool) -> None:
        """`is_forced`: the answer is a call; `is_anchored`: if at all, it is one from its start."""
        self._form = form
        self._is_anchored = is_anchored
        self._salt = salt
        self._held = ""  # text that may yet become (part of) something
        self._is_calling = is_forced
        self._has_text = False
        self._arguments: _JsonEnd | None = None  # of the call that is open
        self.num_calls = 0  # begun
        self.num_whole = 0

    @property
    def trigger_token(self) -> int | None:
        """The special token that alone begins calls, by `begin`; None: the text says where they begin."""
        return self._form.trigger_token

    def begin(self) -> None:
        """The trigger token came: what is pushed from here on are calls."""
        self._is_calling = True

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Content, and pieces of calls, that became certain with `text`."""
        self._held += text
        content = "" if self._is_calling else self._take_content()
        return content, self._take_calls() if self._is_calling else []

    def finish(self) -> str:
        """Content held back, now that nothing more comes."""
        content = "" if self._is_calling else self._held
        self._held = ""
        return content

    def _take_content(self) -> str:
        """What cannot belong to the trigger; begins calling if that is there."""
        trigger = self._form.trigger
        if self._form.trigger_token is not None:
            place = len(self._held)
        elif self._is_anchored:
            if self._has_text or not trigger.startswith(self._held[: len(trigger)]):
                place = len(self._held)
            else:
                place, self._is_calling = 0, len(self._held) >= len(trigger)
        else:
            place = self._held.find(trigger)
            self._is_calling = place >= 0
            if place < 0:
                place = len(self._held) - _num_overlapping(self._held, trigger)
        content, self._held = self._held[:place], self._held[place:]
        self._has_text = self._has_text or bool(content)
        return content

    def _take_calls(self) -> list[ToolCallDelta]:
        pieces: list[ToolCallDelta] = []
        while True:
            if self._arguments is None:
                head = _HEAD.search(self._held)
                if head is None:
                    return pieces
                self._held = self._held[head.end() :]
                self._arguments = _JsonEnd()
                pieces.append(ToolCallDelta(self.num_calls, self._id(), json.loads(head[1])))
                self.num_calls += 1
            if not self._arguments.is_begun:
                self._held = self._held.lstrip()
            num_taken = self._arguments.read(self._held)
            if num_taken:
                pieces.append(ToolCallDelta(self.num_calls - 1, arguments=self._held[:num_taken]))
                self._held = self._held[num_taken:]
            if not self._arguments.is_over:
                return pieces
            self._arguments = None
            self.num_whole += 1

    def _id(self) -> str:
        digest = hashlib.blake2b(f"{self._salt}/{self.num_calls}".encode(), digest_size=12).hexdigest()
        length = self._form.id_length
        return f"call_{digest}" if length is None else digest[:length]


class _JsonEnd:
    """Finds where one JSON value, an object, ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self.is_begun = False
        self.is_over = False

    def read(self, text: str) -> int:
        """How many characters of `text` belong to the value."""
        self.is_begun = self.is_begun or bool(text)
        for place, char in enumerate(text):
            if self._is_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_string = False
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return place + 1
        return len(text)


def _num_overlapping(text: str, mark: str) -> int:
    """The longest end of `text` that `mark` begins with."""
    longest = min(len(text), len(mark) - 1)
    return next((num for num in range(longest, 0, -1) if mark.startswith(text[-num:])), 0)
