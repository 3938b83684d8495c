"""``thinwire manifests kubernetes``: writes a run's Kubernetes objects for ``kubectl apply``.

The file `kubernetes.yaml` is the template of the Kubernetes objects. A worker in Kubernetes reads
its number from its pod's environment (`thinwire.launcher.schedulers`).
"""

from __future__ import annotations

import argparse
import base64
import json
import pathlib
import re
import secrets
import shlex
import string
import sys
from collections.abc import Iterable, Mapping, Sequence

_ABOUT = """Writes the Kubernetes objects of a run as YAML, for kubectl apply -f -.

The workers are an indexed Job that runs a script from the image. The output holds secrets: protect
it as you protect private keys.
"""
_TEMPLATE = pathlib.Path(__file__).with_name("kubernetes.yaml")
#: Flags with paths of the volumes and certificates that the Kubernetes template mounts.
_RUN_DIR_FLAG = "--run_dir=/var/lib/thinwire/run"
_TLS_FLAGS = (
    *("--tls_cert=/etc/thinwire/{node}.crt", "--tls_key=/etc/thinwire/{node}.key"),
    "--tls_ca=/etc/thinwire/ca.crt",
)
_LABELS = "app.kubernetes.io"
_EXIT_CONFIGURATION = 2
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
#: Flags that the Kubernetes objects set for every node, so --flags must not contain them.
_OWN = (
    *("nb_workers", "nb_ps", "ps_hosts", "ip_PS", "port", "run_dir", "id_ps", "id_worker"),
    *("type_node", "model_from", "token_file", "tls_cert", "tls_key", "tls_ca"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the Kubernetes objects that the command line describes; return the exit code."""
    options = _parser().parse_args(arguments)
    from thinwire.ops.types import ConfigurationError
    from thinwire.runtime.run.files import read_bounded

    try:
        flags = tuple(shlex.split(options.flags))
        _check(options, flags)
        token, certificates = "", {}
        if options.certificates:
            certificates = _certificates(options.certificates, options.workers, options.shards)
        elif options.token_file:
            token = read_bounded(options.token_file).decode().strip()
            if not token:
                raise ConfigurationError(
                    f"--token_file={options.token_file} is empty; expected the run's token, for "
                    "example from `openssl rand -hex 32`."
                )
        else:
            token = secrets.token_hex(32)
    except (ConfigurationError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_CONFIGURATION
    flags = (f"--method={options.method}", *flags)
    sys.stdout.write(_filled_template(options, flags, token, certificates))
    return 0


def _filled_template(
    given: argparse.Namespace, flags: Sequence[str], token: str, certificates: Mapping[str, bytes]
) -> str:
    """Return the Kubernetes objects of a run as YAML.

    Args:
        given: Parsed command line of `thinwire manifests`.
        flags: Flags that every node of the run gets.
        token: Secret token of the run; empty if the run uses certificates instead.
        certificates: Name of a certificate or key file -> content; empty if the run uses a token
            instead.
    """
    from thinwire.runtime.run.settings import (
        EXIT_BAD_FLAG,
        EXIT_CONFIGURATION,
        EXIT_DIVERGED,
        EXIT_REFUSED,
    )

    # Kubernetes gives the replacement of a pod the name of the pod.
    service = f"{given.name}-ps"
    hosts = (f"{service}-{shard}.{service}" for shard in range(given.shards))
    addresses = ",".join(f"{host}:{given.port}" for host in hosts)
    flags = (_RUN_DIR_FLAG, *flags, *(_TLS_FLAGS if certificates else ()))
    place = (f"--nb_workers={given.workers}", f"--ps_hosts={addresses}")
    texts = vars(given) | {
        "token": token,
        "addresses": addresses,
        "worker_flags": shlex.join(flags),
        "failures": 5 * given.workers,
    }
    values = {name: _escaped(str(value)) for name, value in texts.items()}
    values["labels"] = f'{_LABELS}/name: thinwire, {_LABELS}/instance: "{values["name"]}"'
    values["node_flags"] = ", ".join(f'"{_escaped(flag)}"' for flag in (*place, *flags))
    final = (EXIT_BAD_FLAG, EXIT_CONFIGURATION, EXIT_REFUSED, EXIT_DIVERGED)
    values["final_codes"] = ", ".join(map(str, final))
    for role in ("ps", "supervisor", "worker"):
        values[f"{role}_files"] = ", ".join(
            f'"{name}": "{base64.b64encode(content).decode()}"'
            for name, content in sorted(certificates.items())
            if name == "ca.crt" or name.startswith(f"{role}-")
        )
    parts = ["certificates" if certificates else "token"]
    parts += [name for name in ("gpus", "storage_class") if getattr(given, name)]
    return string.Template(_template_with(parts)).substitute(values)


def _template_with(parts: Iterable[str]) -> str:
    """Return the YAML template without documents and lines of features that a run lacks."""
    lines, is_kept, kept_parts = [], False, {"", *parts}
    for line in _TEMPLATE.read_text().splitlines():
        text, _, part = line.partition("  # with ")
        if text == "---":
            is_kept = part in kept_parts
        if is_kept and part in kept_parts:
            lines.append(f"{text}\n")
    return "".join(lines)


def _escaped(text: str) -> str:
    """Return a text escaped for a double-quoted YAML string."""
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return re.sub("[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", escaped)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="thinwire manifests",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("system", choices=["kubernetes"], help="Cluster system to write objects for.")
    add("--name", default="thinwire", help="Prefix of object names. [name; default %(default)s]")
    add("--image", required=True, help="Container image with the script. [image; no default]")
    add("--script", default="train.py", help="Script in the image. [file; default %(default)s]")
    add("--workers", type=int, default=2, help="Number of workers. [count; default %(default)d]")
    add("--shards", type=int, default=1, help="Number of PS shards. [count; default %(default)d]")
    add("--method", default="bsp", help="Training method of the run. [name; default %(default)s]")
    add("--port", type=int, default=2223, help="Port of every shard. [port; default %(default)d]")
    add("--storage", default="10Gi", help="Volume size of each PS. [quantity; default %(default)s]")
    add(
        "--storage_class",
        metavar="NAME",
        default="",
        help="Storage class of the volumes. [name; default the cluster's default]",
    )
    add("--cpus", default="2", help="CPU request of each pod. [quantity; default %(default)s]")
    add("--memory", default="4Gi", help="Memory request per pod. [quantity; default %(default)s]")
    add("--gpus", type=int, default=0, help="GPUs of each worker. [count; default %(default)d]")
    add("--token_file", metavar="FILE", help="File with the token. [file; default a new token]")
    add(
        "--certificates",
        metavar="DIR",
        type=pathlib.Path,
        help="Folder from `thinwire certificates`, to use instead of a token. [folder; "
        "default none]",
    )
    add(
        "--flags",
        default="",
        help="Flags of every node of the run, such as '--lease_seconds=30'. [words; default none]",
    )
    return parser


def _check(given: argparse.Namespace, flags: Sequence[str]) -> None:
    """Raise ConfigurationError for values that Kubernetes or the nodes would reject."""
    from thinwire.ops.types import ConfigurationError

    if not _NAME.fullmatch(given.name):
        raise ConfigurationError(
            f"--name={given.name}: expected up to 40 lower-case letters, digits and hyphens, "
            "starting with a letter."
        )
    if min(given.workers, given.shards) < 1 or given.gpus < 0:
        raise ConfigurationError(
            f"--workers={given.workers} --shards={given.shards} --gpus={given.gpus}: expected at "
            "least 1 worker, 1 shard and 0 GPUs."
        )
    for flag in flags:
        name = flag.removeprefix("--").partition("=")[0]
        if not flag.startswith("--") or name in _OWN:
            raise ConfigurationError(
                f"{flag}: expected a --flag=value that holds for all nodes; leave the flag out. "
                f"The Kubernetes objects set {', '.join(f'--{each}' for each in _OWN)}."
            )


def _certificates(folder: pathlib.Path, workers: int, shards: int) -> dict[str, bytes]:
    """Return file name -> content of the certificate and key files of all nodes.

    Raises:
        ConfigurationError: A certificate or key file is missing.
        OSError: A certificate or key file cannot be read.
    """
    from thinwire.ops.types import ConfigurationError
    from thinwire.runtime.run.files import read_bounded

    nodes = [f"ps-{shard}" for shard in range(shards)]
    nodes += [f"worker-{worker}" for worker in range(1, workers + 1)]
    files = [f"{node}.{kind}" for node in (*nodes, "supervisor-0") for kind in ("crt", "key")]
    missing = [name for name in ("ca.crt", *files) if not (folder / name).is_file()]
    if missing:
        raise ConfigurationError(
            f"--certificates={folder} has no {missing[0]}; create it with `thinwire certificates "
            f"--out {folder} --shards {shards} --workers {workers} --hosts ...`."
        )
    return {name: read_bounded(folder / name) for name in ("ca.crt", *files)}


if __name__ == "__main__":
    sys.exit(main())
