"""All fuzz targets by name; a target's module is imported when the target is requested."""

from __future__ import annotations

import importlib

from tests.fuzz.target import Target

#: Module -> the names in its TARGETS.
MODULES: dict[str, tuple[str, ...]] = {
    "wire_targets": ("bulk", "framing", "push", "hello", "manifest"),
    "coding_targets": ("block", "positions", "exponents", "codes"),
    "reply_targets": ("reply", "membership", "documents", "peers", "holding"),
    "datagram_targets": ("datagram", "assembler"),
    "session_targets": ("reception",),
    "disk_targets": ("record", "journal", "checkpoint", "saved", "metrics", "esync_logs"),
    "data_targets": ("idx", "cifar", "tfrecord", "index_file", "adacomp", "image_size"),
    "text_targets": ("groups", "fractions", "hosts", "speeds", "tf_config", "credentials"),
    "stream_targets": ("stream",),
    "offer_targets": ("offer",),
}


def names() -> list[str]:
    """Return all targets' names."""
    return [name for of_module in MODULES.values() for name in of_module]


def load(name: str) -> Target:
    """Return a target.

    Raises:
        KeyError: There is none of this name.
    """
    for module, of_module in MODULES.items():
        if name in of_module:
            targets: dict[str, Target] = importlib.import_module(f"tests.fuzz.{module}").TARGETS
            return targets[name]
    raise KeyError(name)
