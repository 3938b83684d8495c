"""The command line of ``main.py`` without a process: flags parsed here, as they were afterwards."""

import contextlib

from absl import flags
from absl.testing import flagsaver

import main


@contextlib.contextmanager
def given(*arguments):
    """Let the flags have these values within the block.

    Raises:
        absl.flags.Error: What main.py ends with code 1 for.
    """
    if "type_node" not in flags.FLAGS:
        main.define_flags()
    with flagsaver.flagsaver():
        flags.FLAGS(["main.py", *arguments])
        yield flags.FLAGS


def own_flags() -> dict[str, flags.Flag]:
    """Return every flag of main.py by name; libraries' stand under the names of their modules."""
    with given() as values:
        topics = values.flags_by_module_dict().items()
        return {flag.name: flag for topic, members in topics if "." not in topic
                for flag in members}  # fmt: skip
