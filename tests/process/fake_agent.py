"""A stand-in for torchrun as one node of a cluster: it writes events and runs the code that is its last argument."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

from leto_elastic.observe.events import EventLog

PORT = 4000

options = dict(argument[2:].split("=", 1) for argument in sys.argv[1:-1] if argument.startswith("--"))
conf = dict(pair.split("=", 1) for pair in options["rdzv-conf"].split(","))
address = options["local-addr"]
run_dir = Path(conf["run_dir"])
log = EventLog(run_dir / f"events.{address.replace(':', '-')}.jsonl")


def started(rank: int, process: subprocess.Popen[bytes]) -> None:
    """Say that a process trains this rank."""
    log.write("worker_started", role="trainer", rank=rank, slot=0, pid=process.pid)


def serve() -> None:
    """Greet whoever connects, for ever."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, PORT), family=family) as server:
        log.write("run_started", run_id=options["rdzv-id"], world_size=1)
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(f"{address} {socket.gethostname()}".encode())


def until_told(name: str = "go") -> None:
    """Until the test has made this pipe and closed it again."""
    (run_dir / name).read_bytes()


def for_ever() -> None:
    """Until a signal ends this process."""
    while True:
        signal.pause()


exec(sys.argv[-1])
