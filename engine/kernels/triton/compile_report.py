"""Compile every kernel for GPUs that need not be there, and say what each takes of the machine.

    python -m engine.kernels.triton.compile_report [--json FILE] [--architectures 80,90,100]

Registers and spills
are those of the compiled binary, shared memory is what Triton asks for. Exit code 1 where a hot kernel
spills or does not compile. Shapes are those of 1B and 8B Llama models.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before kernels are defined

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton import accept, adjust, attention, compact, ngram, rotary, rows, scan, verify

ARCHITECTURES = (80, 90, 100)
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Specimen:
    """One kernel at one shape: argument types by Triton's names, constants, warps and stages."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = ()  # integers that are multiples of 16 at run time
    is_hot: bool = True  # runs in every step of a served model: must not spill


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes on one architecture."""

    name: str
    architecture: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int


def specimens() -> Iterator[Specimen]:
    """Every kernel, at the shapes that matter."""
    for dtype, head_dim, group, window in (
        (torch.bfloat16, 64, 4, 1),
        (torch.bfloat16, 128, 4, 1),
        (torch.bfloat16, 128, 4, 16),
        (torch.bfloat16, 128, 8, 256),
        (torch.float16, 128, 4, 8),
        (torch.float32, 64, 4, 8),
    ):
        yield from _attention(dtype, head_dim, group, window)
    for dtype in _DTYPES:
        yield from _layer(dtype)
    yield from _verify()


def _attention(dtype: torch.dtype, head_dim: int, group: int, window: int) -> Iterator[Specimen]:
    kind = _DTYPES[dtype]
    tile_rows, tile_keys, num_warps, num_stages = attention.tile_shape(window * group, group, head_dim, dtype)
    num_splits = 1 if window > attention.MAX_SPLIT_QUERY else 4
    for has_tree in (False, True):
        yield Specimen(
            f"attention {kind} d{head_dim} g{group} w{window}{' tree' if has_tree else ''}",
            attention.attention_kernel,
            {
                **dict.fromkeys(("out_ptr", "query_ptr", "key_ptr", "value_ptr"), f"*{kind}"),
                **dict.fromkeys(("part_ptr", "stat_ptr"), "*fp32"),
                **dict.fromkeys(("table_ptr", "context_ptr", "start_ptr"), "*i32"),
                **dict.fromkeys(("position_ptr", "visible_ptr"), "*i64"),
                "scale": "fp32",
            },
            {
                "HEAD_DIM": head_dim,
                "DIM": head_dim,
                "GROUP": group,
                "NUM_KV_HEADS": 8,
                "BLOCK_SIZE": 16,
                "TILE_ROWS": tile_rows,
                "TILE_KEYS": tile_keys,
                "HAS_TREE": has_tree,
                "NUM_SPLITS": num_splits,
                "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
                "IS_INTERPRETED": False,
            },
            num_warps,
            num_stages,
            ("stride_query_token", "stride_query_head", "stride_block", "stride_kv_head"),
            is_hot=dtype != torch.float32,
        )
    if num_splits > 1:
        pointers = {"out_ptr": f"*{kind}", "part_ptr": "*fp32", "stat_ptr": "*fp32"}
        yield Specimen(
            f"attention join {kind} d{head_dim}",
            attention.join_kernel,
            {**pointers, "context_ptr": "*i32", "start_ptr": "*i32"},
            {"HEAD_DIM": head_dim, "DIM": head_dim, "NUM_HEADS": 32, "NUM_SPLITS": 4, "SPLITS": 4},
        )


def _layer(dtype: torch.dtype) -> Iterator[Specimen]:
    kind = f"*{_DTYPES[dtype]}"
    yield Specimen(
        f"rotary and KV write {kind[1:]} d128",
        rotary.rotate_and_write_kernel,
        {
            **dict.fromkeys(
                ("fused_ptr", "query_norm_ptr", "key_norm_ptr", "key_cache_ptr", "value_cache_ptr"), kind
            ),
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "slot_ptr": "*i64",
            "eps": "fp32",
        },
        {
            "NUM_HEADS": 32,
            "NUM_KV_HEADS": 8,
            "BLOCK_SIZE": 16,
            "HALF_DIM": 64,
            "HALF": 64,
            "TILE_HEADS": 8,
            "HAS_NORM": True,
        },
        aligned=("stride_token", "stride_block", "stride_kv_head"),
    )
    for features in (2048, 4096):
        yield Specimen(
            f"residual and norm {kind[1:]} {features}",
            rows.add_norm_kernel,
            {**dict.fromkeys(("x_ptr", "delta_ptr", "weight_ptr", "out_ptr"), kind), "eps": "fp32"},
            {"FEATURES": features, "HAS_DELTA": True},
            num_warps=features // 512,
            aligned=("num_features",),
        )
    yield Specimen(
        f"silu {kind[1:]}",
        rows.silu_mul_kernel,
        {"gate_up_ptr": kind, "out_ptr": kind},
        {"TILE": 1024},
        aligned=("num_features",),
    )
    yield Specimen(
        f"compaction {kind[1:]} d128",
        compact.compact_kernel,
        {"key_ptr": kind, "value_ptr": kind, "from_ptr": "*i64", "to_ptr": "*i64"},
        {"NUM_KV_HEADS": 8, "BLOCK_SIZE": 16, "HEAD_DIM": 128, "DIM": 128, "MOVES": 16},
        aligned=("stride_layer", "stride_block", "stride_kv_head"),
    )


def _verify() -> Iterator[Specimen]:
    ints = dict.fromkeys(
        (
            "sequence_ptr",
            "row_ptr",
            "index_ptr",
            "node_ptr",
            "token_ptr",
            "edge_ptr",
            "result_ptr",
            "best_ptr",
            "id_ptr",
            "touched_ptr",
            "entry_ptr",
        ),
        "*i32",
    )
    floats = dict.fromkeys(
        ("logits_ptr", "part_ptr", "score_ptr", "stat_ptr", "draft_ptr", "work_ptr", "kept_ptr"), "*fp32"
    )
    doubles = dict.fromkeys(("setting_ptr", "bias_ptr", "mass_ptr"), "*fp64")
    types = {**ints, **floats, **doubles}
    tile = {"TILE": verify._TILE}
    entry = {"TILE": verify._ENTRY_TILE}
    search = {"SPLITS": 32, "CAPACITY": verify.LIST_CAPACITY, "SEARCH_TILE": verify._SEARCH_TILE, **tile}
    aligned = ("stride_row", "vocab_size")
    for name, kernel, constants, num_warps in (
        ("verify scan", scan.scan_kernel, {"TILE": verify.SCAN_TILE}, 8),
        ("verify settle", scan.settle_kernel, search, 8),
        ("verify walk", accept.walk_kernel, {}, 1),
        ("verify ratio", accept.ratio_kernel, tile, 8),
        ("verify block mass", accept.block_mass_kernel, tile, 8),
        ("verify block", accept.block_kernel, tile, 8),
        ("verify adjust", adjust.adjust_kernel, entry, 4),
        ("verify restore", adjust.restore_kernel, entry, 4),
    ):
        is_hot = kernel not in (accept.ratio_kernel, accept.block_kernel)
        yield Specimen(name, kernel, types, constants, num_warps, aligned=aligned, is_hot=is_hot)
    yield Specimen(
        "n-gram match",
        ngram.match_kernel,
        {"history_ptr": "*i32", "length_ptr": "*i32", "result_ptr": "*i32"},
        {"MIN_N": 2, "MAX_N": 5, "NUM_DRAFT": 8, "DRAFT": 8, "TILE": ngram.TILE},
    )


def measure(specimen: Specimen, architecture: int) -> Usage:
    """Compile one kernel for one architecture. Raises what Triton raises."""
    names = specimen.kernel.arg_names
    signature = {}
    for name in names:
        signature[name] = "constexpr" if name in specimen.constants else specimen.types.get(name, "i32")
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in specimen.aligned
    }
    source = ASTSource(specimen.kernel, signature, specimen.constants, attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": specimen.num_warps, "num_stages": specimen.num_stages},
    )
    registers, spill_bytes = _resources(compiled.asm["cubin"])
    return Usage(
        specimen.name, architecture, registers, spill_bytes, int(compiled.metadata.shared), specimen.num_warps
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of its stack, of the one kernel in a cubin. The kernels keep no arrays
    of their own, so what is on the stack was spilled there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text, re.DOTALL)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of resources: {text[:200]!r}")
    return int(found[1]), int(found[2]) + int(found[3])


def report(
    architectures: tuple[int, ...], chosen: list[Specimen], say: Callable[[str], None]
) -> tuple[list[Usage], list[str]]:
    """Measure all; what each takes, and a sentence for each fault."""
    usages: list[Usage] = []
    faults: list[str] = []
    say(f"triton {triton.__version__}")
    say(f"{'kernel':40} {'sm':>4} {'warps':>5} {'registers':>9} {'spilled':>8} {'shared':>8}")
    for specimen in chosen:
        for architecture in architectures:
            try:
                usage = measure(specimen, architecture)
            except Exception as error:  # noqa: BLE001  # one kernel's fault must not hide the others'
                faults.append(f"{specimen.name} does not compile for sm_{architecture}: {error}")
                continue
            usages.append(usage)
            say(
                f"{usage.name:40} {architecture:4} {usage.num_warps:5} {usage.registers:9} "
                f"{usage.spill_bytes:8} {usage.shared_bytes:8}"
            )
            if usage.spill_bytes and specimen.is_hot:
                faults.append(f"{usage.name} spills {usage.spill_bytes} bytes on sm_{architecture}")
    return usages, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--architectures", default=",".join(map(str, ARCHITECTURES)), help="e.g. 80,90")
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    arguments = parser.parse_args()
    architectures = tuple(int(part) for part in arguments.architectures.split(","))
    chosen = [specimen for specimen in specimens() if arguments.only in specimen.name]
    usages, faults = report(architectures, chosen, print)
    if arguments.json is not None:
        figures = {"triton": triton.__version__, "kernels": [asdict(usage) for usage in usages]}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
