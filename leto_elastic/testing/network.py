"""Where the nodes of a cluster under test live: on the loopback interface, or on hosts of their own.

`Hosts` makes a network namespace for each node and one with a bridge, the switch that they are plugged into. Every
device is made inside these, so this machine's own network is not touched. What a host starts has a hostname, an
`/etc/hosts` with all hosts, and a `/dev/shm` of its own; files and process ids are shared, so tests see all.

A link is taken down at the switch: the host keeps its address and its connections, and nothing gets through any more,
without any reset. That is what a lost cable or a machine without power looks like to the others, and what killed
processes do not show, whose kernel still closes their connections.

Rejected: containers, which would need a container engine; dropping packets by netfilter, which needs modules and rules.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}

_SETTLE = """
mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && echo "$2" >/proc/sys/kernel/hostname || exit 1
shift 2
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A place for a node.

    Args:
        address: of the node, IPv4 or IPv6.
        launcher: what a command is appended to so that it runs there; it becomes the command by `exec`.
    """

    address: str
    launcher: tuple[str, ...] = ()

    def at(self, port: int) -> str:
        """`host:port`, with brackets around an IPv6 address."""
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"


class Network(Protocol):
    """Gives places to nodes, numbered from 0. The same number is the same machine again."""

    def place(self, number: int) -> Place:
        """The place with this number."""
        ...


class Loopback:
    """All nodes on 127.0.0.1, or with `apart` each on an address of its own out of 127/8. Needs no rights."""

    def __init__(self, *, apart: bool = True) -> None:
        self._apart = apart

    def place(self, number: int) -> Place:
        """The place with this number, of up to 250."""
        return Place(f"127.0.0.{number + 2}" if self._apart else "127.0.0.1")


class Hosts:
    """Hosts on a switch, from entering the context until it is left.

    Args:
        count: hosts, spares included.
        ipv6: give out addresses fd77::x instead of 10.77.0.x.

    Entering raises RuntimeError when this process may not make network namespaces, or there is no `ip`.
    """

    def __init__(self, count: int, *, ipv6: bool = False) -> None:
        self._count = count
        self._ipv6 = ipv6
        self._prefix = f"leto-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._switch = f"{self._prefix}-switch"
        self._cleanup = ExitStack()
        self._hosts_file = ""

    # ---- life

    def __enter__(self) -> Self:
        if (missing := why_no_hosts()) is not None:
            raise RuntimeError(f"cannot make hosts: {missing}")
        with self._cleanup:
            directory = self._cleanup.enter_context(tempfile.TemporaryDirectory())
            self._hosts_file = str(Path(directory, "hosts"))
            Path(self._hosts_file).write_text(self._names())
            self._make_switch()
            for number in range(self._count):
                self._make_host(number)
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def _make_switch(self) -> None:
        self._make_namespace(self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        self._plug_in(self._switch, "switch", 1)

    def _make_host(self, number: int) -> None:
        name, port = self._name(number), f"port{number}"
        self._make_namespace(name)
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
        self._plug_in(name, "eth0", number + 2)

    def _make_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._cleanup.callback(_ip, "netns", "del", name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _plug_in(self, namespace: str, device: str, number: int) -> None:
        """Addresses and link of a device. Nobody else has its IPv6 address, so nobody is asked (nodad)."""
        _ip("-n", namespace, "link", "set", device, "up")
        _ip("-n", namespace, "addr", "add", f"10.77.0.{number}/24", "dev", device)
        if self._ipv6:
            _ip("-n", namespace, "addr", "add", f"fd77::{number:x}/64", "dev", device, "nodad")

    def _names(self) -> str:
        named = [("127.0.0.1", "localhost")]
        named += [(self._address(number + 2), self._name(number)) for number in range(self._count)]
        return "".join(f"{address} {name}\n" for address, name in named)

    def _address(self, number: int) -> str:
        return f"fd77::{number:x}" if self._ipv6 else f"10.77.0.{number}"

    def _name(self, number: int) -> str:
        if not 0 <= number < self._count:
            raise ValueError(f"there is no host {number}, there are {self._count}")
        return f"{self._prefix}-h{number}"

    # ---- use

    def place(self, number: int) -> Place:
        """The host with this number; all that is started by one use of its launcher shares one /dev/shm."""
        name = self._name(number)
        settle = ("unshare", "--mount", "--uts", "sh", "-c", _SETTLE, "sh", self._hosts_file, name)
        return Place(self._address(number + 2), (*_inside(name), *settle))

    @property
    def switch(self) -> Place:
        """Where the switch is: a place for servers that no loss of a host may touch."""
        return Place(self._address(1), _inside(self._switch))

    def link_down(self, number: int) -> None:
        """Cut a host off from all others, silently. Its own loopback interface still works."""
        self._name(number)
        _ip("-n", self._switch, "link", "set", f"port{number}", "down")

    def link_up(self, number: int) -> None:
        """Plug it in again."""
        self._name(number)
        _ip("-n", self._switch, "link", "set", f"port{number}", "up")


def why_no_hosts() -> str | None:
    """The rights that this process lacks for `Hosts`, in words, or None."""
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = int(next(line for line in lines if line.startswith("CapEff:")).split()[1], 16)
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        return f"network namespaces need root's rights, missing are {', '.join(missing)}"
    return None


def _command_ip() -> str:
    found = shutil.which("ip", path=_PATH)
    if found is None:
        raise RuntimeError("there is no command `ip`, which makes network namespaces: install iproute2")
    return found


def _inside(namespace: str) -> tuple[str, ...]:
    return (_command_ip(), "netns", "exec", namespace)


def _ip(*arguments: str) -> None:
    done = subprocess.run([_command_ip(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
