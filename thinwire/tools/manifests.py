"""``thinwire manifests kubernetes``: writes a run's objects for ``kubectl apply -f -``."""

from __future__ import annotations

import argparse
import pathlib
import re
import secrets
import shlex
import sys
from collections.abc import Sequence

_ABOUT = """Writes Kubernetes' objects of a run as YAML, for kubectl apply -f -.

The workers are an indexed Job that runs a script of the image. What is written holds secrets: keep
it as you keep keys.
"""
_EXIT_CONFIGURATION = 2
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
#: What the objects give every node by themselves.
_OWN = (
    *("nb_workers", "nb_ps", "ps_hosts", "ip_PS", "port", "run_dir", "id_ps", "id_worker"),
    *("type_node", "model_from", "token_file", "tls_cert", "tls_key", "tls_ca"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the objects that the command line describes; return the exit code."""
    given = _parser().parse_args(arguments)
    from thinwire.ops.types import ConfigurationError
    from thinwire.runtime.run.files import read_bounded
    from thinwire.tools.kubernetes import Deployment, documents, to_yaml

    try:
        flags = tuple(shlex.split(given.flags))
        _check(given, flags)
        token, certificates = "", {}
        if given.certificates:
            certificates = _certificates(given.certificates, given.workers, given.shards)
        elif given.token_file:
            token = read_bounded(given.token_file).decode().strip()
        else:
            token = secrets.token_hex(32)
    except (ConfigurationError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_CONFIGURATION
    made = Deployment(
        name=given.name,
        image=given.image,
        workers=given.workers,
        shards=given.shards,
        script=given.script,
        flags=(f"--method={given.method}", *flags),
        token=token,
        certificates=certificates,
        port=given.port,
        storage=given.storage,
        storage_class=given.storage_class,
        cpus=given.cpus,
        memory=given.memory,
        gpus=given.gpus,
    )
    sys.stdout.write("".join(f"---\n{to_yaml(each)}" for each in documents(made)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="thinwire manifests",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("system", choices=["kubernetes"], help="For whom.")
    add("--name", default="thinwire", help="Begins all names. [name; default %(default)s]")
    add("--image", required=True, help="Image with the script. [image; no default]")
    add("--script", default="train.py", help="Its path in there. [file; default %(default)s]")
    add("--workers", type=int, default=2, help="Number of workers. [count; default %(default)d]")
    add("--shards", type=int, default=1, help="Number of PS shards. [count; default %(default)d]")
    add("--method", default="bsp", help="The run's method. [name; default %(default)s]")
    add("--port", type=int, default=2223, help="Of every shard. [port; default %(default)d]")
    add("--storage", default="10Gi", help="Each PS's volume. [quantity; default %(default)s]")
    add(
        "--storage_class",
        metavar="NAME",
        default="",
        help="Of volumes. [name; default the cluster's]",
    )
    add("--cpus", default="2", help="What each pod requests. [quantity; default %(default)s]")
    add("--memory", default="4Gi", help="What each pod gets. [quantity; default %(default)s]")
    add("--gpus", type=int, default=0, help="Of each worker. [count; default %(default)d]")
    add("--token_file", metavar="FILE", help="The run's token. [file; default a new one]")
    add(
        "--certificates",
        metavar="DIR",
        type=pathlib.Path,
        help="Folder that `thinwire certificates` made, in place of a token. [folder; "
        "default none]",
    )
    add(
        "--flags",
        default="",
        help="Flags of every node, such as --flags='--lease_seconds=30'. [words; default none]",
    )
    return parser


def _check(given: argparse.Namespace, flags: Sequence[str]) -> None:
    """Refuse what Kubernetes or the nodes would; raises ConfigurationError."""
    from thinwire.ops.types import ConfigurationError

    if not _NAME.fullmatch(given.name):
        raise ConfigurationError(
            f"--name={given.name}: expected up to 40 small letters, digits and hyphens, a letter "
            "first."
        )
    if min(given.workers, given.shards) < 1 or given.gpus < 0:
        raise ConfigurationError(
            f"--workers={given.workers} --shards={given.shards} --gpus={given.gpus}: expected at "
            "least 1, 1 and 0."
        )
    for flag in flags:
        name = flag.removeprefix("--").partition("=")[0]
        if not flag.startswith("--") or name in _OWN:
            raise ConfigurationError(
                f"{flag}: expected --flag=value that all nodes share, and the objects bring "
                f"{', '.join(f'--{each}' for each in _OWN)} themselves; leave it out."
            )


def _certificates(folder: pathlib.Path, workers: int, shards: int) -> dict[str, bytes]:
    """Return the files of every node; raises ConfigurationError or OSError."""
    from thinwire.ops.types import ConfigurationError
    from thinwire.runtime.run.files import read_bounded

    nodes = [f"ps-{shard}" for shard in range(shards)]
    nodes += [f"worker-{worker}" for worker in range(1, workers + 1)]
    files = [f"{node}.{kind}" for node in (*nodes, "supervisor-0") for kind in ("crt", "key")]
    missing = [name for name in ("ca.crt", *files) if not (folder / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"--certificates={folder} has no {missing[0]}; make it by `thinwire certificates "
            f"--out {folder} --shards {shards} --workers {workers} --hosts ...`."
        )
    return {name: read_bounded(folder / name) for name in ("ca.crt", *files)}


if __name__ == "__main__":
    sys.exit(main())
