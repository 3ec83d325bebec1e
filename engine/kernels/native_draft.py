"""A draft head's greedy chains as one call into C: catch up, score, choose, embed, go on."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass

import torch

from engine.errors import InvalidLogits
from engine.kernels.native import KvLayer, kv_layer
from engine.kernels.native_decoder import Decoder, NativeDecoder, QuantLinear, QuantMatrix
from engine.kv.block_manager import BlockTable
from engine.kv.paged_cache import PagedCache


class DraftHeadStruct(ctypes.Structure):
    """draft_head in cpu/draft.h."""

    _fields_ = [
        ("layers", POINTER(Decoder)),
        ("fc", QuantMatrix),
        ("vocabulary", QuantMatrix),
        ("draft_token_ids", c_void_p),
        ("num_input_tokens", c_int64),
    ]


class DraftSequence(ctypes.Structure):
    """draft_sequence in cpu/draft.h."""

    _fields_ = [
        ("token_ids", c_void_p),
        ("hidden", c_void_p),
        ("blocks", c_void_p),
        ("start", c_int64),
        ("num_new", c_int64),
        ("num_draft", c_int64),
        ("truth", c_double),
        ("drafted", c_void_p),
        ("num_drafted", c_int64),
        ("reach", c_double),
        ("expected", c_double),
    ]


@dataclass(frozen=True, slots=True)
class ChainJob:
    """One sequence: its new entries, and how much is to be drafted after them.

    Entry i is made of tokens i and i + 1 of `token_ids` and of `hidden[i]`. `num_draft` 0: the entries
    are only computed. `truth`: what products of probabilities are worth in this sequence.
    """

    token_ids: Sequence[int]  # [num_new + 1]
    hidden: torch.Tensor  # [num_new, hidden] float32, contiguous
    block_table: BlockTable[int]
    start: int  # position of the first new entry
    num_draft: int
    truth: float = 1.0


@dataclass(frozen=True, slots=True)
class Chain:
    """What was drafted for one job: products of probabilities are those it was drawn from."""

    token_ids: tuple[int, ...]
    reach: float  # the last product
    expected: float  # their sum


def declare_draft(library: ctypes.CDLL) -> None:
    """State the signature of the function that `NativeDraftHead` uses."""
    library.specgate_draft_chains.argtypes = [
        POINTER(DraftHeadStruct),
        POINTER(DraftSequence),
        c_int64,
        c_double,
        POINTER(KvLayer),
        c_int64,
        c_void_p,
        c_int64,
    ]
    library.specgate_draft_chains.restype = c_int64


class NativeDraftHead:
    """A head's weights in the form the C code reads them."""

    def __init__(
        self,
        library: ctypes.CDLL,
        decoder: NativeDecoder,
        fc: QuantLinear,
        vocabulary: QuantLinear,
        draft_token_ids: Sequence[int],
    ) -> None:
        self._library = library
        ids = array("q", draft_token_ids)
        self._owned = (decoder, fc, vocabulary, ids)  # the struct holds bare addresses
        self._struct = DraftHeadStruct(
            layers=ctypes.pointer(decoder.struct),
            fc=fc.struct,
            vocabulary=vocabulary.struct,
            draft_token_ids=ids.buffer_info()[0],
            num_input_tokens=fc.struct.num_cols // fc.struct.num_rows - 1,
        )

    def __call__(
        self, jobs: Sequence[ChainJob], min_confidence: float, cache: PagedCache
    ) -> tuple[list[Chain], int, int]:
        """A chain for each job, sequential forwards, and the KV tokens they attended to.

        A chain ends before a token whose product of probabilities times `truth` is below
        `min_confidence`; 0: never. Raises InvalidLogits where scores are no numbers.
        """
        held = []  # arrays that C reads and writes
        sequences = (DraftSequence * len(jobs))()
        for sequence, job in zip(sequences, jobs, strict=True):
            token_ids, drafted = array("q", job.token_ids), array("q", bytes(8 * job.num_draft))
            held.append((token_ids, drafted))
            sequence.token_ids = token_ids.buffer_info()[0]
            sequence.hidden = job.hidden.data_ptr()
            sequence.blocks = job.block_table.buffer_info()[0]
            sequence.start = job.start
            sequence.num_new = len(token_ids) - 1
            sequence.num_draft = job.num_draft
            sequence.truth = job.truth
            sequence.drafted = drafted.buffer_info()[0]
        work = (c_int64 * 2)()
        key = cache.key
        failed = self._library.specgate_draft_chains(
            byref(self._struct),
            sequences,
            len(jobs),
            min_confidence,
            byref(kv_layer(key[0], cache.value[0])),
            key.stride(0) * key.element_size(),
            ctypes.addressof(work),
            torch.get_num_threads(),
        )
        if failed == -2:
            raise InvalidLogits("the draft head's scores are no numbers")
        if failed:
            raise MemoryError("the draft head could not get its scratch memory")
        chains = [
            Chain(tuple(drafted[: sequence.num_drafted]), sequence.reach, sequence.expected)
            for sequence, (_, drafted) in zip(sequences, held, strict=True)
        ]
        return chains, work[0], work[1]
