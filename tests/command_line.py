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
