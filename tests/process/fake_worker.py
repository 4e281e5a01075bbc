"""A worker without torch: speaks `leto_elastic.wire` with its agent as a trainer or a shadow would, one line at a time.

Its "training" is a counter in its header segment; the ranks of an epoch meet in files of the run directory. Faults are
named by the environment: `FAKE_FAULT="<what> <rank>"`, each once per job; `FAKE_ALWAYS` likewise, every time.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from leto_elastic import wire
from leto_elastic.state.header import HEADER_BYTES, Header, Phase, Position

DEADLINE = 30.0


class Fake:
    """One process, from Hello to its end."""

    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(DEADLINE)
        self.sock.connect(os.environ["LETO_SOCKET"])
        wire.send(self.sock, wire.Hello(os.environ["LETO_TOKEN"], os.getpid()))
        message, self.fds = self.receive()
        assert isinstance(message, wire.Welcome)
        self.welcome = message
        self.rank = message.rank
        self.dir = Path(message.run_dir)
        self.marks: dict[str, float] = {}
        self.epoch = message.epoch

    def receive(self) -> tuple[wire.FromAgent, list[int]]:
        try:
            return wire.receive_from_agent(self.sock)
        except EOFError:
            sys.exit(113)

    def blob(self, data: bytes) -> int:
        fd = os.memfd_create("fake")
        os.write(fd, data)
        return fd

    def fault(self, what: str) -> None:
        """End here by SIGKILL if the environment says so, once per job."""
        for entry in os.environ.get("FAKE_ALWAYS", "").split(";"):
            if entry.split() == [what, str(self.rank)]:
                os.kill(os.getpid(), signal.SIGKILL)
        for entry in os.environ.get("FAKE_FAULT", "").split(";"):
            if entry.split() == [what, str(self.rank)]:
                try:
                    os.close(os.open(self.dir / f"fired.{what}.{self.rank}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)

    # ---- trainer

    def train(self) -> None:
        wire.send(self.sock, wire.Alloc("header", HEADER_BYTES))
        message, fds = self.receive()
        assert isinstance(message, wire.Segment), message
        self.header = Header(fds[0])
        self.header.initialise()
        wire.send(self.sock, wire.SetupRecord(6), [self.blob(b"record")])
        self.fault("setup")
        self.meet("train")
        self.header.position = Position(1, Phase.COMPUTE)
        wire.send(self.sock, wire.Manifest(0, 8), [self.blob(b"manifest")])
        wire.send(self.sock, wire.Committed(0, 1, "start", {}))
        self.loop()

    def loop(self) -> None:
        """Count a step every few milliseconds until told to finish, or the epoch is aborted."""
        while True:
            readable, _, _ = select.select([self.sock], [], [], 0.005)
            if readable:
                message, _ = self.receive()
                if isinstance(message, wire.Abort):
                    self.recover()
                    continue
                raise AssertionError(f"unexpected {message}")
            self.header.position = Position(self.header.position.step + 1, Phase.COMPUTE)
            if (self.dir / f"exit.{self.rank}").exists():
                (self.dir / f"exit.{self.rank}").unlink()
                wire.send(self.sock, wire.Failing(self.header.position.step, "told to"))
                sys.exit(3)
            if (self.dir / "finish").exists():
                wire.send(self.sock, wire.Finished(self.header.position.step))
                print(f"finished rank={self.rank}", flush=True)
                return

    def recover(self) -> None:
        """After an abort: wait for the plan, join its epoch, commit."""
        self.marks = {"abort": time.monotonic()}
        while True:
            message, _ = self.receive()
            if isinstance(message, wire.Plan) and self.join(message.epoch):
                return

    def join(self, epoch: int) -> bool:
        """Meet the others in an epoch and commit; False when it is aborted meanwhile."""
        self.epoch = epoch
        self.fault("rebuild")
        if not self.meet(f"epoch.{epoch}"):
            return False
        self.marks["rebuild"] = self.marks["resolve"] = self.marks["first_step"] = time.monotonic()
        self.header.epoch = epoch
        step = self.header.position.step + 1
        self.header.position = Position(step, Phase.COMPUTE)
        wire.send(self.sock, wire.Committed(epoch, step, "rerun", self.marks))
        return True

    def meet(self, what: str) -> bool:
        """A barrier of all ranks; False when `Abort` arrives first."""
        (self.dir / f"{what}.{self.rank}").touch()
        end = time.monotonic() + DEADLINE
        while not all((self.dir / f"{what}.{rank}").exists() for rank in range(self.welcome.world_size)):
            assert time.monotonic() < end, f"waited for {what}"
            readable, _, _ = select.select([self.sock], [], [], 0.002)
            if readable:
                message, _ = self.receive()
                if isinstance(message, wire.Abort):
                    return False
        return True

    # ---- shadow

    def shadow(self) -> None:
        assert os.pread(self.fds[0], 100, 0) == b"record"
        self.fault("starting")
        if os.environ.get("FAKE_UNFIT") == str(self.rank):
            wire.send(self.sock, wire.Unfit("told to"))
            return
        wire.send(self.sock, wire.Rehearsed())
        self.attach()
        wire.send(self.sock, wire.Ready())
        message, fds = self.receive()
        while isinstance(message, wire.Prepare):
            message, fds = self.receive()
        if isinstance(message, wire.Stop):
            return
        if isinstance(message, wire.Attach):
            raise AssertionError("nothing newer exists")
        assert isinstance(message, wire.Promote), message
        self.marks["attach"] = time.monotonic()
        self.fault("promoted")
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        print(f"promoted rank={self.rank} epoch={message.epoch} nice={os.nice(0)}", flush=True)
        if not self.join(message.epoch):
            self.recover()
        self.loop()

    def attach(self) -> None:
        message, fds = self.receive()
        assert isinstance(message, wire.Attach), message
        assert os.pread(fds[0], 100, 0) == b"manifest"
        assert message.names == ["header"]
        self.header = Header(fds[1])
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    fake = Fake()
    print(f"{fake.welcome.role} rank={fake.rank} pid={os.getpid()}", flush=True)
    if fake.welcome.role == "trainer":
        fake.train()
    else:
        fake.shadow()
