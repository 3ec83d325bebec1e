"""Quantised weights and the whole decoder forward in C, as Python objects that own the memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass

import torch

from engine.batch import ForwardBatch
from engine.kernels.native import KvLayer, RaggedBatch, describe_batch, kv_layer

_BITS = (4, 8)  # WEIGHTS_4BIT, WEIGHTS_8BIT in cpu/quant.h
_CACHE_LINE = 64


class QuantMatrix(ctypes.Structure):
    """quant_matrix in cpu/quant.h."""

    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("num_rows", c_int64),
        ("num_cols", c_int64),
        ("kind", c_int64),
    ]


class DecoderLayer(ctypes.Structure):
    """decoder_layer in cpu/decoder.h."""

    _fields_ = [
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", QuantMatrix),
        ("output", QuantMatrix),
        ("gate", QuantMatrix),
        ("up", QuantMatrix),
        ("down", QuantMatrix),
    ]


class Decoder(ctypes.Structure):
    """decoder in cpu/decoder.h."""

    _fields_ = [
        ("layers", POINTER(DecoderLayer)),
        ("frequencies", c_void_p),
        ("norm", c_void_p),
        ("embedding", QuantMatrix),
        ("head", QuantMatrix),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("eps", c_double),
    ]


def declare_products(library: ctypes.CDLL) -> None:
    """State the signatures of the functions that `QuantLinear` uses."""
    library.specgate_packed_bytes.argtypes = [c_int64, c_int64, c_int64]
    library.specgate_packed_bytes.restype = c_int64
    library.specgate_has_16_levels.argtypes = [c_void_p, c_int64, c_int64, c_int64]
    library.specgate_has_16_levels.restype = c_int64
    library.specgate_pack.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64]
    library.specgate_pack.restype = None
    library.specgate_unpack_row.argtypes = [POINTER(QuantMatrix), c_int64, c_void_p]
    library.specgate_unpack_row.restype = None
    library.specgate_linear.argtypes = [POINTER(QuantMatrix), c_void_p, c_int64, c_void_p, c_int64]
    library.specgate_linear.restype = c_int64


def declare_decoder(library: ctypes.CDLL) -> None:
    """State the signatures of the functions that `NativeDecoder` uses."""
    library.specgate_decoder_forward.argtypes = [
        POINTER(Decoder),
        POINTER(RaggedBatch),
        c_void_p,
        c_void_p,
        POINTER(KvLayer),
        c_int64,
        c_void_p,
        c_int64,
    ]
    library.specgate_decoder_forward.restype = c_int64


class QuantLinear:
    """y = x W^T + b with W in 4 or 8 bits per block of 32 inputs and x rounded to 8 bits per token.

    4 bits are taken where they keep every weight (a matrix stored in GGUF's Q4_0 or Q4_1), else 8.
    """

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out_features, in_features] float32 on the CPU; not kept."""
        weight = weight.contiguous()
        num_rows, num_cols = weight.shape
        threads = torch.get_num_threads()
        fits = library.specgate_has_16_levels(weight.data_ptr(), num_rows, num_cols, threads)
        self.bits = _BITS[0] if fits else _BITS[1]
        size = library.specgate_packed_bytes(num_rows, num_cols, self.bits)
        storage = torch.empty(size + _CACHE_LINE, dtype=torch.uint8)
        first = -storage.data_ptr() % _CACHE_LINE
        packed = storage[first : first + size]
        library.specgate_pack(weight.data_ptr(), num_rows, num_cols, self.bits, packed.data_ptr(), threads)
        self._hold(library, packed, (num_rows, num_cols), bias)

    @classmethod
    def from_packed(
        cls,
        library: ctypes.CDLL,
        packed: torch.Tensor,
        shape: tuple[int, int],
        bits: int,
        bias: torch.Tensor | None = None,
    ) -> QuantLinear:
        """A matrix as another one packed it: `packed` [bytes] uint8, at a multiple of 64 bytes."""
        if bits not in _BITS or packed.nbytes != library.specgate_packed_bytes(*shape, bits):
            raise ValueError(f"{packed.nbytes} bytes hold no matrix of {shape} in {bits} bits")
        if packed.data_ptr() % _CACHE_LINE:
            raise ValueError(f"packed weights must lie at a multiple of {_CACHE_LINE} bytes")
        self = cls.__new__(cls)
        self.bits = bits
        self._hold(library, packed, shape, bias)
        return self

    def _hold(
        self, library: ctypes.CDLL, packed: torch.Tensor, shape: tuple[int, int], bias: torch.Tensor | None
    ) -> None:
        num_rows, num_cols = shape
        self.packed = packed
        self.bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._library = library
        self.struct = QuantMatrix(
            packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            num_rows,
            num_cols,
            self.bits,
        )

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        size: int = self.packed.nbytes
        return size + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features], both float32."""
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.struct.num_rows)
        failed = self._library.specgate_linear(
            byref(self.struct), x.data_ptr(), x.shape[0], out.data_ptr(), torch.get_num_threads()
        )
        if failed:
            raise MemoryError("a quantised product could not get its scratch memory")
        return out

    def weight(self) -> torch.Tensor:
        """The weights as they are computed with, [out_features, in_features] float32."""
        return self.rows(range(self.struct.num_rows))

    def rows(self, indices: Sequence[int]) -> torch.Tensor:
        """Some of the weights' rows, [len(indices), in_features] float32."""
        rows = torch.empty(len(indices), self.struct.num_cols)
        address, matrix = rows.data_ptr(), byref(self.struct)
        stride = self.struct.num_cols * rows.element_size()
        for place, row in enumerate(indices):
            self._library.specgate_unpack_row(matrix, row, address + place * stride)
        return rows


