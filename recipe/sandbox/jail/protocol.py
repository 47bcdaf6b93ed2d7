"""Messages between the server, a helper and a jail, over SOCK_SEQPACKET pairs.

Invariant: a job's bytes go from the server directly to the one jail that runs it; the zygote, from whose memory the
next jail is forked, never sees them. Descriptors are sent with the message that they belong to.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence

INLINE_BYTES = 1 << 16
"""Longer messages are passed in a memory file, since a datagram is bounded by the socket's buffer."""
MOST_DESCRIPTORS = 64
"""Per message."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
_IN_FILE = b"\0"
FETCHED = b'{"fetched": true}'
"""The message that the job's files can be read."""


class Closed(Exception):
    """The other side has closed the connection."""


def send(connection: socket.socket, message: dict, descriptors: Sequence[int] = ()) -> None:
    """Send a message with descriptors. Raises OSError if the other side has closed the connection."""
    body = json.dumps(message).encode()
    passed = list(descriptors)
    if len(body) <= INLINE_BYTES:
        _send(connection, body, passed)
        return
    with open(os.memfd_create("message", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(body)
        _send(connection, _IN_FILE, [*passed, file.fileno()])


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """Return the next message and its descriptors. Raises Closed, and BlockingIOError on a non-blocking socket."""
    try:
        body, ancillary, _flags, _address = connection.recvmsg(INLINE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError as error:
        raise Closed from error
    passed: list[int] = []
    for _level, _kind, data in ancillary:
        passed += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    if not body:
        raise Closed
    if body == _IN_FILE:
        with open(passed.pop(), "rb") as file:
            file.seek(0)
            body = file.read()
    return json.loads(body), passed


def report(following: str, code: int | None, cpu_s: float) -> bytes:
    """Return the message for a stage's end. Formatted by hand, since work in a jail's first process slows every job.

    following: "stage", "files" or, after the last message, "end".
    """
    value = "null" if code is None else code
    return f'{{"following": "{following}", "code": {value}, "cpu_s": {cpu_s:.3f}}}'.encode()


def _send(connection: socket.socket, body: bytes, descriptors: list[int]) -> None:
    packed = struct.pack(f"{len(descriptors)}i", *descriptors)
    connection.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if descriptors else [])
