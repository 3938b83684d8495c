"""A Cluster with certificates and a token trains, and leaves no secret behind."""

import pytest

from tests.certificates import HOSTS, TOKEN
from tests.nodes import free_port
from thinwire.proto.security import certificates

pytestmark = pytest.mark.timeout(150)


def test_a_cluster_with_certificates_and_a_token(nodes, tmp_path, monkeypatch):
    certificates.make(tmp_path / "certs", certificates.holders(HOSTS, 2, 2), days=1)
    monkeypatch.setenv("THINWIRE_TOKEN", TOKEN.decode())
    nodes.start(
        "cluster",
        "--type_node=Cluster",
        "--nb_workers=2",
        "--nb_ps=2",
        "--method=bsp",
        f"--ps_hosts=127.0.0.1:{nodes.port},127.0.0.1:{free_port()}",
        "--iter_max=10",
        f"--tls_cert={tmp_path}/certs/{{node}}.crt",
        f"--tls_key={tmp_path}/certs/{{node}}.key",
        f"--tls_ca={tmp_path}/certs/ca.crt",
    )
    assert nodes.wait("cluster", 120) == 0, nodes.output("cluster")
    assert nodes.summary()["updates"] == 10
    assert "refused_peers" not in nodes.summary()
    key_lines = (tmp_path / "certs" / "worker-1.key").read_bytes().splitlines()[1:-1]
    for path in nodes.run_dir.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert TOKEN not in content, path
        assert not any(line in content for line in key_lines), path
