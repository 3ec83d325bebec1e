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

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10

_GUMBEL_STREAM = 0
_UNIFORM_STREAM = 1

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
    is_seeded: bool = False  # the caller gave the seed: the keyed rule applies throughout
    salt: int = 0

    def gumbel(self, position: int, vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Standard Gumbel noise for every token id: [vocab_size] float32."""
        return gumbel_rows([self], [position], vocab_size, device)[0]

    def gumbel_of(self, position: int, token_ids: torch.Tensor) -> torch.Tensor:
        """`gumbel(position, ...)[token_ids]` without computing the rest: [num] float32."""
        blocks = token_ids // 4
        words = _words(blocks[None, :], [self], [position], _GUMBEL_STREAM)[0]
        return _to_gumbel(words.gather(1, (token_ids % 4)[:, None])[:, 0])

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
    blocks = torch.arange((vocab_size + 3) // 4, device=device)[None, :]
    words = _words(blocks, keys, positions, _GUMBEL_STREAM)
    return _to_gumbel(words.flatten(1)[:, :vocab_size])


def _key_words(key: RandomKey) -> tuple[int, int]:
    return key.seed & _WORD, (key.seed >> 32) & _WORD


def _words(
    blocks: torch.Tensor, keys: Sequence[RandomKey], positions: Sequence[int], stream: int
) -> torch.Tensor:
    """Words of the given blocks, [num_rows, num_blocks, 4] float32, rounded from 32 bits.

    `blocks` is [1, num_blocks] int64. Float32 suffices: what matters is the relative precision of
    small words, and those are exact.
    """
    if blocks.device.type == "cpu":
        result = np.empty((len(keys), blocks.shape[1], 4), dtype=np.float32)
        for row, (key, position) in enumerate(zip(keys, positions, strict=True)):
            _philox_numpy(blocks[0].numpy(), (position, key.salt, stream), _key_words(key), result[row])
        return torch.from_numpy(result)
    return torch.stack(_philox_torch(blocks, keys, positions, stream), dim=-1).float()


def _philox_numpy(
    blocks: np.ndarray, upper_counter: tuple[int, int, int], key: tuple[int, int], out: np.ndarray
) -> None:
    """Philox over `blocks` [num_blocks] into `out` [num_blocks, 4], in pieces that stay in cache."""
    piece = 4096
    for start in range(0, len(blocks), piece):
        c0 = blocks[start : start + piece].astype(np.uint64)
        c1, c2, c3 = (np.full_like(c0, word) for word in upper_counter)
        k0, k1 = key
        for _ in range(_ROUNDS):
            p0 = c0 * np.uint64(_MULTIPLIER_0)
            p1 = c2 * np.uint64(_MULTIPLIER_1)
            c0 = np.right_shift(p1, np.uint64(32), out=c0)
            c0 ^= c1
            c0 ^= np.uint64(k0)
            c2 = np.right_shift(p0, np.uint64(32), out=c2)
            c2 ^= c3
            c2 ^= np.uint64(k1)
            c1 = np.bitwise_and(p1, np.uint64(_WORD), out=p1)
            c3 = np.bitwise_and(p0, np.uint64(_WORD), out=p0)
            k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
        rows = out[start : start + piece]
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = c0, c1, c2, c3


def _philox_torch(
    blocks: torch.Tensor, keys: Sequence[RandomKey], positions: Sequence[int], stream: int
) -> tuple[torch.Tensor, ...]:
    """Philox in int64: products wrap, but their 64 bits are right, and masks restore the words."""

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, device=blocks.device)[:, None]

    c0 = blocks.expand(len(keys), -1)
    c1, c2 = column(positions), column([key.salt for key in keys])
    c3 = torch.full_like(c1, stream)
    k0 = column([_key_words(key)[0] for key in keys])
    k1 = column([_key_words(key)[1] for key in keys])
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD
        c2, c3 = ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1.expand_as(c0), c2, c3.expand_as(c0)


def _to_gumbel(words: torch.Tensor) -> torch.Tensor:
    """Words (float32, in [0, 2**32]) to -log(-log(1 - v)) with v = (word + 1/2) / 2**32.

    Taking 1 - v keeps full precision where it decides: large noise comes from small v. The clamp
    (v below 1) touches only noise near the minimum.
    """
    v = words.add(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
