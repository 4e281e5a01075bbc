"""An engine to check the others with: every product by reedsolo's `gf_mul`, byte after byte, no table of ours."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from leto_elastic.errors import ConfigError
from leto_elastic.protect.buffers import Bytes, BytesLike, operands
from leto_elastic.protect.field import POLYNOMIAL, Matrix


class ReedsoloEngine:
    """See `leto_elastic.protect.engines.Engine`. Warns when made. Raises ConfigError when reedsolo is not installed."""

    name = "reedsolo"

    def __init__(self) -> None:
        try:
            import reedsolo
        except ImportError as error:
            raise ConfigError("the engine 'reedsolo' needs its package: pip install leto-elastic[reedsolo]") from error
        self._reedsolo = reedsolo
        warnings.warn(
            "the engine 'reedsolo' is for checks: about 9,000 times slower than ISA-L (k=8, m=2)",
            RuntimeWarning,
            stacklevel=3,
        )

    def dot(self, coefficients: Matrix, sources: Sequence[BytesLike], targets: Sequence[BytesLike]) -> None:
        inputs, outputs, _ = operands(coefficients, sources, targets)
        for output in outputs:
            output[:] = 0
        self._add(coefficients, inputs, outputs)

    def update(self, column: Matrix, source: BytesLike, targets: Sequence[BytesLike]) -> None:
        coefficients = column.reshape(-1, 1)
        inputs, outputs, _ = operands(coefficients, [source], targets)
        self._add(coefficients, inputs, outputs)

    def _add(self, coefficients: Matrix, sources: list[Bytes], targets: list[Bytes]) -> None:
        """targets[i] ^= sum over j of coefficients[i, j] * sources[j]."""
        self._reedsolo.init_tables(POLYNOMIAL)  # globals of that module: another user may have set another field
        multiply = self._reedsolo.gf_mul
        for row, target in zip(coefficients.tolist(), targets, strict=True):
            for coefficient, source in zip(row, sources, strict=True):
                target ^= np.array([multiply(coefficient, byte) for byte in source.tolist()], dtype=np.uint8)
