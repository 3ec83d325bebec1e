"""Noise that is a function of (seed, position) only, whatever the batch, policy or device.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) with
key = the seed's low and high word and counter = (block, position, salt, stream). One block gives
four words: token t takes word t % 4 of block t // 4. Two streams never share a number.

The integers are the same on every device. The logarithms that turn them into Gumbel noise are
float32 and may differ in the last bit between devices, as the target's logits do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.kernels.native_noise import philox_rows

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10

_GUMBEL_STREAM = 0
_UNIFORM_STREAM = 1

_PIECE = 4096
"""Blocks computed at a time on the CPU, so that the work arrays stay in cache."""

Words = tuple[int, int, int, int]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """One Philox4x32-10 block in plain integers: the definition the array versions follow."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


@dataclass(frozen=True, slots=True)
class RandomKey:
    """The randomness of one sequence. `position` is always the index of the token to be decided
    in the sequence (prompt included), below 2**32.

    Any integer is a seed; it is taken modulo 2**64. `salt` separates families of noise that must
    be independent of each other; see `for_draft`.
    """

    seed: int
    is_seeded: bool = False  # the keyed rule applies throughout, as where the caller gave the seed
    salt: int = 0

    def gumbel(self, position: int, vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Standard Gumbel noise for every token id: [vocab_size] float32."""
        return gumbel_rows([self], [position], vocab_size, device)[0]

    def gumbel_of(self, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """`gumbel(position, ...)[token_ids]` without computing the rest: [num] float32."""
        return gumbel_of([self], [position], [token_ids])[0]

    def uniform(self, position: int, num: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """`num` numbers in [0, 1) for acceptance tests at `position`: [num] float64, 53 bits each."""
        numbers = torch.tensor([self._uniform(position, i) for i in range(num)], dtype=torch.float64)
        return numbers.to(device)

    def _uniform(self, position: int, index: int) -> float:
        counter = (index // 2, position, self.salt, _UNIFORM_STREAM)
        words = philox4x32(counter, _key_words(self))
        high, low = words[:2] if index % 2 == 0 else words[2:]
        return float((high >> 5) * 2**26 + (low >> 6)) / 2**53

    def for_draft(self, root: int) -> RandomKey:
        """The noise a drafter draws with, where `root` is the index of the first drafted token.

        A seeded sequence drafts with the very noise the target will use, so that both agree as
        often as they can. An unseeded one must not: the ratio and block rules need drafts that
        are independent of everything decided before, and the block rule looks at drafts past the
        refusal, so every step drafts with noise of its own.
        """
        return self if self.is_seeded else replace(self, salt=root + 1)


def gumbel_rows(
    keys: Sequence[RandomKey],
    positions: Sequence[int],
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Row i is `keys[i].gumbel(positions[i], vocab_size)`: [num_rows, vocab_size] float32."""
    num_blocks = (vocab_size + 3) // 4
    rows = counter_rows(keys, positions).T
    if torch.device(device).type == "cpu":
        words = philox_rows(rows.T, num_blocks)
        if words is None:
            words = torch.from_numpy(_words_by_row(num_blocks, rows))
    else:
        columns = torch.from_numpy(rows.astype(np.int64)).to(device)[:, :, None]  # [5, num_rows, 1]
        blocks = torch.arange(num_blocks, device=device)[None, :]
        words = torch.stack(_philox_torch(blocks, columns), dim=-1).float()
    return _to_gumbel(words.flatten(1)[:, :vocab_size])


def gumbel_of(
    keys: Sequence[RandomKey], positions: Sequence[int], token_ids: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """`keys[i].gumbel(positions[i], ...)[token_ids[i]]` for every i, all in one go."""
    lengths = [len(ids) for ids in token_ids]
    device = token_ids[0].device
    ids = torch.cat(list(token_ids)).cpu().numpy()
    rows = np.repeat(counter_rows(keys, positions).T, lengths, axis=1)  # [5, num]
    words = np.stack(_philox_numpy(ids // 4, rows), axis=-1)[np.arange(len(ids)), ids % 4]
    noise = _to_gumbel(torch.from_numpy(words.astype(np.float32)))
    return list(torch.split(noise.to(device), lengths))


def _key_words(key: RandomKey) -> tuple[int, int]:
    return key.seed & _WORD, (key.seed >> 32) & _WORD


def counter_rows(keys: Sequence[RandomKey], positions: Sequence[int]) -> np.ndarray:
    """Where each row's Gumbel noise is counted from: position, salt, stream, key low, key high,
    [num_rows, 5] uint64."""
    rows = [
        (position, key.salt, _GUMBEL_STREAM, *_key_words(key))
        for key, position in zip(keys, positions, strict=True)
    ]
    return np.array(rows, dtype=np.uint64).reshape(-1, 5)


def _words_by_row(num_blocks: int, rows: np.ndarray) -> np.ndarray:
    """The first words of every row, [num_rows, num_blocks, 4] float32, in pieces that stay in cache.

    Float32 suffices: small words decide, and their relative precision is kept.
    """
    result = np.empty((rows.shape[1], num_blocks, 4), dtype=np.float32)
    num_rows = max(1, _PIECE // num_blocks)
    for first_row in range(0, rows.shape[1], num_rows):
        some = rows[:, first_row : first_row + num_rows, None]
        for first in range(0, num_blocks, _PIECE):
            blocks = np.arange(first, min(first + _PIECE, num_blocks))[None, :]
            piece = result[first_row : first_row + num_rows, first : first + _PIECE]
            for lane, words in enumerate(_philox_numpy(blocks, some)):
                piece[:, :, lane] = words
    return result


def _philox_numpy(blocks: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Philox over blocks that broadcast with each of `rows` (`counter_rows` transposed): uint64 each."""
    shape = np.broadcast_shapes(blocks.shape, rows.shape[1:])
    c0 = np.empty(shape, dtype=np.uint64)
    c0[...] = blocks
    c1, c2, c3, k0, k1 = rows
    c2 = np.broadcast_to(c2, shape).copy()
    for _ in range(_ROUNDS):
        p0 = c0 * np.uint64(_MULTIPLIER_0)
        p1 = c2 * np.uint64(_MULTIPLIER_1)
        np.right_shift(p1, np.uint64(32), out=c0)
        c0 ^= c1
        c0 ^= k0
        np.right_shift(p0, np.uint64(32), out=c2)
        c2 ^= c3
        c2 ^= k1
        c1 = np.bitwise_and(p1, np.uint64(_WORD), out=p1)
        c3 = np.bitwise_and(p0, np.uint64(_WORD), out=p0)
        k0 = (k0 + np.uint64(_WEYL_0)) & np.uint64(_WORD)
        k1 = (k1 + np.uint64(_WEYL_1)) & np.uint64(_WORD)
    return c0, c1, c2, c3


def _philox_torch(blocks: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `_philox_numpy` in int64: products wrap, but their 64 bits are right, and masks restore
    the words."""
    c1, c2, c3, k0, k1 = rows
    c0, c2 = blocks + torch.zeros_like(c2), c2 + torch.zeros_like(blocks)  # both of full shape
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def _to_gumbel(words: torch.Tensor) -> torch.Tensor:
    """Words (float32, in [0, 2**32]) to -log(-log(1 - v)) with v = (word + 1/2) / 2**32, in place.

    Taking 1 - v keeps full precision where it decides: large noise comes from small v. The clamp
    (v below 1) touches only noise near the minimum.
    """
    negative_v = words.mul_(-(2.0**-32)).sub_(2.0**-33).clamp_(min=2.0**-24 - 1.0)
    return negative_v.log1p_().neg_().log_().neg_()
