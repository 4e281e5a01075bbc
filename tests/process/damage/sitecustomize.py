"""Damage inside an agent, on a test's command: Python imports this at its start when the folder is in PYTHONPATH.

SIGRTMIN+1: change a bit of every parity piece that the keeper holds, as bad memory would. SIGRTMIN+2: change a bit of
the next chunk that it sends, after its checksum was made, as a bad wire would.
"""

from __future__ import annotations

import gc
import signal
import sys
from typing import Any


def _pieces(*_: object) -> None:
    store = sys.modules["leto_elastic.protect.store"]
    held = [one for one in gc.get_objects() if type(one) is store._Piece]
    for piece in held:
        piece.data[piece.size // 2] ^= 4
    print(f"{len(held)} pieces are damaged", flush=True)


def _wire(*_: object) -> None:
    frames, messages = sys.modules["leto_elastic.protect.frames"], sys.modules["leto_elastic.protect.messages"]
    send = frames.Connection.send

    def damaging(self: Any, kind: int, message: Any, payload: Any = b"", crc: int | None = None) -> None:
        if type(message) is messages.Chunk:
            frames.Connection.send = send
            crc = frames.checksum(payload) if crc is None else crc
            payload = payload.copy()
            payload[payload.size // 2] ^= 4
        send(self, kind, message, payload, crc)

    frames.Connection.send = damaging
    print("the wire is damaged", flush=True)


if "torch.distributed.run" in sys.orig_argv:
    signal.signal(signal.SIGRTMIN + 1, _pieces)
    signal.signal(signal.SIGRTMIN + 2, _wire)
