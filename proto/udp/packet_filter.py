"""A filter that Linux runs on a socket's datagrams before they cost anybody else anything.

What it keeps out neither fills the receive buffer nor wakes a thread: the sender of a flood pays
for it. It is a classic BPF program on a socket of one's own, which needs no privileges.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from collections.abc import Collection

from thinwire.proto.udp.sockets import ON_LINUX

_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_UDP_HEADER_BYTES = 8  # the program sees it before the datagram
_WORD_BYTES = 4
_MOST_INSTRUCTIONS = 4096

# Operations of Linux's linux/bpf_common.h.
_LOAD_WORD = 0x20  # of the packet, at k, big-endian; outside of it the packet is dropped
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06  # so many bytes of the packet are kept
_DROP, _KEEP = 0, 0xFFFFFFFF

_Instruction = tuple[int, int, int, int]  # operation, steps if true, steps if false, k


def program(start: bytes, offset: int, numbers: Collection[bytes]) -> list[_Instruction]:
    """Return a program that keeps datagrams that begin with ``start`` and have one of ``numbers``.

    Args:
        start: 4 bytes.
        offset: Where the numbers are.
        numbers: 8 bytes each.
    """
    instructions = [
        (_LOAD_WORD, 0, 0, _UDP_HEADER_BYTES),
        (_JUMP_IF_EQUAL, 1, 0, int.from_bytes(start, "big")),
        (_RETURN, 0, 0, _DROP),
    ]
    place = _UDP_HEADER_BYTES + offset
    for number in sorted(numbers):
        first, second = struct.unpack(">II", number)
        instructions += [
            (_LOAD_WORD, 0, 0, place),
            (_JUMP_IF_EQUAL, 0, 3, first),
            (_LOAD_WORD, 0, 0, place + _WORD_BYTES),
            (_JUMP_IF_EQUAL, 0, 1, second),
            (_RETURN, 0, 0, _KEEP),
        ]
    return [*instructions, (_RETURN, 0, 0, _DROP)]


def attach(udp_socket: socket.socket, instructions: list[_Instruction]) -> bool:
    """Let a program decide from now on what a socket receives; it takes an earlier one's place.

    Returns:
        Whether it does. If not, as there is no such filter here or the program is too long for the
        kernel, all datagrams are received.
    """
    if not ON_LINUX:
        return False
    if len(instructions) <= _MOST_INSTRUCTIONS:
        if _set(udp_socket, instructions):
            return True
        # The kernel's memory for filters must hold the earlier one too until this has its place.
        _detach(udp_socket)
        if _set(udp_socket, instructions):
            return True
    _detach(udp_socket)
    return False


def _set(udp_socket: socket.socket, instructions: list[_Instruction]) -> bool:
    raw = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    kept = ctypes.create_string_buffer(raw)
    description = struct.pack("@HP", len(instructions), ctypes.addressof(kept))
    try:
        udp_socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, description)
    except OSError:
        return False
    return True


def _detach(udp_socket: socket.socket) -> None:
    """Take an earlier program away: what it does not know it would keep out."""
    with contextlib.suppress(OSError):  # there is none
        udp_socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
