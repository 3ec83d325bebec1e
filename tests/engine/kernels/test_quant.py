"""Quantised weights and products in C against the readable reference."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from engine.kernels import build, native, native_decoder, native_draft, reference
from engine.kernels.native_decoder import QuantLinear

LIBRARY = native.load_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no C compiler on this machine")
SHAPES = [(40, 576), (16, 32), (33, 50), (7, 96)]


def on_16_levels(num_rows: int, num_cols: int, seed: int = 0) -> torch.Tensor:
    """Weights as GGUF's Q4_1 stores them: a half-float scale and minimum per block of 32."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-num_cols // 32)
    levels = torch.randint(0, 16, (num_rows, num_blocks, 32), generator=generator).float()
    levels[:, :, 0], levels[:, :, 1] = 0, 15
    scale = (0.1 * torch.rand(num_rows, num_blocks, 1, generator=generator)).half().float()
    least = torch.randn(num_rows, num_blocks, 1, generator=generator).half().float()
    return (levels * scale + least).flatten(1)[:, :num_cols].contiguous()


@pytest.mark.parametrize(("num_rows", "num_cols"), SHAPES)
def test_weights_on_16_levels_are_kept_exactly_in_4_bits(num_rows: int, num_cols: int) -> None:
    weight = on_16_levels(num_rows, num_cols)
    packed = QuantLinear(LIBRARY, weight)
    assert packed.bits == 4
    torch.testing.assert_close(packed.weight(), weight, rtol=0, atol=1e-6)


def test_a_matrix_with_one_block_off_the_grid_takes_8_bits() -> None:
    weight = on_16_levels(20, 64)
    weight[13, 40] += 0.3 * (weight[13, 33] - weight[13, 32]).abs() / 15
    assert QuantLinear(LIBRARY, weight).bits == 8


@pytest.mark.parametrize(("num_rows", "num_cols"), SHAPES)
def test_other_weights_are_within_half_a_step_of_8_bits(num_rows: int, num_cols: int) -> None:
    weight = torch.randn(num_rows, num_cols, generator=torch.Generator().manual_seed(1))
    packed = QuantLinear(LIBRARY, weight)
    assert packed.bits == 8
    step = weight.abs().max() / 127
    assert (packed.weight() - weight).abs().max() <= 0.51 * step


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("num_rows", "num_cols"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_product_equals_reference(bits: int, num_rows: int, num_cols: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(num_rows, num_cols, generator=generator)
    if bits == 4:
        weight = on_16_levels(num_rows, num_cols)
    bias = torch.randn(num_rows, generator=generator) if has_bias else None
    packed = QuantLinear(LIBRARY, weight, bias)
    x = torch.randn(21, num_cols, generator=generator) * torch.logspace(-3, 3, 21)[:, None]
    x[5] = 0.0
    expected = reference.quantised_linear(x, packed.weight(), bias)
    torch.testing.assert_close(packed(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_gets_the_same_bits_in_any_batch(bits: int) -> None:
    weight = on_16_levels(100, 576) if bits == 4 else torch.randn(100, 576)
    packed = QuantLinear(LIBRARY, weight)
    x = torch.randn(29, 576)
    together = packed(x)
    for first in range(29):
        for count in (1, 2, 3, 5, 8):
            assert torch.equal(packed(x[first : first + count]), together[first : first + count])


def test_no_rows_are_no_work() -> None:
    assert QuantLinear(LIBRARY, torch.randn(16, 64))(torch.empty(0, 64)).shape == (0, 16)


def test_nan_is_not_lost() -> None:
    packed = QuantLinear(LIBRARY, torch.randn(16, 64))
    x = torch.full((2, 64), float("nan"))
    x[0] = 1.0
    out = packed(x)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("num_rows", range(1, 10))
@pytest.mark.parametrize("bits", [4, 8])
def test_portable_build_agrees(portable: ctypes.CDLL, bits: int, num_rows: int) -> None:
    weight = on_16_levels(50, 160) if bits == 4 else torch.randn(50, 160)
    x = torch.randn(num_rows, 160)
    x[0] = x[0].sign() * 0.7  # every activation at the end of its range
    fast, plain = QuantLinear(LIBRARY, weight), QuantLinear(portable, weight)
    assert torch.equal(fast.weight(), plain.weight())
    torch.testing.assert_close(plain(x), fast(x), rtol=1e-5, atol=1e-4)


def test_structs_have_the_size_that_c_gives_them(tmp_path: Path) -> None:
    """The Python mirrors of the C structs would corrupt memory silently if they drifted."""
    mirrors = {
        "kv_layer": native.KvLayer,
        "ragged_batch": native.RaggedBatch,
        "head_rows": native.HeadRows,
        "quant_matrix": native_decoder.QuantMatrix,
        "decoder_layer": native_decoder.DecoderLayer,
        "decoder": native_decoder.Decoder,
        "draft_head": native_draft.DraftHeadStruct,
        "draft_sequence": native_draft.DraftSequence,
    }
    source = tmp_path / "sizes.c"
    body = "".join(f"int64_t size_of_{name}(void) {{ return sizeof({name}); }}\n" for name in mirrors)
    source.write_text(f'#include "{build.SOURCE_FOLDER / "draft.h"}"\n{body}')
    build.compile_library(build.find_compiler() or "cc", [source], tmp_path / "sizes.so", cpu_flags=())
    library = ctypes.CDLL(str(tmp_path / "sizes.so"))
    for name, mirror in mirrors.items():
        assert getattr(library, f"size_of_{name}")() == ctypes.sizeof(mirror)
