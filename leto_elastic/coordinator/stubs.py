"""The one place that imports etcd3aio and grpc.

etcd3aio puts the directory of its generated modules in front of `sys.path`, where its `etcd` and `google` would hide
other packages of these names for the whole process; it is taken out again here. grpc would print its own lines about
failed handshakes on the terminal; what the user needs to know is in our errors.

Import this only in the agent: a process that forks must not have a live gRPC client.
"""

from __future__ import annotations

import os
import sys


def _quietly() -> None:
    path, verbosity = list(sys.path), os.environ.get("GRPC_VERBOSITY")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        import etcd3aio  # noqa: F401 - for its effect on sys.path, which ends here
    finally:
        sys.path[:] = path
        if verbosity is None:
            del os.environ["GRPC_VERBOSITY"]


_quietly()

import grpc  # type: ignore[import-untyped]  # noqa: E402
import grpc.aio  # type: ignore[import-untyped]  # noqa: E402
from etcd3aio import EtcdError, EtcdPermissionDeniedError, EtcdUnauthenticatedError, prefix_range_end  # noqa: E402
from etcd3aio._protobuf import (  # noqa: E402
    Compare,
    RequestOp,
    WatchCreateRequest,
    WatchRequest,
    WatchResponse,
    WatchStub,
)
from etcd3aio.auth import AuthService  # noqa: E402
from etcd3aio.kv import KVService  # noqa: E402
from etcd3aio.lease import LeaseService  # noqa: E402

__all__ = [
    "AuthService",
    "Compare",
    "EtcdError",
    "EtcdPermissionDeniedError",
    "EtcdUnauthenticatedError",
    "KVService",
    "LeaseService",
    "RequestOp",
    "WatchCreateRequest",
    "WatchRequest",
    "WatchResponse",
    "WatchStub",
    "grpc",
    "prefix_range_end",
]
