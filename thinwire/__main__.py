"""Run the command line: ``python -m thinwire COMMAND`` is the command ``thinwire COMMAND``."""

import sys

if not __package__:  # run by its path: `import ops` would import thinwire.ops a second time
    sys.exit(f"{sys.argv[0]}: run it as `python -m thinwire`, not by its path")

from thinwire.cli.commands import run_command

if __name__ == "__main__":
    run_command()
