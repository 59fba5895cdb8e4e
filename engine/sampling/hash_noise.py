"""Sampling noise as a pure function of (seed, position, token id).

No generator state: the noise of a token doesn't depend on the batch, the row, the replica or the
parallel layout, so a request resumed elsewhere draws what it would have drawn.

The Gumbel-max trick, argmax(logit + G), is used in its exponential form: with u uniform, E =
-log(u) and G = -log(E) it is argmax(p / E). That saves one logarithm per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
SPLITMIX_A = 0xBF58476D1CE4E5B9
SPLITMIX_B = 0x94D049BB133111EB
GOLDEN32 = 0x9E3779B1
LOWBIAS_A = 0x7FEB352D
LOWBIAS_B = 0x846CA68B
ODD_NEGATIVE = -(1 << 31) + 1
# A little less than 2**-31, so that u stays below 1 although float32 rounds 2**31 - 1 to 2**31.
SCALE = -(1.0 - 2.0**-24) * 2.0**-31


def mix_seed(seed: int) -> int:
    """Hash of a request's seed, a signed 64-bit number; part of its row keys.

    Without it, seeds a certain constant apart would give the same noise one position apart.
    """
    z = (seed + GOLDEN64) & _MASK64
    z = ((z ^ (z >> 30)) * SPLITMIX_A) & _MASK64
    z = ((z ^ (z >> 27)) * SPLITMIX_B) & _MASK64
    return signed(z ^ (z >> 31), 64)


class HashNoise:
    """Noise for the tokens of one vocabulary on one device.

    Two stages. (seed, position) is hashed to a row key of 64 bits with splitmix64's finaliser
    (Steele, Lea and Flood 2014). Each token id is hashed under that key with lowbias32 (C. Wellons,
    "hash-prospector", 2018): 32 bits of the key enter before its first multiplication and 32 after
    it. Its lanes have 32 bits, because 64-bit ones take three times the time on a CPU. Both stages
    run on signed tensors whose multiplication wraps; shifts are arithmetic. Integer operations,
    conversion to float and one multiplication are exact or correctly rounded, so uniforms are
    bit-identical on every device.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        # Constants are tensors: torch takes 3 us at every use to wrap a Python number.
        def i64(value: int) -> Tensor:
            return torch.tensor(signed(value, 64), dtype=torch.int64, device=device)

        def i32(value: int) -> Tensor:
            return torch.tensor(value, dtype=torch.int32, device=device)

        self._golden = i64(GOLDEN64)
        self._key_rounds = ((i64(30), i64(SPLITMIX_A)), (i64(27), i64(SPLITMIX_B)))
        self._key_shift = i64(31)
        self._shift_a, self._multiplier_a = i32(16), i32(LOWBIAS_A)
        self._shift_b, self._multiplier_b = i32(15), i32(signed(LOWBIAS_B, 32))
        self._odd_negative = i32(ODD_NEGATIVE)
        self._scale = torch.tensor(SCALE, dtype=torch.float32, device=device)
        # Token ids enter the hash as distinct 31-bit numbers. The sign bit is zero because an
        # arithmetic xor-shift maps x and ~x to the same number: two tokens whose codes were each
        # other's complement would always share their noise.
        ids = torch.arange(vocab_size, dtype=torch.int64, device=device)
        self._codes = ((ids * GOLDEN32) & 0x7FFFFFFF).to(torch.int32)

    def row_keys(self, mixed_seeds: Tensor, positions: Tensor) -> Tensor:
        """Keys int32 [n, 2] of rows with `mixed_seeds` int64 [n] (`mix_seed`) at `positions`.

        `positions` int64 [n]: index of the token to be drawn, counted from the prompt's first.
        """
        z = positions * self._golden
        z.add_(mixed_seeds)
        for shift, multiplier in self._key_rounds:
            z.bitwise_xor_(z >> shift).mul_(multiplier)
        z.bitwise_xor_(z >> self._key_shift)
        return z.view(torch.int32).view(-1, 2)

    def uniform(self, keys: Tensor, token_ids: Tensor | None, work: Tensor) -> Tensor:
        """u float32 [n, m], uniform in (0, 1), of `token_ids` under `keys` [n, 2].

        `token_ids` int64 [m] or [n, m]; None for the whole vocabulary. `work` int32 [2, n, m] is
        overwritten and its second half becomes the result. u is an odd multiple of 2**-31 rounded
        to float32: at least 2**-31, at most 1 - 2**-24.
        """
        codes = self._codes if token_ids is None else self._codes[token_ids]
        x, shifted = work[0], work[1]
        torch.bitwise_xor(codes, keys[:, 0:1], out=x)
        torch.bitwise_right_shift(x, self._shift_a, out=shifted)
        x.bitwise_xor_(shifted).mul_(self._multiplier_a)
        x.bitwise_xor_(keys[:, 1:2])
        torch.bitwise_right_shift(x, self._shift_b, out=shifted)
        x.bitwise_xor_(shifted).mul_(self._multiplier_b)
        # lowbias32's last xor-shift is left out: it leaves the high half as it is. Setting the
        # sign and the lowest bit makes a negative odd number, so u is never 0.
        x.bitwise_or_(self._odd_negative)
        return shifted.view(torch.float32).copy_(x).mul_(self._scale)

    def minus_exponential(self, keys: Tensor, token_ids: Tensor | None, work: Tensor) -> Tensor:
        """-E float32 [n, m], E exponential with mean 1; arguments of `uniform`.

        E lies in [2**-24, 21.5]. The logarithm's last place may differ between devices.
        """
        return self.uniform(keys, token_ids, work).log_()


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
