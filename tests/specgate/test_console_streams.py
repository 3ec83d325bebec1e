"""The console's reader of event streams, run by Node, on streams as other servers write them."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no Node.js on this machine")
READER = """
import { stream } from "./api.mjs";
globalThis.sessionStorage = { getItem: () => null };
const bytes = new TextEncoder().encode(JSON.parse(process.argv[2])), size = Number(process.argv[3]);
globalThis.fetch = async () => new Response(new ReadableStream({
  start(sink) {
    for (let at = 0; at < bytes.length; at += size) sink.enqueue(bytes.slice(at, at + size));
    sink.close();
  },
}));
const seen = [];
try { for await (const payload of stream("v1/x", {})) seen.push(payload); }
catch (error) { seen.push(`${error.status} ${error.message}`); }
console.log(JSON.stringify(seen));
"""
EVENTS = ('{"n": 1}', '{"text": "a\\r\\n\\nb data: ü"}', "[DONE]")
PAYLOADS = [{"n": 1}, {"text": "a\r\n\nb data: ü"}]
STREAMS = {
    "ours": "".join(f"data: {event}\n\n" for event in EVENTS),
    "crlf": "".join(f"data: {event}\r\n\r\n" for event in EVENTS),
    "no space": "".join(f"data:{event}\n\n" for event in EVENTS),
    "comments": ": ping\n\n" + ": ping\n\n".join(f"data: {event}\n\n" for event in EVENTS),
    "fields": "retry: 5\r\n\r\n"
    + "".join(f": x\r\nevent: m\r\ndata: {event}\r\nid: 1\r\n\r\n" for event in EVENTS),
    "two lines": 'data: {"n":\ndata: 1}\n\n' + "".join(f"data: {event}\n\n" for event in EVENTS[1:]),
    "end without a word": "".join(f"data: {event}\n\n" for event in EVENTS[:2]) + ": bye\n\n",
}


def read(folder: Path, text: str, size: int) -> list[object]:
    """What the console sees of a stream that comes `size` bytes at a time."""
    (folder / "api.mjs").write_text(files("specgate").joinpath("web/api.js").read_text("utf-8"), "utf-8")
    (folder / "read.mjs").write_text(READER, "utf-8")
    command = [str(NODE), "read.mjs", json.dumps(text), str(size)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize("name", STREAMS)
def test_every_way_to_write_a_stream_is_read(tmp_path: Path, name: str, size: int) -> None:
    assert read(tmp_path, STREAMS[name], size) == PAYLOADS


def test_an_error_in_a_stream_is_thrown(tmp_path: Path) -> None:
    error = ': ping\r\n\r\ndata:{"error": {"code": 503, "message": "gone"}}\r\n\r\n'
    assert read(tmp_path, error, 7) == ["503 gone"]
