"""Loads files of policies in this process and removes what they have added afterwards."""

import contextlib
import sys

from thinwire.ops.methods import settings
from thinwire.ops.methods.method import METHODS
from thinwire.runtime.run import own_policies


@contextlib.contextmanager
def loaded(path):
    """Let the policies of a file exist within the block, as they do in a process with --policy."""
    registries = [METHODS, *settings.REGISTRIES.values()]
    before, modules, folders = [dict(each) for each in registries], set(sys.modules), list(sys.path)
    try:
        yield own_policies.load(str(path))
    finally:
        for registry, entries in zip(registries, before, strict=True):
            registry.clear()
            registry.update(entries)
        own_policies._LOADED.clear()
        sys.path[:] = folders
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(path.parent)):
                del sys.modules[name]
