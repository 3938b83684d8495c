"""Command that writes a data set as 1,200 training and 200 test files in AdaComp's layout.

Run ``python -m thinwire.data.write_adacomp SOURCE_DATASET OUT_DIR [--headers] [--data_dir DIR]``.
The module `thinwire.data.readers.adacomp` describes AdaComp's layout.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from thinwire.data.choices import PARTS
from thinwire.data.readers import adacomp
from thinwire.data.registry import DatasetRequest, load_raw
from thinwire.ops.types import ConfigurationError


def main(arguments: list[str] | None = None) -> int:
    """Write a known data set in AdaComp's layout; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m thinwire.data.write_adacomp",
        description="Write a data set as AdaComp's 1,200 training and 200 test files.",
    )
    parser.add_argument(
        "source_dataset", help="name of the data set to convert, for example fashion_mnist"
    )
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--headers", action="store_true", help="write standard IDX headers")
    parser.add_argument("--data_dir", help="folder of the source data set")
    options = parser.parse_args(arguments)
    try:
        for part in PARTS:
            raw = load_raw(DatasetRequest(options.source_dataset, options.data_dir), part)
            adacomp.write(options.out_dir, part, raw.images, raw.labels, options.headers)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    num_files = sum(adacomp.NUM_FILES.values())
    sys.stdout.write(f"Wrote {num_files} pairs of files to {options.out_dir}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
