"""The command that makes certificates, and the errors for unusable files."""

import importlib
import ssl
import stat

import pytest

from tests.certificates import HOSTS, OTHER_WORKER, SHARD, TOKEN, WORKER, Papers
from thinwire.ops.types import ConfigurationError
from thinwire.proto.security import certificates, credentials
from thinwire.proto.security.credentials import CredentialFiles


@pytest.fixture(scope="module")
def papers():
    return Papers()


@pytest.fixture
def warnings(monkeypatch):
    heard = []
    monkeypatch.setattr(
        credentials.logging, "warning", lambda text, *words: heard.append(text % words)
    )
    return heard


def read(files, part=WORKER, serves=False, environment=""):
    return credentials.read(files, environment, part, serves)


def test_good_papers_are_read_in_silence(papers, tmp_path, warnings):
    files = papers.write(tmp_path, "worker-1", papers.by_name["worker-1"])
    found = read(files)
    assert (found.certificate, found.key) == papers.by_name["worker-1"].pem()
    assert found.authority == papers.authority and found.protection.authenticated
    files = papers.write(tmp_path, "ps-0", papers.by_name["ps-0"])
    assert read(files, SHARD, serves=True).protection.encrypted
    assert not warnings


def swapped(papers, folder):
    files = papers.write(folder, "worker-1", papers.by_name["worker-1"])
    return CredentialFiles(
        files.certificate, papers.write(folder, "x", papers.by_name["ps-0"]).key, files.authority
    )


def with_content(content, name):
    def write(papers, folder):
        files = papers.write(folder, "worker-1", papers.by_name["worker-1"])
        path = folder / "other"
        path.write_bytes(content)
        path.chmod(0o600)
        return CredentialFiles(**{**vars(files), name: str(path)})

    return write


def encrypted(papers, folder):
    serialization = importlib.import_module("cryptography.hazmat.primitives.serialization")
    key = papers.by_name["worker-1"].key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    return with_content(key, "key")(papers, folder)


