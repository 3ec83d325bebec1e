"""The GGUF header reader: agrees with the gguf package, and never fails but with one clear error."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelSourceError
from engine.models.gguf_file import read_header
from engine.models.source import resolve
from engine.models.spec import load_spec
from engine.models.tiny import random_weights, tiny_spec
from tests.engine.models.support import write_gguf


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    spec = tiny_spec(vocab_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
    return write_gguf(path, spec, random_weights(spec), gguf.GGMLQuantizationType.Q8_0)


def test_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", "übermäßig 好")
    writer.add_bool("a.flag", True)
    writer.add_int8("a.int8", -3)
    writer.add_uint64("a.uint64", 2**60)
    writer.add_float64("a.float64", 0.1)
    writer.add_float32("a.float32", 0.5)
    writer.add_array("a.strings", ["x", "", "好"])
    writer.add_array("a.integers", [1, -2, 3])
    writer.add_custom_alignment(64)
    for index, shape in enumerate([(3, 32), (5,), (2, 3, 32)]):
        writer.add_tensor(f"t{index}", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_header(path)
    reader = gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    assert len(header.tensors) == 3
    for tensor in reader.tensors:
        own = header.tensors[tensor.name]
        assert own.offset == tensor.data_offset
        assert own.shape == tuple(reversed(tensor.shape.tolist()))
        assert own.quant_type == int(tensor.tensor_type)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_damaged_header_gives_an_answer_or_one_error(
    small_file: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, 1500))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        spec = load_spec(resolve(str(damaged)))
    except ModelSourceError as error:
        assert str(damaged.stem) in str(error)  # noqa: PT017 - both outcomes are allowed
    else:
        assert spec.vocab_size > 0


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 not a model at all"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelSourceError, match="not a complete GGUF file"):
        read_header(path)
