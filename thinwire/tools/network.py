"""Checks of `thinwire doctor` for PS shards (`--ps_hosts`) and hosts (`--hosts_file`)."""

from __future__ import annotations

import concurrent.futures
import errno
import pathlib
import shlex
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from thinwire.launcher import link_probe
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.files import read_bounded
from thinwire.tools.findings import Finding, graded

if TYPE_CHECKING:
    from thinwire.launcher.hosts import Host
    from thinwire.launcher.ssh import Ssh
    from thinwire.runtime.run.credentials import Credentials

_PROBE = pathlib.Path(link_probe.__file__)
_CONNECTIONS = 5
_CONNECT_SECONDS = 3.0
_HOST_SECONDS = 15.0
_SERVE_SECONDS = 15.0
#: Maximum number of hosts from which the link to the first host is measured. The hosts measure one
#: after another, because they share the first host's link.
_MOST_MEASURED = 4
_SLOW_ROUND_TRIP_SECONDS, _SLOW_MBPS = 0.2, 1.0
_CLOCK_OFF_SECONDS, _CLOCK_WRONG_SECONDS = 1.0, 60.0
_ADVICE_LINK = "sparse methods suit slow links; run `thinwire advise`"


# -- shards ------------------------------------------------------------------------------------


def shard(address: str, credentials: Credentials) -> Iterator[Finding]:
    """Check that a PS shard can be reached and is serving; measure the link to the shard.

    Args:
        address: ``host:port`` of the PS shard to check.
        credentials: Credentials with which `thinwire doctor` contacts the PS shard.
    """
    what = f"PS {address}"
    host, _, number = address.rpartition(":")
    try:
        seconds = _connect_seconds(host.strip("[]"), int(number))
    except OSError as error:
        yield _unreached(what, error)
        return
    except ValueError:
        yield Finding(what, "problem", "is not host:port", "give an address like 10.0.0.1:2223")
        return
    text = f"reached, round trip {1e3 * seconds:.1f} ms"
    yield graded(what, seconds, text, _ADVICE_LINK, _SLOW_ROUND_TRIP_SECONDS)
    yield from _serving(what, address, credentials)


def _connect_seconds(host: str, port: int) -> float:
    seconds = []
    for _ in range(_CONNECTIONS):
        began = time.perf_counter()
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _unreached(what: str, error: OSError) -> Finding:
    if isinstance(error, socket.gaierror):
        return Finding(what, "problem", f"no such host ({error.strerror})", "correct the name")
    if error.errno == errno.ECONNREFUSED:
        advice = "start the PS, or correct --port; before the PS starts this is normal"
        return Finding(what, "warning", "the host answers, but the port is closed", advice)
    text = "no answer" if isinstance(error, TimeoutError) else str(error.strerror or error)
    return Finding(what, "problem", text, "is the address right, and the port open in firewalls?")


def _serving(what: str, address: str, credentials: Credentials) -> Iterator[Finding]:
    from thinwire.proto.grpc import Unreachable
    from thinwire.proto.grpc.health import HealthCheckFailed, probe
    from thinwire.proto.grpc.session import RequestRejected
    from thinwire.tools import observer

    try:
        status = probe(address, _CONNECT_SECONDS, credentials)
    except HealthCheckFailed as error:
        advice = "check that this is a Thinwire PS, and check --tls_ca, --tls_cert and --tls_key"
        yield Finding(what, "problem", str(error)[:200], advice)
        return
    if status != "SERVING":
        yield Finding(what, "warning", status, "the run has ended or has not started")
        return
    try:
        contact = observer.Contact(address, credentials, _CONNECT_SECONDS)
        mbps = observer.measure_downlink(contact)
    except RequestRejected as error:
        yield Finding(what, "problem", str(error)[:300], "see docs/reference/security.md")
    except Unreachable:
        text = f"the model was not received within {_CONNECT_SECONDS:g} s"
        yield Finding(what, "warning", text, _ADVICE_LINK)
    else:
        text = "SERVING" if mbps is None else f"SERVING, {mbps:.1f} Mbit/s down"
        yield graded(what, -(mbps or _SLOW_MBPS), text, _ADVICE_LINK, -_SLOW_MBPS)


# -- hosts -------------------------------------------------------------------------------------


