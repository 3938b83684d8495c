"""``python -m thinwire.supervisor.report RUN [RUN...] [--output FILE]`` compares finished runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.streams import standard_streams
from thinwire.supervisor.report.arguments import EXIT_CONFIGURATION, ReportArguments
from thinwire.supervisor.report.writer import write_comparison


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a page that compares the runs named on the command line; return the exit code."""
    parser = ReportArguments(prog="thinwire report", description="Compare finished runs.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="The --run_dir of a run. [folder]")
    parser.add_argument(
        *("--output",),
        default="comparison.html",
        help="The page to write. [file; default %(default)s]",
    )
    options = parser.parse_args(arguments)
    try:
        path = write_comparison(options.runs, options.output)
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return EXIT_CONFIGURATION
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
