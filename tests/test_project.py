"""The project's own promises: packaging, import rules, and documents that name only what exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from specgate import __version__
from specgate.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("specgate", "engine", "router_models")
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "README.zh-CN.md", "docs/production.md")
MAX_LINES = 450
IMPORT_NAMES = {"prometheus-client": "prometheus_client", "pyyaml": "yaml", "scikit-learn": "sklearn"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file()]


def python_files() -> list[Path]:
    return [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def test_every_package_folder_is_listed():
    listed = project()["tool"]["setuptools"]["packages"]
    there = {".".join(f.parent.relative_to(ROOT).parts) for f in python_files() if f.name == "__init__.py"}
    assert sorted(listed) == sorted(there)
    folders = {".".join(f.parent.relative_to(ROOT).parts) for f in python_files()}
    assert folders == there, "a folder with modules lacks __init__.py"


def test_every_data_file_inside_a_package_is_shipped():
    patterns = project()["tool"]["setuptools"]["package-data"]
    there = {f for f in tracked_files() if f.relative_to(ROOT).parts[0] in PACKAGES and f.suffix != ".py"}
    for package in PACKAGES:
        for pattern in patterns[package]:
            there -= set((ROOT / package).glob(pattern))
    assert not there, "not in the wheel"


def test_every_import_is_a_declared_dependency():
    names = [re.split(r"[<>=\[]", line)[0].strip() for line in project()["project"]["dependencies"]]
    known = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    known |= {"triton", "matplotlib"}  # optional: with torch on a GPU, and for PNG files of the bench
    known |= {"opentelemetry"}  # optional: telemetry.tracing
    used = {}
    for file in python_files():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            used |= {module.split(".")[0]: file for module in modules}
    strange = {n: str(f) for n, f in used.items() if n not in sys.stdlib_module_names | known | set(PACKAGES)}
    assert not strange


def test_import_rules_hold():
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed beside this Python")
    command = [sys.executable, linter, "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["specgate.app", "specgate.cli", "specgate.demo"])
def test_the_gateway_does_not_load_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or f"{module} loads torch"


def test_no_tracked_file_names_this_machine_or_a_registry():
    registry = r"py[p]i\.(org|python)|python[h]osted|extra-[i]ndex-url|find-[l]inks"
    forbidden = re.compile(rf"{re.escape(str(ROOT))}/|/(root|home|Users)/\w|{registry}")
    for file in tracked_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found = forbidden.search(text)
        assert not found, f"{file.relative_to(ROOT)} contains {found.group()!r}"


def test_source_files_stay_small():
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in python_files()}
    assert not {str(file): length for file, length in lengths.items() if length > MAX_LINES}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def commands() -> set[str]:
    (action,) = [a for a in build_parser()._actions if isinstance(a.choices, dict)]
    return set(action.choices)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_name_only_what_exists(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    assert set(re.findall(r"\bmake ([a-z-]+)", code)) <= make_targets()
    assert set(re.findall(r"\bspecgate ([a-z-]+)\b(?! ready)", code)) - {"ready"} <= commands()
    for path in re.findall(
        r"`((?:specgate|engine|router_models|tests|configs|scripts|deploy|docs)/[\w./-]*)`", text
    ):
        assert (ROOT / path).exists(), f"{name} names {path}, which is not there"


def test_readme_shows_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make serve" in text
    assert "make test" in text


def test_changelog_knows_this_version():
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_chinese_readme_says_nothing_that_the_english_one_does_not():
    """Commands, code and printed output are the same text, in the same order; so are the files named."""
    english = (ROOT / "README.md").read_text(encoding="utf-8")
    chinese = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    blocks = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    there = blocks.findall(english)
    shown = blocks.findall(chinese)
    assert shown == [block for block in there if block in shown], "a block has changed: copy it over"
    assert len(shown) >= 6
    paths = re.compile(r"`((?:specgate|engine|router_models|tests|configs|scripts|deploy|docs)/[\w./-]*)`")
    assert set(paths.findall(chinese)) <= set(paths.findall(english))
