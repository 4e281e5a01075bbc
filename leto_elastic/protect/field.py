"""GF(2^8) over x^8 + x^4 + x^3 + x^2 + 1 (0x11d), generator 2: the field of ISA-L and of RAID 6.

Addition is XOR. Multiplication is a table of 64 KiB, `PRODUCTS[a, b]`; `INVERSES[a]` is 1/a, and 0 for 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.uint8]

POLYNOMIAL = 0x11D
ORDER = 256


def _powers() -> list[int]:
    """The 255 powers of the generator."""
    powers, value = [], 1
    for _ in range(ORDER - 1):
        powers.append(value)
        value <<= 1
        if value & ORDER:
            value ^= POLYNOMIAL
    return powers


def _build() -> tuple[Matrix, Matrix]:
    """The table of products, (256, 256) uint8, and of inverses, (256,) uint8, both read-only."""
    exp = np.array(_powers(), dtype=np.uint8)
    log = np.zeros(ORDER, dtype=np.int64)
    log[exp] = np.arange(ORDER - 1)
    products = exp[(log[:, None] + log[None, :]) % (ORDER - 1)]
    products[0, :] = products[:, 0] = 0
    inverses = exp[-log % (ORDER - 1)]
    inverses[0] = 0
    products.flags.writeable = inverses.flags.writeable = False
    return products, inverses


PRODUCTS, INVERSES = _build()


def multiply(left: Matrix, right: Matrix) -> Matrix:
    """The product of an (a, b) and a (b, c) matrix over the field: (a, c) uint8."""
    terms = PRODUCTS[left[:, :, None], right[None, :, :]]
    product: Matrix = np.bitwise_xor.reduce(terms, axis=1)
    return product
