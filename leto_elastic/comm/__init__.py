"""Communicators: the process group whose inner group can be replaced, abort, loopback."""

from __future__ import annotations

from leto_elastic.comm.fabric import BACKEND, Fabric
from leto_elastic.comm.group import LetoGroup

__all__ = ["BACKEND", "Fabric", "LetoGroup"]
