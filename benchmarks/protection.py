"""What protection costs.

    python benchmarks/protection.py coding [--rounds N]
    python benchmarks/protection.py steps [--size small] [--parallel fsdp] [--rounds N]

`coding`, in one process: parity of a stripe, and its lost pieces from the rest, through `leto_elastic.protect` and by
calls of ISA-L alone on the same buffers, in turns with a memcpy of the data. GB/s of data (k pieces), medians, one
thread.

`steps`: jobs of four nodes on this machine that differ only in `protect.global`, in turns: never (parity 0), every ten
steps, every step. Step times are rank 0's, after the shadows are parked. CPU seconds are those of all processes over
the measured steps; where cores are fewer than processes they show in the step times in full, so the bytes that a
network would carry stand beside them: what the code sends by its design, and what went over the loopback interface more
than without protection. An agent's own memory is the anonymous part; the trainers' segments, which it maps, are not.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jobs import table
from leto_elastic.protect.buffers import Bytes, flat
from leto_elastic.protect.codec import decode, encode
from leto_elastic.protect.engines import open_engine
from leto_elastic.protect.field import Matrix
from leto_elastic.protect.library import find
from leto_elastic.protect.matrix import Code, decode_rows
from nodes import Nodes

MIB = float(1 << 20)
TICKS = os.sysconf("SC_CLK_TCK")

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


# ---- jobs with and without


class Meter(NamedTuple):
    """Sums since the start: CPU seconds of agents, trainers, standbys and etcd, bytes over the loopback interface."""

    agents: float
    trainers: float
    standbys: float
    etcd: float
    sent: float


class Sample(NamedTuple):
    """One job: seconds a step (median, mean), the meter a step, and bytes.

    Bytes are the mean of the agents' anonymous memory and PSS, the stream and the extras of a rank.
    """

    median: float
    mean: float
    meter: Meter
    anonymous: float
    pss: float
    stream: float
    extras: float


def cpu(pids: set[int]) -> float:
    """CPU seconds that these processes have used; those that are gone count nothing."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def children() -> set[int]:
    """Processes that this one has started."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid():
            found.add(int(entry.parent.name))
    return found


def read_meter(job: Nodes) -> Meter:
    """All sums now."""
    agents = {node.pid for node in job.living()}
    trainers = set(job.trainers())
    everything = {pid for node in job.living() for pid, _ in node.processes()}
    lines = Path("/proc/net/dev").read_text().splitlines()
    loopback = next(line for line in lines if line.split(":")[0].strip() == "lo").split(":")[1].split()
    return Meter(
        cpu(agents), cpu(trainers), cpu(everything - agents - trainers), cpu(children() - agents), float(loopback[0])
    )


def memory(pid: int) -> tuple[int, int]:
    """(anonymous, all) bytes of a process, pages that it shares counted in part."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = {words[0]: int(words[1]) * 1024 for line in text.splitlines() if (words := line.split())[-1:] == ["kB"]}
    return fields["Pss_Anon:"], fields["Pss:"]


def extras_of(pid: int) -> int:
    """Bytes of X of a trainer, from its segment: three buffers, each of which begins with a length."""
    found = {
        link.readlink().name: link for link in Path(f"/proc/{pid}/fd").iterdir() if "-extras" in str(link.readlink())
    }
    newest = found[max(found)]
    return int(struct.unpack("<Q", newest.open("rb").read(8))[0])


def step_job(every: int, args: argparse.Namespace, directory: Path) -> Sample:
    """Run one job and take its figures while it trains; `every` 0 protects nothing."""
    options = [f"--parallel={args.parallel}", f"--size={args.size}", "--steps=1000000"]
    setting = {"every": every, "buffers": args.buffers, "data": args.code[0], "parity": args.code[1]}
    policy: dict[str, Any] = {"protect": {"global": setting if every else {"parity": 0}}}
    with Nodes("leto", "examples/train_lm.py", options, directory, nodes=args.nodes, policy=policy) as job:
        job.wait_for_steps(args.warmup, seconds=600.0)
        job.settle()
        job.wait_for_steps(2 * every)
        first, before = len(job.steps()[0]), read_meter(job)
        job.wait_for_steps(args.steps, seconds=1200.0)
        records, after = job.steps()[0][first:], read_meter(job)
        times = [b.end - a.end for a, b in itertools.pairwise(records)]
        agents = [memory(node.pid) for node in job.living()]
        return Sample(
            statistics.median(times),
            statistics.mean(times),
            Meter(*((b - a) / len(records) for a, b in zip(before, after, strict=True))),
            statistics.mean(anonymous for anonymous, _ in agents),
            statistics.mean(pss for _, pss in agents),
            statistics.mean(shard.bytes for shard in job.shards()) if every else 0.0,
            statistics.mean(extras_of(pid) for pid in job.trainers()),
        )


