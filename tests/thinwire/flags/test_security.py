"""Certificates and tokens from the command line to a Run, and the allowed bind addresses."""

import os

import pytest
from absl import flags

from tests.certificates import TOKEN, Papers
from tests.command_line import given
from thinwire.cli import node
from thinwire.flags import security
from thinwire.flags.run import read_run
from thinwire.launcher import deployment, ray
from thinwire.launcher.role import environment, given_flags
from thinwire.ops.types import ConfigurationError
from thinwire.proto.security import credentials
from thinwire.ps import flags as ps_flags
from thinwire.runtime.run.credentials import NO_CREDENTIALS
from thinwire.runtime.run.settings import EXIT_CONFIGURATION
from thinwire.worker import flags as worker_flags


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as thinwire.proto.security.certificates makes it, with a token."""
    path, papers = tmp_path_factory.mktemp("certs"), Papers()
    for name, issued in papers.by_name.items():
        papers.write(path, name, issued)
    (path / "token").write_bytes(TOKEN)
    (path / "token").chmod(0o600)
    return path


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)


def tls(folder):
    return (
        f"--tls_cert={folder}/{{node}}.crt",
        f"--tls_key={folder}/{{node}}.key",
        f"--tls_ca={folder}/ca.crt",
    )


def run_of(*arguments):
    with given(*arguments):
        return read_run()


@pytest.mark.parametrize(
    ("node", "own"),
    [
        ("ps-1", ("--type_node=PS", "--nb_ps=2", "--id_ps=1")),
        ("worker-2", ("--type_node=Worker", "--id_worker=2")),
        ("supervisor-0", ("--type_node=Supervisor",)),
    ],
)
def test_each_node_reads_its_own_files(folder, node, own):
    found = run_of(*own, *tls(folder), f"--token_file={folder}/token").credentials
    assert found.certificate == (folder / f"{node}.crt").read_bytes()
    assert found.key == (folder / f"{node}.key").read_bytes()
    assert found.token == TOKEN


def test_a_node_that_has_no_certificate_is_told_which_file(folder):
    with pytest.raises(ConfigurationError, match=r"tls_cert=.*worker-9\.crt cannot be read"):
        run_of("--type_node=Worker", "--nb_workers=9", "--id_worker=9", *tls(folder))


def test_another_nodes_certificate_is_refused_at_the_start(folder):
    flagged = [flag.replace("{node}", "worker-1") for flag in tls(folder)]
    with pytest.raises(ConfigurationError, match="this node is thinwire://worker/2"):
        run_of("--type_node=Worker", "--id_worker=2", *flagged)
    with pytest.raises(ConfigurationError, match="this node is thinwire://supervisor"):
        run_of("--type_node=Supervisor", *flagged)


def test_nothing_given_is_nothing_read(folder, monkeypatch):
    for role in ("PS", "Worker", "Supervisor", "Cluster", "Standalone"):
        assert run_of(f"--type_node={role}").credentials is NO_CREDENTIALS
    monkeypatch.setenv("THINWIRE_TOKEN", TOKEN.decode())
    assert run_of("--type_node=Worker").credentials.token == TOKEN
    assert run_of("--type_node=Standalone").credentials is NO_CREDENTIALS


def test_who_talks_to_nobody_needs_no_papers(folder):
    for role in ("Standalone", "Simulator"):
        with pytest.raises(ConfigurationError, match="leave --token_file out"):
            run_of(f"--type_node={role}", f"--token_file={folder}/token")


def bind(*arguments):
    with given("--type_node=PS", "--ip_PS=0.0.0.0", *arguments):
        ps_flags.check(read_run())


def test_beyond_this_machine_with_papers_or_token(folder, monkeypatch):
    bind(*tls(folder))
    bind(f"--token_file={folder}/token")
    with pytest.raises(
        ConfigurationError, match=r"neither encrypted nor.*--token_file.*--insecure"
    ):
        bind()
    with pytest.raises(ConfigurationError, match="encrypted, but not authenticated"):
        bind(*tls(folder)[:2])
    bind(*tls(folder)[:2], "--insecure")
    monkeypatch.setenv("THINWIRE_TOKEN", TOKEN.decode())
    bind()


def test_peers_beyond_this_machine_with_papers_or_token(folder, monkeypatch):
    monkeypatch.setattr("thinwire.worker.collective.peers.is_loopback", lambda address: False)
    among = ("--type_node=Worker", "--method=bsp", "--collective=ring")
    for more, words in {(): "--token_file", (f"--token_file={folder}/token",): None}.items():
        with given(*among, *more) as values:
            if words is None:
                worker_flags.check(read_run(), values)
                continue
            with pytest.raises(ConfigurationError, match=words):
                worker_flags.check(read_run(), values)


def test_a_cluster_passes_paths_on_and_no_secret(folder, monkeypatch):
    monkeypatch.setenv("THINWIRE_TOKEN", TOKEN.decode())
    with given("--type_node=Cluster", *tls(folder), f"--token_file={folder}/token") as values:
        assert read_run().credentials is NO_CREDENTIALS
        passed, kept = " ".join(given_flags(())), values.flags_into_string()
        assert security.protection(values).authenticated
    assert "{node}.crt" in passed and f"--token_file={folder}/token" in passed
    for text in (passed, kept):
        assert TOKEN.decode() not in text and "PRIVATE" not in text
    assert environment()["THINWIRE_TOKEN"] == TOKEN.decode()


def test_the_token_is_no_flag():
    with pytest.raises(flags.Error, match="token_file"), given("--token=secret"):
        pass


def test_secrets_are_not_copied_to_hosts(folder, monkeypatch):
    monkeypatch.setattr(deployment, "pack", lambda files, folder: repr(files).encode())
    with given(
        "--type_node=Cluster", "--sync_dst_dir=x", f"--token_file={folder}/token", *tls(folder)
    ):
        place = deployment.code_deployment()
    assert not place.flags and place.archive == b"{}"


def test_ray_does_not_leave_nodes_without_a_token(monkeypatch, tmp_path):
    without, having = (ray.ActorLocation("a", "10.0.0.1", 2, has) for has in (False, True))
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    with given("--type_node=Cluster"):
        ray.demand_token([without])  # no token exists
    monkeypatch.setenv("THINWIRE_TOKEN", "a token that nobody can guess")
    with given("--type_node=Cluster"):
        ray.demand_token([having])
        with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1.*--token_file") as refused:
            ray.demand_token([having, without])
        assert "nobody can guess" not in str(refused.value)
    with given("--type_node=Cluster", f"--token_file={tmp_path}/token"):
        ray.demand_token([without])


def test_libraries_are_told_how_to_behave_before_certificates_make_grpc_look(folder, monkeypatch):
    seen = []

    def refuse(*_, **__):
        seen.extend(os.environ.get(name) for name in names)
        raise ConfigurationError("no")

    names = "GRPC_VERBOSITY", "TF_CPP_MIN_LOG_LEVEL", "TF_FORCE_GPU_ALLOW_GROWTH"
    for name in names:
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(credentials, "read", refuse)
    monkeypatch.setattr(node, "_start_log", lambda: None)
    with given("--type_node=PS", *tls(folder)):
        assert node.main(["main.py"]) == EXIT_CONFIGURATION
    assert seen == ["ERROR", "3", "true"]
