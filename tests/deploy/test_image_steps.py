"""The CPU image's own steps, without a container engine: its COPY and RUN lines in a fresh folder and virtual
environment, then its entry point, its health check and its stop signal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.support import DEPLOY, ROOT, free_port

DOCKERFILE = DEPLOY / "docker" / "Dockerfile.cpu"


def instructions(stage: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a stage, continued lines joined, comments left out."""
    lines = [line for line in stage.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


def exec_form(arguments: str) -> list[str]:
    """The words of `["a", "b"]`, options before it left out."""
    return list(json.loads(arguments[arguments.index("[") :]))


@pytest.mark.slow
def test_the_steps_of_the_image_give_a_server_that_is_healthy_and_stops(tmp_path: Path) -> None:
    build, run = stages()
    venv, source, port = tmp_path / "venv", tmp_path / "src", free_port()
    source.mkdir()
    for name, arguments in instructions(build):
        if name == "COPY":
            *sources, target = arguments.split()
            for item in sources:
                place(ROOT / item, source / target / (item if target == "./" else ""))
        elif name == "RUN":
            command = arguments.replace("/opt/specgate", str(venv)).replace("$PIP_OPTIONS", "-q")
            shell = ["bash", "-euo", "pipefail", "-c", command]
            python_first = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            subprocess.run(
                shell, cwd=source, check=True, timeout=1500, env={**os.environ, "PATH": python_first}
            )
    last = dict(instructions(run))
    config = tmp_path / "config.yaml"
    text = (DEPLOY / "docker" / "config.yaml").read_text(encoding="utf-8")
    config.write_text(re.sub(r"/var/(lib|log)", rf"{tmp_path}/\1", text).replace("8080", str(port)))
    command = [str(venv / "bin" / exec_form(last["ENTRYPOINT"])[0]), *exec_form(last["CMD"])]
    command = [str(config) if word == "/etc/specgate/config.yaml" else word for word in command]
    check = [word.replace("8080", str(port)) for word in exec_form(last["HEALTHCHECK"])]
    check[0] = str(venv / "bin" / check[0])
    environment = {
        "PATH": os.environ["PATH"],
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONUNBUFFERED": "1",
    }
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment)
    try:
        assert subprocess.run(check, capture_output=True, check=False).returncode != 0, "healthy too early"
        assert server.stdout is not None
        assert server.stdout.readline().startswith(f"specgate ready on http://0.0.0.0:{port}")
        assert subprocess.run(check, capture_output=True, check=False).returncode == 0
        server.send_signal(getattr(signal, last["STOPSIGNAL"].strip()))
        assert server.wait(60) == 0
        assert subprocess.run(check, capture_output=True, check=False).returncode != 0
    finally:
        if server.poll() is None:
            server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


def stages() -> tuple[str, str]:
    """The build stage and the one that runs, without their FROM lines."""
    _, build, run = re.split(r"^FROM .*$", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return build, run


def place(source: Path, target: Path) -> None:
    """As COPY does: a folder's content, or a file."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def test_the_instructions_are_read_as_docker_reads_them() -> None:
    build, run = stages()
    names = [name for name, _ in instructions(build)]
    assert {"ARG", "WORKDIR", "COPY", "RUN"} <= set(names)
    last = dict(instructions(run))
    assert exec_form(last["ENTRYPOINT"]) == ["specgate"]
    assert exec_form(last["CMD"])[0] == "serve"
    assert exec_form(last["HEALTHCHECK"])[:2] == ["python", "-c"]