def steps(args: argparse.Namespace) -> None:
    kinds = [0, *args.every]
    rounds: list[dict[int, Sample]] = []
    with tempfile.TemporaryDirectory() as work:
        for index in range(args.rounds):
            turn = index % len(kinds)
            found = {
                every: step_job(every, args, Path(work) / f"{index}-{every}") for every in kinds[turn:] + kinds[:turn]
            }
            rounds.append(found)
            medians = {name(every): f"{found[every].median * 1000:.1f} ms" for every in kinds}
            print(f"round {index + 1}/{args.rounds}: {medians}", flush=True)
    report(kinds, rounds, args)
    costs(kinds, rounds, args)


def name(every: int) -> str:
    return f"every {every}" if every else "off"


def report(kinds: list[int], rounds: list[dict[int, Sample]], args: argparse.Namespace) -> None:
    """Medians over the rounds, and medians of the rounds' ratios."""

    def middle(value: Callable[[dict[int, Sample]], float]) -> float:
        return statistics.median(value(found) for found in rounds)

    rows = []
    for every in kinds:
        row = [name(every)]
        for field in ("median", "mean"):
            row.append(f"{middle(lambda r, e=every, f=field: getattr(r[e], f)) * 1000:.1f}")
            row.append(f"{middle(lambda r, e=every, f=field: getattr(r[e], f) / getattr(r[0], f)):.3f}")
        for part in ("agents", "trainers", "standbys", "etcd"):
            row.append(f"{middle(lambda r, e=every, p=part: getattr(r[e].meter, p)) * 1000:.1f}")
        row.append(f"{middle(lambda r, e=every: (r[e].meter.sent - r[0].meter.sent) / MIB):.2f}")
        rows.append(row)
    header = ["protection", "step, median ms", "/ off", "mean ms", "/ off"]
    header += ["CPU ms a step: agents", "trainers", "standbys", "etcd", "MiB a step over lo, more"]
    shape = (
        f"{args.parallel}, {args.size}, {args.nodes} nodes of 1 rank on {os.cpu_count()} cores, buffers {args.buffers}"
    )
    print(f"\n{shape}, {len(rounds)} rounds of {args.steps} steps\n")
    print(table(header, rows))


def costs(kinds: list[int], rounds: list[dict[int, Sample]], args: argparse.Namespace) -> None:
    """What the code has to send and to keep by its design, and what agents hold."""

    def middle(value: Callable[[dict[int, Sample]], float]) -> float:
        return statistics.median(value(found) for found in rounds)

    data, parity = args.code
    for every in kinds[1:]:
        stream, extras = (middle(lambda r, e=every, f=field: getattr(r[e], f)) for field in ("stream", "extras"))
        coded = 0.0 if args.parallel == "ddp" else stream * parity  # replicas on other nodes are copies of each other
        a_version = coded + extras * parity
        a_step = a_version / every + extras * parity
        more = middle(lambda r, e=every: r[e].anonymous - r[0].anonymous)
        pss = middle(lambda r, e=every: r[e].pss - r[0].pss)
        print(
            f"\n{name(every)}: W {stream / MIB:.2f} MiB and X {extras / 1024:.1f} KiB a rank, RS({data}, {parity}); "
            f"a rank sends {a_version / MIB:.2f} MiB a version and {a_step / MIB:.2f} MiB a step, "
            f"{args.nodes * a_step / MIB:.2f} MiB all together; a version takes "
            f"{a_version / (args.network * 1e9) * 1e3:.3f} ms at {args.network:g} GB/s\n"
            f"an agent holds {more / MIB:+.2f} MiB of its own (PSS {pss / MIB:+.2f}); "
            f"a parity of {parity}/{data} W is {coded / data / MIB:.2f} MiB, two versions {2 * coded / data / MIB:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("coding", help="encode and decode against ISA-L alone and memcpy")
    command.add_argument("--rounds", type=int, default=15)
    command.add_argument("--mib", type=int, nargs="+", default=[4, 64], help="sizes of a piece")
    command.set_defaults(run=coding)
    command = commands.add_parser("steps", help="jobs of several nodes with and without")
    command.add_argument("--parallel", choices=["ddp", "fsdp"], default="fsdp")
    command.add_argument("--size", default="small")
    command.add_argument("--nodes", type=int, default=4)
    command.add_argument("--code", type=int, nargs=2, default=(3, 1), metavar=("DATA", "PARITY"))
    command.add_argument("--buffers", type=int, choices=[1, 2], default=1)
    command.add_argument("--every", type=int, nargs="+", default=[10, 1])
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--steps", type=int, default=100, help="measured steps a job")
    command.add_argument("--warmup", type=int, default=20, help="steps before")
    command.add_argument("--network", type=float, default=25.0, help="GB/s of a node's network")
    command.set_defaults(run=steps)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
