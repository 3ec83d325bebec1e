"""Put on the path of a process that a bench stops and continues: its clocks leave that time out.

Python imports this module by itself at start. The file named by SPECGATE_STOPPED holds, as a
double, the seconds the process has been stopped for; who stops it keeps that up to date.
`time.perf_counter` and `time.monotonic` leave them out; clocks in C and the wall clock do not.
"""

import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable


def _less_stops(clock: Callable[[], float], stopped: mmap.mmap) -> Callable[[], float]:
    read = struct.Struct("d").unpack_from

    def now() -> float:
        while True:
            (before,) = read(stopped)
            value = clock()
            (after,) = read(stopped)
            if before == after:  # else it was stopped in between
                return value - float(after)

    return now


if _path := os.environ.get("SPECGATE_STOPPED"):
    with open(_path, "rb") as _file:
        _stopped = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
    if sys.platform == "linux":  # a bench that is killed must not leave a stopped server behind
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    time.perf_counter = _less_stops(time.perf_counter, _stopped)
    time.monotonic = _less_stops(time.monotonic, _stopped)
