"""Reports CPUs, packages and network interfaces of a host before it receives Thinwire's code.

``python -I - INTERFACE [PACKAGE...] < host_probe.py`` writes one line, ``thinwire-probe`` and a
JSON object: ``cpus`` (number of CPUs that a process may use), ``missing`` (packages that Thinwire
requires or the command line names, and that are not installed), ``interfaces`` (names of the
network interfaces) and ``address`` (IPv4 address of INTERFACE, null if INTERFACE has no address).

`host_probe.py` imports only the standard library, because it runs before the launcher knows the
host's packages.
"""

import fcntl
import importlib.util
import json
import os
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915  # Linux ioctl that returns the IPv4 address of a network interface
_NEEDED = ("absl", "grpc", "keras", "numpy", "tensorflow")


def _address(interface: str) -> "str | None":
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def _cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


needed = (*_NEEDED, *sys.argv[2:])
found = {
    "cpus": _cpus(),
    "missing": [name for name in needed if importlib.util.find_spec(name) is None],
    "interfaces": [name for _, name in socket.if_nameindex()],
    "address": _address(sys.argv[1]) if sys.argv[1] else None,
}
sys.stdout.write(f"thinwire-probe {json.dumps(found)}\n")
