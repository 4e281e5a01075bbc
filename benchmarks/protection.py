"""What protection costs, in one process.

    python benchmarks/protection.py coding [--rounds N]

`coding`: parity of a stripe, and its lost pieces from the rest, through `leto_elastic.protect` and by calls of ISA-L
alone on the same buffers, in turns with a memcpy of the data. GB/s of data (k pieces), medians, one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from leto_elastic.protect.buffers import Bytes, flat
from leto_elastic.protect.codec import decode, encode
from leto_elastic.protect.engines import open_engine
from leto_elastic.protect.field import Matrix
from leto_elastic.protect.library import find
from leto_elastic.protect.matrix import Code, decode_rows

CODES = (Code(8, 2), Code(3, 1), Code(2, 2))


def piece(size: int, seed: int | None = None) -> Bytes:
    """`size` bytes at the start of a page, as segments are, all touched; noise when there is a seed."""
    buffer = flat(mmap.mmap(-1, size))
    buffer[:] = 0 if seed is None else np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return buffer


def pointers(buffers: Sequence[Bytes]) -> ctypes.Array[ctypes.c_void_p]:
    """C's array of their addresses."""
    return (ctypes.c_void_p * len(buffers))(*[buffer.ctypes.data for buffer in buffers])


def bare(rows: Matrix, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> Callable[[], object]:
    """The call of ISA-L for the same work, with everything prepared that can be."""
    library = find()
    if library is None:
        raise SystemExit("ISA-L was not found")
    functions, size, (count, data) = library.functions, sources[0].size, rows.shape
    if count == 1 and (rows == 1).all():
        every = pointers([*sources, *targets])
        return lambda: functions.xor_gen(data + 1, size, every)
    tables = ctypes.create_string_buffer(32 * data * count)
    functions.ec_init_tables(data, count, rows.tobytes(), tables)
    from_, to = pointers(sources), pointers(targets)
    return lambda: functions.ec_encode_data(size, data, count, tables, from_, to)


def in_turns(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, one after the other `rounds` times.

    Each timed call follows one of the same work that is not timed: what is in the caches must not depend on whose turn
    it was before.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            work()
            began = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in taken.items()}


def measure(code: Code, size: int, rounds: int) -> dict[str, float]:
    """Median seconds of coding, ISA-L alone and memcpy for one code and one size of pieces, in bytes."""
    engine = open_engine("isal")
    data = [piece(size, seed) for seed in range(code.data)]
    parity, found, copies = (
        [piece(size) for _ in range(count)] for count in (code.parity, min(code.parity, code.data), code.data)
    )
    encode(engine, code, data, parity)
    lost = dict(enumerate(found))
    have = {number: buffer for number, buffer in enumerate([*data, *parity]) if number not in lost}
    used = sorted(have)[: code.data]
    rows = decode_rows(code.matrix, used, list(lost))
    times = in_turns(
        {
            "encode": lambda: encode(engine, code, data, parity),
            "encode alone": bare(code.parity_rows, data, parity),
            "decode": lambda: decode(engine, code, have, lost),
            "decode alone": bare(rows, [have[number] for number in used], found),
            "memcpy": lambda: [
                ctypes.memmove(to.ctypes.data, from_.ctypes.data, size) for to, from_ in zip(copies, data, strict=True)
            ],
        },
        rounds,
    )
    for number, buffer in lost.items():
        if not (buffer == data[number]).all():
            raise SystemExit(f"RS({code.data}, {code.parity}): piece {number} was not decoded")
    return times


def coding(args: argparse.Namespace) -> None:
    print("| code | piece, MiB | work | GB/s | ISA-L alone | ours / alone | memcpy | ours / memcpy |")
    print("|---|---|---|---|---|---|---|---|")
    for code in CODES:
        for mib in args.mib:
            size = mib << 20
            speed = {name: code.data * size / taken / 1e9 for name, taken in measure(code, size, args.rounds).items()}
            for work in ("encode", "decode"):
                ours, alone, copy = speed[work], speed[f"{work} alone"], speed["memcpy"]
                print(
                    f"| RS({code.data}, {code.parity}) | {mib} | {work} | {ours:.1f} | {alone:.1f} "
                    f"| {ours / alone:.2f} | {copy:.1f} | {ours / copy:.2f} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("coding", help="encode and decode against ISA-L alone and memcpy")
    command.add_argument("--rounds", type=int, default=15)
    command.add_argument("--mib", type=int, nargs="+", default=[4, 64], help="sizes of a piece")
    command.set_defaults(run=coding)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
