"""A filter that the Linux kernel runs on each UDP datagram before the datagram reaches a socket.

A datagram that the kernel's filter drops neither fills the receive buffer nor wakes a thread, so a
flood of datagrams from unknown senders costs the receiver little. The datagram filter is a classic
BPF program on this process's socket, which needs no privileges.
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
# Size in bytes of the UDP header, with which the filter program's packet starts.
_UDP_HEADER_BYTES = 8
_WORD_BYTES = 4
_MOST_INSTRUCTIONS = 4096

# Codes of BPF operations, from Linux's header linux/bpf_common.h.
_LOAD_WORD = 0x20  # BPF operation: load the big-endian word at k; drop a shorter packet
_JUMP_IF_EQUAL = 0x15
# BPF operation: end the program and keep the packet's first k bytes; 0 drops the packet.
_RETURN = 0x06
_DROP, _KEEP = 0, 0xFFFFFFFF

# Fields: operation, instructions to skip if true, and if false, operand k.
_Instruction = tuple[int, int, int, int]


def program(start: bytes, offset: int, numbers: Collection[bytes]) -> list[_Instruction]:
    """Return a BPF program that accepts only datagrams with the bytes ``start`` and one of
    ``numbers``.

    Args:
        start: First 4 bytes of a valid datagram.
        offset: Offset of the session id in a datagram, in bytes.
        numbers: Valid session ids of datagrams, of 8 bytes each.
    """
    instructions = [
        (_LOAD_WORD, 0, 0, _UDP_HEADER_BYTES),
        (_JUMP_IF_EQUAL, 1, 0, int.from_bytes(start, "big")),
        (_RETURN, 0, 0, _DROP),
    ]
    number_offset = _UDP_HEADER_BYTES + offset
    for number in sorted(numbers):
        first, second = struct.unpack(">II", number)
        instructions += [
            (_LOAD_WORD, 0, 0, number_offset),
            (_JUMP_IF_EQUAL, 0, 3, first),
            (_LOAD_WORD, 0, 0, number_offset + _WORD_BYTES),
            (_JUMP_IF_EQUAL, 0, 1, second),
            (_RETURN, 0, 0, _KEEP),
        ]
    return [*instructions, (_RETURN, 0, 0, _DROP)]


def attach(udp_socket: socket.socket, instructions: list[_Instruction]) -> bool:
    """Attach a BPF filter program to a socket; the program replaces an earlier filter program.

    Returns:
        True if the program is attached, False if the socket receives all datagrams, because the
        system has no packet filters or the program is too long for the kernel.
    """
    if not ON_LINUX:
        return False
    if len(instructions) <= _MOST_INSTRUCTIONS:
        if _set(udp_socket, instructions):
            return True
        # The kernel's memory for filters must hold both filter programs during a replacement. If
        # the memory is too small, the earlier program is detached first to free its memory.
        _detach(udp_socket)
        if _set(udp_socket, instructions):
            return True
    _detach(udp_socket)
    return False


def _set(udp_socket: socket.socket, instructions: list[_Instruction]) -> bool:
    raw = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(raw)
    description = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    try:
        udp_socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, description)
    except OSError:
        return False
    return True


def _detach(udp_socket: socket.socket) -> None:
    """Remove a socket's earlier BPF filter, which would drop datagrams of new sessions."""
    with contextlib.suppress(OSError):  # the socket has no filter program to detach
        udp_socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
