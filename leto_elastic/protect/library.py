"""Finding ISA-L, Intel's storage library, which also has kernels for other processors.

The system's `libisal.so.2` comes first, then the copy in the wheel of pyeclib, which lies in `pyeclib.libs` next to the
package. pyeclib itself is not imported and its own interface not used: it copies, holds the GIL and is fifteen times
slower. Where the copy lies is a detail of that wheel, so a library counts only if it has every function that is used.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

SYSTEM = "libisal.so.2"
SYMBOLS = ("ec_init_tables", "ec_encode_data", "ec_encode_data_update", "xor_gen", "crc32_gzip_refl")


@dataclass(frozen=True, slots=True)
class Library:
    """ISA-L, loaded. Calls of `functions` release the GIL.

    Attributes:
        path: what was loaded.
        functions: the library; the functions of `SYMBOLS` have their types set.
    """

    path: str
    functions: ctypes.CDLL


def bundled() -> list[Path]:
    """Copies of ISA-L in the installed pyeclib's wheel; empty when there is none."""
    spec = importlib.util.find_spec("pyeclib")
    if spec is None or not spec.submodule_search_locations:
        return []
    packages = {Path(location).parent for location in spec.submodule_search_locations}
    return sorted(path for package in packages for path in (package / "pyeclib.libs").glob("libisal*.so*"))


def candidates() -> list[str]:
    """Names and paths to try, in order."""
    return [SYSTEM, *map(str, bundled())]


def load(path: str) -> Library | None:
    """The library at `path`; None when it cannot be loaded or lacks a function."""
    try:
        functions = ctypes.CDLL(path)
    except OSError:
        return None
    if not all(hasattr(functions, symbol) for symbol in SYMBOLS):
        return None
    number, pointer = ctypes.c_int, ctypes.c_void_p
    for symbol, arguments, result in (
        ("ec_init_tables", [number, number, pointer, pointer], None),
        ("ec_encode_data", [number, number, number, pointer, pointer, pointer], None),
        ("ec_encode_data_update", [number, number, number, number, pointer, pointer, pointer], None),
        ("xor_gen", [number, number, pointer], number),
        ("crc32_gzip_refl", [ctypes.c_uint32, pointer, ctypes.c_uint64], ctypes.c_uint32),
    ):
        function = getattr(functions, symbol)
        function.argtypes = arguments
        function.restype = result
    return Library(path, functions)


@functools.cache
def find() -> Library | None:
    """The first library that will do; None when there is none."""
    return next((library for library in map(load, candidates()) if library is not None), None)