@dataclass(frozen=True, slots=True)
class QuantLayer:
    """One decoder layer. Norm weights are float32."""

    attention_norm: torch.Tensor  # [hidden]
    mlp_norm: torch.Tensor  # [hidden]
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None  # [head_dim] each
    qkv: QuantLinear
    output: QuantLinear
    gate: QuantLinear
    up: QuantLinear
    down: QuantLinear

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        norms = (self.attention_norm, self.mlp_norm, *(self.qk_norms or ()))
        products = (self.qkv, self.output, self.gate, self.up, self.down)
        products_bytes = sum(product.num_bytes for product in products)
        return products_bytes + sum(int(norm.nbytes) for norm in norms)


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What the forward needs to know beside the weights."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


class NativeDecoder:
    """All layers of a Llama-like decoder as one call."""

    def __init__(
        self,
        library: ctypes.CDLL,
        sizes: DecoderSizes,
        *,
        embedding: QuantLinear,
        layers: Sequence[QuantLayer],
        norm: torch.Tensor,  # [hidden] float32
        frequencies: torch.Tensor,  # [head_dim / 2] float32
    ) -> None:
        self._library = library
        self._owned = (embedding, tuple(layers), norm, frequencies)  # the struct holds bare addresses
        self._layers = (DecoderLayer * len(layers))(*map(_layer_struct, layers))
        self._hidden = embedding.struct.num_cols
        self.struct = Decoder(
            layers=self._layers,
            frequencies=frequencies.data_ptr(),
            norm=norm.data_ptr(),
            embedding=embedding.struct,
            num_layers=len(layers),
            hidden=self._hidden,
            intermediate=layers[0].down.struct.num_cols,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            eps=sizes.rms_norm_eps,
        )

    def __call__(
        self,
        batch: ForwardBatch,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, [num_tokens, hidden] float32; writes the new K and V.

        inputs: [num_tokens, hidden] float32 in place of the tokens' embeddings.
        key_cache, value_cache: [num_layers, num_blocks, num_kv_heads, block_size, head_dim].
        """
        out = torch.empty(batch.token_ids.shape[0], self._hidden)
        if not len(out):
            return out
        ragged, _held = describe_batch(batch)
        token_ids = batch.token_ids.contiguous()
        if inputs is not None:
            inputs = inputs.to(torch.float32).contiguous()
        failed = self._library.specgate_decoder_forward(
            byref(self.struct),
            byref(ragged),
            token_ids.data_ptr(),
            None if inputs is None else inputs.data_ptr(),
            byref(kv_layer(key_cache[0], value_cache[0])),
            key_cache.stride(0) * key_cache.element_size(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("the decoder forward could not get its scratch memory")
        return out


def _layer_struct(layer: QuantLayer) -> DecoderLayer:
    query_norm, key_norm = layer.qk_norms or (None, None)
    return DecoderLayer(
        layer.attention_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        None if query_norm is None else query_norm.data_ptr(),
        None if key_norm is None else key_norm.data_ptr(),
        layer.qkv.struct,
        layer.output.struct,
        layer.gate.struct,
        layer.up.struct,
        layer.down.struct,
    )