def hosts(path: pathlib.Path, ssh_options: str, python: str, port: int) -> Iterator[Finding]:
    """Check each host of a hosts file, and measure the links from other hosts to the first host.

    The links to the first host of the hosts file matter, because a Cluster starts PS shard 0 on
    this host.

    Args:
        path: Path of the hosts file.
        ssh_options: Additional command-line options for ssh.
        python: Path or name of the Python interpreter on the hosts.
        port: Port on which PS shard 0 will listen.

    Raises:
        ConfigurationError: The hosts file or the ssh options cannot be parsed.
    """
    from thinwire.launcher.hosts import parse_hosts
    from thinwire.launcher.ssh import Ssh

    try:
        listed_hosts = parse_hosts(read_bounded(path).decode(), str(path))
        ssh = Ssh(shlex.split(ssh_options))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--hosts_file={path}: {error}.") from error
    unique_hosts = list(dict.fromkeys(listed_hosts))
    with concurrent.futures.ThreadPoolExecutor(len(unique_hosts)) as pool:
        results = list(pool.map(lambda host: list(_host(ssh, host, python)), unique_hosts))
    for findings in results:
        yield from findings
    good = [
        host
        for host, findings in zip(unique_hosts, results, strict=True)
        if not any(finding.level == "problem" for finding in findings)
    ]
    if unique_hosts[0] in good:
        yield from _links(ssh, good, python, port)


def _host(ssh: Ssh, host: Host, python: str) -> Iterator[Finding]:
    from thinwire.launcher.ssh import HostFailed

    what = f"host {host}"
    try:
        probed = ssh.probe(host, python, "")
        began = time.time()
        clock = ssh.run_probe(host, python, _PROBE, ["clock"], _HOST_SECONDS)
        offset = clock["seconds"] - (began + time.time()) / 2
    except HostFailed as error:
        yield Finding(what, "problem", str(error), "run `ssh HOST true` manually")
        return
    yield Finding(what, "ok", f"{probed.num_cpus} processors, all packages installed")
    # The remote clock was read at an unknown moment within the elapsed time, so its offset is known
    # only to within half the elapsed time.
    uncertain = (time.time() - began) / 2
    text = f"clock off by {offset:+.2f} s, to within {uncertain:.2f} s"
    advice = "certificates and logs need synchronized clocks: run chrony or ntpd on the host"
    off = max(0.0, abs(offset) - uncertain)
    yield graded(what, off, text, advice, _CLOCK_OFF_SECONDS, _CLOCK_WRONG_SECONDS)


def _links(ssh: Ssh, good: Sequence[Host], python: str, port: int) -> Iterator[Finding]:
    """Measure links to the first host of the hosts file, from this machine and other hosts."""
    from thinwire.launcher.ssh import HostFailed, probe_answer

    first, other_hosts = good[0], good[1:]
    name, what = ssh.host_name(first), f"host {first}"
    line = f"exec {shlex.join([python, '-I', '-', 'serve', str(port), str(_SERVE_SECONDS)])}"
    server = subprocess.Popen(
        ssh.command(first, line),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        # With PIPE arguments, no stream of the process is None, which the type checker does not
        # know.
        if server.stdin is None or server.stdout is None:
            return
        server.stdin.write(_PROBE.read_bytes())
        server.stdin.close()
        try:
            bound = int(probe_answer(server.stdout.readline().decode(errors="replace"))["port"])
        except HostFailed:
            advice = "choose another --port, or stop the program that uses the port"
            yield Finding(what, "problem", f"port {port} is not free on the host", advice)
            return
        yield _link(f"here -> {first}", lambda: link_probe.measure(name, bound))
        for other in other_hosts[:_MOST_MEASURED]:

            def from_other(host: Host = other) -> tuple[float, float]:
                words = ["measure", name, str(bound)]
                link = ssh.run_probe(host, python, _PROBE, words, _HOST_SECONDS)
                return link["round_trip_seconds"], link["mbps"]

            yield _link(f"{other} -> {first}", from_other)
        if len(other_hosts) > _MOST_MEASURED:
            text = f"{len(other_hosts) - _MOST_MEASURED} more hosts were not measured"
            yield Finding("links", "ok", text)
    finally:
        server.kill()
        server.wait()


def _link(what: str, measure: Callable[[], tuple[float, float]]) -> Finding:
    from thinwire.launcher.ssh import HostFailed

    try:
        seconds, mbps = measure()
    except (OSError, HostFailed) as error:
        return Finding(what, "problem", f"not reached: {error}", "open the port in firewalls")
    text = f"round trip {1e3 * seconds:.1f} ms, {mbps:.1f} Mbit/s"
    slow = seconds > _SLOW_ROUND_TRIP_SECONDS or mbps < _SLOW_MBPS
    return Finding(what, "warning" if slow else "ok", text, _ADVICE_LINK if slow else "")
