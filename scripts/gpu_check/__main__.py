"""Does the GPU path do what it should on this machine, and how fast? `make gpu-check`.

    python3 scripts/gpu_check [--json FILE] [--minutes 7] [--only SECTION ...] [--cpu-smoke]

Needs one CUDA GPU and a python3 (3.11 or later) with torch, triton and numpy; nothing is downloaded
and no model file is read: weights are random, in 1B and 8B shapes. Prints one table and writes JSON.
Exit code 0: all well; 1: a check failed; 3: nothing to check on. `--cpu-smoke` runs the same script
with tiny shapes under Triton's interpreter: it shows that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path

NOTHING_TO_CHECK = 3
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]  # beside this file, and the repository


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, default=Path("out/gpu_check.json"), help="where the figures go")
    parser.add_argument("--minutes", type=float, default=7.0, help="what is not begun by then is left out")
    parser.add_argument("--only", nargs="*", help="names of sections")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny shapes, interpreted, on the CPU")
    arguments = parser.parse_args()
    missing = [name for name in ("torch", "triton", "numpy") if find_spec(name) is None]
    if missing:
        print(f"gpu-check: {sys.executable} lacks {', '.join(missing)}; install it there.", file=sys.stderr)
        return NOTHING_TO_CHECK
    if arguments.cpu_smoke:  # read when kernels are defined, so before they are imported
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["SPECGATE_KERNELS"] = "triton"
    import torch

    if not arguments.cpu_smoke and not torch.cuda.is_available():
        print(
            "gpu-check: torch finds no CUDA GPU here, so nothing was checked. Run it on a machine with one; "
            "--cpu-smoke tries the script itself.",
            file=sys.stderr,
        )
        return NOTHING_TO_CHECK
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    """All sections, each guarded, then the table and the file."""
    import warnings

    import parity
    import runs
    import speed
    from report import Report
    from sizes import Place

    warnings.filterwarnings("ignore", category=UserWarning, module="triton")
    place = Place.smoke() if arguments.cpu_smoke else Place.cuda()
    report = Report(deadline_s=time.perf_counter() + 60 * arguments.minutes)
    report.note("machine", place.describe() | {"python": platform.python_version()})
    sections = {
        "parity": parity.check_kernels,
        "verify parity": parity.check_verify,
        "greedy equality": runs.check_greedy,
        "graph replay": runs.check_replay,
        "machine limits": speed.measure_limits,
        "verify speed": speed.measure_verify,
        "step time": speed.measure_steps,
        "tokens per second": runs.measure_policies,
    }
    for name, section in sections.items():
        if arguments.only and name not in arguments.only:
            continue
        if report.is_late:
            report.left_out(name)
            continue
        started_s = time.perf_counter()
        try:
            section(place, report.section(name))
        except Exception as error:  # noqa: BLE001  # one section's fault must not hide the others' results
            report.section(name).fail(f"{type(error).__name__}: {error}")
            traceback.print_exc()
        report.took(name, time.perf_counter() - started_s)
        place.tidy()
    print(report.table())
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report.figures(), indent=1) + "\n")
    print(f"figures in {arguments.json}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
