"""Why an etcd endpoint does not work, found out by hand: name, port, TLS, and who answers.

gRPC reports all of these as "unavailable". This asks for `/version` over plain HTTP, or over TLS, and tells what came
back; it runs only after a first failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from dataclasses import dataclass

from leto_elastic.coordinator.settings import EtcdSettings


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, and whether waiting cannot mend it."""

    text: str
    final: bool


async def probe(endpoint: str, settings: EtcdSettings, timeout: float) -> Finding:
    """The finding about one endpoint, within `timeout` seconds."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    try:
        context = _context(settings) if settings.tls else None
    except (OSError, ssl.SSLError) as error:
        return Finding(f"the certificate files do not work: {error}", final=True)
    try:
        async with asyncio.timeout(timeout):
            return await _ask(endpoint, host, int(port), context)
    except TimeoutError:
        return Finding(f"{endpoint} does not answer", final=False)
    except socket.gaierror as error:
        return Finding(f"the name {host} does not resolve ({error.strerror})", final=False)
    except ssl.SSLCertVerificationError as error:
        return Finding(f"the certificate of {endpoint} is not trusted ({error.verify_message}): check ca=", final=True)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if "certificate" in reason:
            return Finding(f"{endpoint} does not accept our certificate ({reason}): check cert= and key=", final=True)
        return Finding(f"{endpoint} does not speak TLS as we do ({reason}): is it plain http?", final=True)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        return Finding(f"{endpoint}: {reason}", final=False)


def _context(settings: EtcdSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca)
    if settings.cert is not None:
        context.load_cert_chain(settings.cert, settings.key)
    return context


async def _ask(endpoint: str, host: str, port: int, context: ssl.SSLContext | None) -> Finding:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if context is not None:
            try:
                await writer.start_tls(context, server_hostname=host)
            except ConnectionError:
                return Finding(f"{endpoint} does not speak TLS: is it plain http?", final=True)
        writer.write(f"GET /version HTTP/1.1\r\nHost: {endpoint}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        answer = await reader.read(4096)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if context is None and b"etcdserver" not in answer and await _speaks_tls(host, port):
        return Finding(f"{endpoint} speaks TLS: give ca=FILE in --rdzv-conf", final=True)
    if b"etcdserver" in answer:
        return Finding(f"etcd at {endpoint} answers but serves no requests (has its cluster a leader?)", final=False)
    return Finding(f"{endpoint} is not an etcd v3 server", final=False)


async def _speaks_tls(host: str, port: int) -> bool:
    """Whether a TLS handshake gets anywhere, whoever it is with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # of the other side, so it speaks TLS, if not with us
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
