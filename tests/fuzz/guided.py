"""One fuzz target under atheris, in its own process: ``python -m tests.fuzz.guided NAME ...``.

Arguments after the name are options of libFuzzer. The process ends with the first crash.
"""

from __future__ import annotations

import importlib.util
import pathlib
import random
import resource
import sys

#: Modules to instrument: all modules that decode in Python, none that decode in native code.
PACKAGES = ["thinwire"]
#: Address space that a process may take in addition to its space before the first input, in bytes.
EXTRA_BYTES = 1 << 30


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer ends the process."""
    import atheris
    from absl import logging

    logging.set_verbosity(logging.FATAL)
    with atheris.instrument_imports(include=PACKAGES):
        from tests.fuzz import mutators, registry, target

        chosen = registry.load(arguments[0])

    def one(data: bytes) -> None:
        with target.watched():
            chosen.one(data)

    def change(data: bytes, longest: int, seed: int) -> bytes:
        """Change the message in an input, or, now and then, any of its bytes."""
        dice = random.Random(seed)
        if chosen.message is not None and dice.randrange(4):
            made = mutators.mutated(data, chosen.message, chosen.head, dice)
            if made is not None and len(made) <= longest:
                return made
        return bytes(atheris.Mutate(data, longest))

    for seed in chosen.seeds():
        one(seed)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    atheris.Setup([sys.argv[0], *arguments[1:]], one, custom_mutator=change)
    atheris.Fuzz()


def is_missing() -> str | None:
    """Return why nothing can be fuzzed here; None: it can be."""
    if importlib.util.find_spec("atheris") is not None:
        return None
    return (
        "the fuzzer atheris is not installed here: it has wheels for CPython 3.11 to 3.13 on Linux "
        "with x86-64, and requirements-dev.txt asks for it there (make setup). The corpus is "
        "replayed without it (pytest tests/fuzz), and so is python -m tests.fuzz.hostile."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
