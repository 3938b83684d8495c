"""Parses command lines of ``main.py`` in the test's process and restores the flags afterwards."""

import contextlib
import dataclasses

from absl import flags
from absl.testing import flagsaver

from thinwire.cli import node
from thinwire.flags.run import read_run
from thinwire.worker import flags as worker_flags


@contextlib.contextmanager
def given(*arguments):
    """Let the flags have these values within the block.

    Raises:
        absl.flags.Error: What main.py ends with code 1 for.
    """
    if "type_node" not in flags.FLAGS:
        node.define_flags()
    with flagsaver.flagsaver():
        flags.FLAGS(["main.py", *arguments])
        yield flags.FLAGS


def own_flags() -> dict[str, flags.Flag]:
    """Return every flag of main.py by name; a library's flag is named with its module."""
    with given() as values:
        topics = values.flags_by_module_dict().items()
        return {
            flag.name: flag for topic, members in topics if "." not in topic for flag in members
        }


def run_of(*arguments):
    """Return the Run of a command line."""
    with given(*arguments):
        return read_run()


def worker_of(*arguments):
    """Return a worker's own settings."""
    with given(*arguments) as values:
        return worker_flags.read(values.nb_workers)


def device_of(*arguments):
    """All numbers that emulate a worker, by name."""
    own = dataclasses.asdict(worker_of(*arguments))
    found = {}
    for settings in (own, *(value for value in own.values() if isinstance(value, dict))):
        found |= settings
        for value in settings.values():
            found |= value if isinstance(value, dict) else {}
    return found
