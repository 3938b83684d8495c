"""Reports CPUs, GPUs, packages and network interfaces of a host before it receives Thinwire's code.

``python -I - INTERFACE [PACKAGE...] < host_probe.py`` writes one line, ``thinwire-probe`` and a
JSON object: ``cpus`` (number of CPUs that a process may use), ``gpus`` (values for
CUDA_VISIBLE_DEVICES, one per GPU that a process may use), ``missing`` (packages that Thinwire
requires or the command line names, and that are not installed), ``backends`` (installed Keras
backends), ``interfaces`` (names of the network interfaces) and ``address`` (IPv4 address of
INTERFACE, null if INTERFACE has no address).

`host_probe.py` imports only the standard library, because it runs before the launcher knows the
host's packages.
"""

import fcntl
import importlib.util
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys

_SIOCGIFADDR = 0x8915  # Linux ioctl that returns the IPv4 address of a network interface
_NEEDED = ("absl", "grpc", "keras", "numpy")
#: Keras backends of scripts. A host needs one of them.
BACKENDS = ("tensorflow", "jax", "torch")
_DRIVER = "/proc/driver/nvidia/gpus"  # folder of NVIDIA's driver with one entry per GPU
_LIST_SECONDS = 20.0  # time limit of nvidia-smi, in seconds; it may have to load the driver
#: Matches a GPU in the output of ``nvidia-smi -L``, or one of its MIG instances on a line below it.
_LISTED = re.compile(r"^( *)(?:GPU|MIG)\b.*\(UUID: ([\w/-]+)\)", re.MULTILINE)


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


def visible_gpus(chosen: "str | None") -> "list[str]":
    """Return the GPUs that a process of this host may use; empty if there are none.

    No Keras backend is imported, because a backend reserves memory on every GPU that it finds.

    Args:
        chosen: Value of CUDA_VISIBLE_DEVICES, whose numbers or UUIDs are returned as they are; None
            if the variable is not set. Then all of the host's GPUs count.

    Returns:
        One value for CUDA_VISIBLE_DEVICES per GPU, or per MIG instance (part of a GPU).
    """
    if chosen is None:
        return _installed_gpus()
    names = []
    for name in (word.strip() for word in chosen.split(",")):
        # CUDA ignores what follows the first invalid word, for example -1.
        if not re.fullmatch(r"[0-9]+|(GPU|MIG)-[\w/-]+", name):
            break
        names.append(name)
    return names


def _installed_gpus() -> "list[str]":
    listing = _listing()
    if listing is None:
        number = len(os.listdir(_DRIVER)) if os.path.isdir(_DRIVER) else 0
        return [str(index) for index in range(number)]
    found = _LISTED.findall(listing)
    parts = {indent for indent, _ in found if indent}
    if not parts:
        return [str(index) for index in range(len(found))]
    # CUDA accepts the UUID of a MIG instance but not a number, nor the GPU that is divided.
    return [
        uuid
        for (indent, uuid), (following, _) in zip(found, [*found[1:], ("", "")])  # noqa: B905
        if indent or not following
    ]


def _listing() -> "str | None":
    """Return the output of ``nvidia-smi -L``; None without the program, or if it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-L"], stdout=subprocess.PIPE, timeout=_LIST_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _report(interface: str, packages: "list[str]") -> "dict[str, object]":
    needed = (*_NEEDED, *packages)
    return {
        "cpus": _cpus(),
        "gpus": visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")),
        "missing": [name for name in needed if importlib.util.find_spec(name) is None],
        "backends": [name for name in BACKENDS if importlib.util.find_spec(name) is not None],
        "interfaces": [name for _, name in socket.if_nameindex()],
        "address": _address(interface) if interface else None,
    }


if __name__ == "__main__":
    sys.stdout.write(f"thinwire-probe {json.dumps(_report(sys.argv[1], sys.argv[2:]))}\n")
