"""Compiles the C kernels for this machine: `python -m engine.kernels.build`.

The result lies in the user's cache folder under a name made of the sources, the compiler and the
CPU's capabilities, so a changed source or another CPU never meets a stale build. Where there is no
compiler the engine runs on torch alone; that is correct, only slower.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent / "cpu"
COMPILE_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wno-psabi")
# Linked without -fopenmp on purpose: the OpenMP calls then bind to the runtime that torch has
# loaded, and one pool of threads serves both instead of two pools fighting over the cores.
LINK_FLAGS = ("-shared", "-lm")
NATIVE_FLAGS = ("-mcpu=native",) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)
COMPILE_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class BuildResult:
    """Where the library lies, or why there is none."""

    library: Path | None
    reason: str  # one sentence, for people
    is_new: bool = False


def find_compiler() -> str | None:
    """The C compiler to use: $CC if set, else gcc or cc. The sources need GCC's vector extensions."""
    for name in (os.environ.get("CC"), "gcc", "cc"):
        if name and (found := shutil.which(name)):
            return found
    return None


def cpu_capabilities() -> str:
    """What `-march=native` depends on, as text: the architecture and the CPU's feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "cpu family", "model\t", "CPU implementer", "CPU part")
    return "\n".join([platform.machine(), *dict.fromkeys(x for x in lines if x.startswith(wanted))])


def cache_folder() -> Path:
    """The user's cache folder for compiled kernels ($XDG_CACHE_HOME, else ~/.cache)."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specgate" / "kernels"


def build(folder: Path | None = None) -> BuildResult:
    """Compile unless this very build exists. Never raises for a missing or failing compiler.

    `folder` overrides the cache folder.
    """
    compiler = find_compiler()
    if compiler is None:
        return BuildResult(
            None, "no C compiler found (gcc or cc); install gcc for the fast CPU kernels"
        )
    sources = sorted(SOURCE_FOLDER.glob("*.[ch]"))
    target = (folder or cache_folder()) / f"specgate-{_fingerprint(compiler, sources)}.so"
    if target.exists():
        return BuildResult(target, f"{target} is up to date")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        compile_library(compiler, [s for s in sources if s.suffix == ".c"], target, cpu_flags=NATIVE_FLAGS)
    except subprocess.CalledProcessError as e:
        return BuildResult(None, f"{compiler} failed: {(e.stderr or '').strip()[-2000:]}")
    except (OSError, subprocess.TimeoutExpired) as e:
        return BuildResult(None, f"the CPU kernels could not be built: {e}")
    return BuildResult(target, f"built {target}", is_new=True)


def _fingerprint(compiler: str, sources: list[Path]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256(version)
    command = (compiler, *COMPILE_FLAGS, *NATIVE_FLAGS, *LINK_FLAGS)
    digest.update("\n".join((*command, cpu_capabilities())).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:20]


def compile_library(compiler: str, sources: list[Path], target: Path, *, cpu_flags: tuple[str, ...]) -> None:
    """Compile `sources` to the shared library `target`; raises CalledProcessError on a fault."""
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        objects = []
        for source in sources:
            objects.append(f"{work}/{source.stem}.o")
            _run([compiler, *COMPILE_FLAGS, *cpu_flags, "-c", str(source), "-o", objects[-1]])
        library = f"{work}/library.so"
        _run([compiler, *objects, *LINK_FLAGS, "-o", library])
        # Rename is atomic: whoever looks meanwhile sees no file or a whole one.
        os.replace(library, target)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)


def main() -> int:
    """Build and say in one line what happened; a missing compiler is no failure."""
    result = build()
    if result.library is None:
        sys.stderr.write(f"CPU kernels: not built, torch is used instead: {result.reason}\n")
    elif result.is_new:
        sys.stdout.write(f"CPU kernels: {result.reason}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
