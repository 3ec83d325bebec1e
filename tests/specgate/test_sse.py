"""An event is one line, however a client splits text into lines."""

from __future__ import annotations

import json

from specgate.api.sse import event


def test_no_line_end_of_unicode_cuts_an_event() -> None:
    text = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\n e\u00e9\u4e2d \\u2028"
    sent = event({"text": text})
    lines = sent.decode().splitlines()
    assert lines[1:] == [""]
    assert json.loads(lines[0].removeprefix("data: ")) == {"text": text}
