"""Packed weights kept on disk, so that a second start neither dequantises nor packs anything.

One file a model in the user's cache folder, under a name made of the model file (path, size, time of
change, samples of its content), of the code that reads it and of the compiled kernels that define the
layout. It is mapped, not read: pages are shared between processes and loaded as they are used. A file
that does not hold what it says is set aside and made again; a folder that cannot be written to costs the
cache alone.

    magic, length of the header (8 bytes), header (JSON), then each tensor at a multiple of 64 bytes
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.kernels import native
from engine.kernels.build import cache_folder
from engine.kernels.native_decoder import QuantLinear

log = logging.getLogger(__name__)

_MAGIC = b"SGPACK02"
_READERS = ("gguf_weights.py", "weights.py", "quantised.py")
"""What turns a file into weights: another reader may read them otherwise."""
_ALIGNMENT = 64
_NUM_SAMPLES = 64
MIN_FILE_BYTES = 8 << 20
"""Smaller model files are packed faster than it is worth keeping them."""
_SAMPLE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies, and what it is: packed rows for `bits` 4 or 8, float32 for 32."""

    name: str
    offset: int  # from the start of the data
    num_bytes: int
    shape: tuple[int, ...]
    bits: int


class PackedCache:
    """The packed tensors of one model file: those on disk, or those to be put there by `save`."""

    def __init__(self, path: Path, library: native.Library) -> None:
        self.path = path
        self._library = library
        self._entries: dict[str, _Entry] = {}
        self._data: torch.Tensor | None = None  # uint8, mapped
        self._new: list[tuple[_Entry, torch.Tensor]] = []
        self._end = 0
        try:
            self._open()
        except (FileNotFoundError, NotADirectoryError):
            pass  # the first start, or no place for it, which `save` will tell
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._set_aside(error)

    @property
    def is_hit(self) -> bool:
        """True when tensors come from disk."""
        return self._data is not None

    def matrix(self, name: str, bias: torch.Tensor | None, make: Callable[[], QuantLinear]) -> QuantLinear:
        """The packed matrix called `name`; `make` packs it where it is not on disk."""
        entry = self._entries.get(name)
        if entry is not None and self._data is not None:
            packed = self._data[entry.offset : entry.offset + entry.num_bytes]
            num_rows, num_cols = entry.shape
            return QuantLinear.from_packed(self._library, packed, (num_rows, num_cols), entry.bits, bias)
        made = make()
        shape = (int(made.struct.num_rows), int(made.struct.num_cols))
        self._add(name, made.packed, shape, made.bits)
        return made

    def save(self) -> None:
        """Write what was made, unless it came from disk. Older files of the same model go."""
        if self.is_hit or not self._new:
            return
        # Containers that share a folder may share process ids.
        temporary = self.path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                entries = [asdict(entry) for entry, _ in self._new]
                crc = _header_crc(entries, self._end)
                for _, tensor in self._new:
                    crc = zlib.crc32(tensor.numpy().data, crc)
                header = json.dumps({"entries": entries, "crc32": crc, "num_bytes": self._end}).encode()
                file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
                start = _data_start(len(header))
                for entry, tensor in self._new:
                    file.seek(start + entry.offset)
                    file.write(tensor.numpy().tobytes())
                file.truncate(start + self._end)
            temporary.replace(self.path)
        except OSError as error:
            log.warning("packed weights could not be kept in %s: %s", self.path.parent, error)
            if temporary.is_file():
                temporary.unlink()
            return
        self._new.clear()
        stem = self.path.name.rsplit("-", 1)[0]
        for old in self.path.parent.glob(f"{stem}-*.packed"):
            if old != self.path:
                old.unlink(missing_ok=True)

    def _add(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], bits: int) -> None:
        if not self.is_hit:
            self._new.append((_Entry(name, self._end, tensor.nbytes, shape, bits), tensor))
            self._end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def _open(self) -> None:
        with self.path.open("rb") as file:
            if file.read(8) != _MAGIC:
                raise ValueError("it does not begin as one")
            length = int.from_bytes(file.read(8), "little")
            if length > 1 << 28:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
        start = _data_start(length)
        mapped = np.memmap(self.path, dtype=np.uint8, mode="c")
        if len(mapped) != start + header["num_bytes"]:
            raise ValueError("it ends early or late")
        entries = [_Entry(**(fields | {"shape": tuple(fields["shape"])})) for fields in header["entries"]]
        data = mapped[start:]
        crc = _header_crc(header["entries"], header["num_bytes"])
        for entry in entries:
            crc = zlib.crc32(data[entry.offset : entry.offset + entry.num_bytes].data, crc)
        if crc != header["crc32"]:
            raise ValueError("its checksum is wrong")
        self._data = torch.from_numpy(data)
        self._entries = {entry.name: entry for entry in entries}

    def _set_aside(self, error: Exception) -> None:
        aside = self.path.with_suffix(".broken")
        log.warning("packed weights in %s cannot be used and are made again: %s", self.path, error)
        try:
            self.path.replace(aside)
        except OSError as fault:
            log.warning("%s could not be set aside: %s", self.path, fault)


def _header_crc(entries: list[dict[str, Any]], num_bytes: int) -> int:
    """Of where the tensors lie and how they are shaped: kernels trust it."""
    return zlib.crc32(json.dumps([entries, num_bytes]).encode())


def _data_start(header_length: int) -> int:
    return -(-(16 + header_length) // 4096) * 4096


def open_packed_cache(model_file: Path, library: native.Library, folder: Path | None = None) -> PackedCache:
    """The cache for `model_file` under the kernels of `library`; `folder` instead of the user's."""
    stat = model_file.stat()
    key = hashlib.blake2b(digest_size=12)
    key.update(Path(str(library._name)).name.encode())  # made of the kernels' sources and of the machine
    for reader in _READERS:
        key.update(Path(__file__).with_name(reader).read_bytes())
    key.update(metadata.version("gguf").encode())
    key.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    step = max(1, (stat.st_size - _SAMPLE_BYTES) // _NUM_SAMPLES)
    with model_file.open("rb") as file:
        for place in range(0, stat.st_size, step):
            file.seek(place)
            key.update(file.read(_SAMPLE_BYTES))
    where = hashlib.blake2b(str(model_file.resolve()).encode(), digest_size=6).hexdigest()
    root = folder or cache_folder().parent / "weights"
    return PackedCache(root / f"{model_file.stem}-{where}-{key.hexdigest()}.packed", library)
