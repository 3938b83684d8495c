"""Fuzz targets: files and variables that users write (groups, shares, hosts, TF_CONFIG, tokens)."""

from __future__ import annotations

import contextlib
import functools
import json
import os

from tests.certificates import Papers
from tests.fuzz.target import FOLDER, Reader, Target
from thinwire.data import fractions
from thinwire.launcher import hosts, tf_config
from thinwire.ops.sync.groups import format_groups, parse_groups, parse_groups_file
from thinwire.ops.types import ConfigurationError
from thinwire.proto.security import credentials as security_credentials
from thinwire.proto.security.credentials import part_of_shard
from thinwire.simulator import devices


def groups(data: bytes) -> None:
    """Read a groups file."""
    with contextlib.suppress(ConfigurationError):
        found = parse_groups_file(data.decode(errors="replace"), "here")
        assert found and parse_groups(format_groups(found)) == found


def shares(data: bytes) -> None:
    """Read a data-sharding file, and deal by it."""
    source = Reader(data)
    nb_workers = 1 + source.number() % 4
    path = FOLDER.write("fractions.txt", source.rest())
    with contextlib.suppress(ConfigurationError):
        found = fractions.read_fractions(path, nb_workers)
        dealt = fractions.ranges(1000, nb_workers, found)
        assert sorted(each for run in dealt for each in run) == list(range(1000))


def host_lines(data: bytes) -> None:
    """Read a hosts file, and build the ssh command for each host of the file."""
    with contextlib.suppress(ConfigurationError):
        for host in hosts.parse_hosts(data.decode(errors="replace"), "here"):
            assert host.target and not host.target.startswith("-") and host.target.isprintable()


def traces(data: bytes) -> None:
    """Read a trace of step times."""
    source = Reader(data)
    nb_workers = 1 + source.number() % 3
    path = FOLDER.write("trace.txt", source.rest())
    with contextlib.suppress(ConfigurationError):
        found = devices._traces(str(path), nb_workers)
        assert len(found) == nb_workers


def variable(data: bytes) -> None:
    """Read TF_CONFIG."""
    with contextlib.suppress(ConfigurationError):
        found = tf_config.parse(data.decode(errors="replace"))
        assert found is None or found.nb_workers >= 0
        for address in found.shards if found is not None else ():
            tf_config._bind(address)


def _variable_seeds() -> list[bytes]:
    cluster = {"ps": ["a:1"], "worker": ["b:1", "c:1"], "chief": ["d:1"]}
    task = {"type": "worker", "index": 1}
    whole = {"cluster": cluster, "task": task, "rpc_layer": "grpc"}
    return [json.dumps(whole).encode(), b'{"cluster": {}, "task": {"type": "evaluator"}}']


# -- credentials ---------------------------------------------------------------------------------


@functools.cache
def _papers() -> dict[str, bytes]:
    """Return credentials of a shard; the keys are random, so each call differs."""
    return vars(Papers().of("ps-0", token=b"a token that nobody can guess"))


def credentials(data: bytes) -> None:
    """Read certificate, key, authority and token; one of them is the input, others may be right."""
    source = Reader(data)
    which, serves = source.number() % 8, bool(source.number() % 2)
    contents = dict(_papers())
    names = list(contents)
    if which < 4:
        contents[names[which]] = source.rest()
    else:
        name = names[which - 4]
        spoilt = bytearray(contents[name])
        while source and spoilt:
            spoilt[source.number(2) % len(spoilt)] = source.number()
        contents[name] = bytes(spoilt)
    paths = {name: str(FOLDER.write(name, content)) for name, content in contents.items()}
    for path in paths.values():
        os.chmod(path, 0o600)
    with contextlib.suppress(ConfigurationError):
        security_credentials.read(
            security_credentials.CredentialFiles(**paths), "", part_of_shard(0), serves
        )


def _credential_seeds() -> list[bytes]:
    marks = b"-----BEGIN CERTIFICATE-----\n\n-----END CERTIFICATE-----\n"
    return [bytes([which, 1]) + marks for which in range(8)] + [b"\3\1short", b"\7\0" + bytes(3)]


TARGETS = {
    "groups": Target(
        "--groups_file", groups, lambda: [b"1,2\n3 # x\n", "١,２".encode()], longest=1024
    ),
    "fractions": Target(
        "--data_sharding_file", shares, lambda: [b"\1" + b"0 0.5\n0.5 1\n", b"\0" + b"nan 1"], 1024
    ),
    "hosts": Target(
        "--hosts_file", host_lines, lambda: [b"a\nu@b:22 slots=2 # x\n[::1]:5\n"], longest=1024
    ),
    "speeds": Target(
        "traces of step times", traces, lambda: [b"\0" + b"0.1\n0.2\n", b"\1" + b"1 2\n3 4"], 1024
    ),
    "tf_config": Target("TF_CONFIG", variable, _variable_seeds),
    "credentials": Target("certificates, keys and tokens", credentials, _credential_seeds),
}