BROKEN = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (swapped, "tls_key=.*key values mismatch"),
        (encrypted, "tls_key=.*encrypted"),
        (with_content(b"\xff\0", "certificate"), "tls_cert=.*no certificate in PEM form"),
        (with_content(b"words", "key"), "tls_key=.*no private key in PEM form"),
        (with_content(BROKEN, "certificate"), "tls_cert=.*damaged"),
        (with_content(BROKEN, "authority"), "tls_ca=.*"),
        (with_content(b"short", "token"), "token_file=.*5 bytes; expected at least 16"),
        (with_content(b" \n", "token"), "token_file=.*0 bytes"),
        (
            lambda p, f: CredentialFiles("nowhere.crt", "nowhere.key", "no.ca"),
            "tls_cert=nowhere.crt cannot",
        ),
        (lambda p, f: CredentialFiles(token=str(f)), "token_file=.*directory"),
        (lambda p, f: CredentialFiles("a.crt"), "tls_key=None: expected both"),
        (lambda p, f: CredentialFiles("a.crt", "a.key"), "without --tls_ca"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(papers, tmp_path, make, words):
    with pytest.raises(ConfigurationError, match=words):
        read(make(papers, tmp_path))


def test_a_shard_with_an_authority_alone_is_told(papers, tmp_path):
    files = papers.write(tmp_path, "ps-0", papers.by_name["ps-0"])
    with pytest.raises(ConfigurationError, match="without --tls_cert and --tls_key"):
        read(CredentialFiles(authority=files.authority), SHARD, serves=True)
    assert not read(CredentialFiles(authority=files.authority)).certificate


def test_expired_and_other_peoples_certificates_are_told(papers, tmp_path):
    files = papers.write(tmp_path, "old", papers.expired("worker-1", WORKER))
    with pytest.raises(ConfigurationError, match=r"old\.crt.*certificate has expired"):
        read(files)
    files = papers.write(tmp_path, "worker-1", papers.by_name["worker-1"])
    with pytest.raises(ConfigurationError, match=r"names thinwire://worker/1, but this node is"):
        read(files, OTHER_WORKER)
    files = papers.write(tmp_path, "s", papers.by_name["supervisor-0"])
    with pytest.raises(ConfigurationError, match=r"s\.crt.*purpose"):
        read(files, SHARD, serves=True)


def test_a_shard_with_the_papers_of_another_part_is_told(papers, tmp_path):
    files = papers.write(tmp_path, "worker-1", papers.by_name["worker-1"])
    words = r"names thinwire://worker/1, but this node is thinwire://ps/0;"
    with pytest.raises(ConfigurationError, match=words):
        read(files, SHARD, serves=True)
    files = papers.write(tmp_path, "ps-0", papers.by_name["ps-0"])
    with pytest.raises(ConfigurationError, match=r"names thinwire://ps/0, but this node is"):
        read(files, "thinwire://ps/1", serves=True)


def test_a_certificate_of_another_authority_is_warned_of(papers, tmp_path, warnings):
    files = papers.write(tmp_path, "worker-1", Papers().by_name["worker-1"])
    read(files)
    (warning,) = warnings
    assert "--tls_ca" in warning


def test_keys_and_tokens_that_others_can_read_are_warned_of(papers, tmp_path, warnings):
    files = papers.write(tmp_path, "worker-1", papers.by_name["worker-1"])
    (tmp_path / "worker-1.key").chmod(0o640)
    (tmp_path / "token").write_bytes(TOKEN + b"\n")
    (tmp_path / "token").chmod(0o644)
    found = read(CredentialFiles(**{**vars(files), "token": str(tmp_path / "token")}))
    assert found.token == TOKEN
    key, token = warnings
    assert "--tls_key=" in key and "--token_file=" in token


def test_a_token_from_the_environment(tmp_path):
    assert read(CredentialFiles(), environment=f"{TOKEN.decode()}\n").token == TOKEN
    assert read(CredentialFiles(), environment="").token == b""
    (tmp_path / "token").write_bytes(b"x" * 32)
    assert (
        read(CredentialFiles(token=str(tmp_path / "token")), environment="y" * 32).token
        == b"x" * 32
    )
    with pytest.raises(ConfigurationError, match="THINWIRE_TOKEN: the token has 3 bytes"):
        read(CredentialFiles(), environment="abc")


# -- the command -------------------------------------------------------------------------------


def test_the_command_makes_what_nodes_can_use(tmp_path, capsys, warnings):
    folder = tmp_path / "certs"
    command = ["--out", str(folder), "--hosts", ",".join(HOSTS), "--shards", "2"]
    assert certificates.main([*command, "--workers", "1"]) == 0
    assert "worker-1.key" in capsys.readouterr().out
    before = (folder / "worker-1.crt").read_bytes()
    assert certificates.main([*command, "--workers", "2"]) == 0
    assert capsys.readouterr().out.split(": ")[1] == "worker-2.crt, worker-2.key\n"
    assert (folder / "worker-1.crt").read_bytes() == before
    for node, part in {
        "ps-1": "ps/1",
        "worker-2": "worker/2",
        "supervisor-0": "supervisor",
    }.items():
        files = CredentialFiles(
            *(str(folder / name) for name in (f"{node}.crt", f"{node}.key", "ca.crt"))
        )
        read(files, f"thinwire://{part}", serves=node.startswith("ps"))
    assert not warnings
    for key in folder.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_other_programs_accept_them(tmp_path):
    certificates.make(tmp_path, certificates.holders(HOSTS, 1, 1), days=1)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    assert len(context.get_ca_certs()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hosts", ","],
        ["--workers", "0"],
        ["--shards", "0"],
        *(["--days", d] for d in ("0", "nan", "1e9")),
    ],
)
def test_the_command_refuses_nonsense(tmp_path, arguments):
    with pytest.raises(SystemExit):
        certificates.main(["--out", str(tmp_path), *arguments])


def test_half_an_authority_and_a_missing_library_are_told(tmp_path, capsys, monkeypatch):
    (tmp_path / "ca.crt").write_text("")
    assert certificates.main(["--out", str(tmp_path)]) == 2
    assert "one of the files ca.crt and ca.key" in capsys.readouterr().err

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(certificates.importlib, "import_module", missing)
    assert certificates.main(["--out", str(tmp_path / "x")]) == 2
    assert "extra `tls`" in capsys.readouterr().err
