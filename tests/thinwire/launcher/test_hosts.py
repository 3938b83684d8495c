import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.launcher.hosts import Host, parse_hosts, place
from thinwire.ops.types import ConfigurationError

TEXT = """
# fast to slow
fast@node1:2222 slots=2   # two slots
10.0.0.9
10.0.0.10

[fe80::1]:22
10.0.0.9
"""


def test_a_file_names_a_host_per_slot():
    hosts = parse_hosts(TEXT, "hosts")
    first = Host("node1", "fast", 2222)
    repeated = Host("10.0.0.9")
    assert hosts == (first, first, repeated, Host("10.0.0.10"), Host("fe80::1", None, 22), repeated)
    assert [host.line for host in hosts] == [3, 3, 4, 5, 7, 8]
    assert hosts[0].target == "fast@node1"
    assert [str(host) for host in hosts[1:5]] == [
        "fast@node1:2222",
        "10.0.0.9",
        "10.0.0.10",
        "[fe80::1]:22",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-oProxyCommand=evil", ["-oProxyCommand=evil", "names no host"]),
        ("me@-x", ["me@-x"]),
        ("a;b", ["a;b"]),
        ("fe80::1", ["fe80::1", "brackets"]),
        ("a:0", ["port 0", "1 to 65535"]),
        ("a:65536", ["port 65536"]),
        ("a:b", ["a:b"]),
        ("a slots=0", ["slots=0"]),
        ("a slots=65536", ["slots=65536"]),
        ("a slots=two", ["slots=two", "slots=q"]),
        ("a b", ["'b'", "slots=q"]),
        ("a slots=1 slots=2", ["slots=q"]),
    ],
)
def test_a_bad_line_is_named(line, words):
    with pytest.raises(ConfigurationError) as refused:
        parse_hosts(f"good\n\n{line}\n", "my/hosts")
    assert all(word in str(refused.value) for word in ["my/hosts, line 3", *words])


@pytest.mark.parametrize("text", ["", "\n\n", "# nobody\n"])
def test_a_file_without_hosts_is_refused(text):
    with pytest.raises(ConfigurationError, match="names no host"):
        parse_hosts(text, "hosts")


def test_shards_come_first_then_workers_in_turn():
    a, b, c = parse_hosts("a\nb\nc\n", "hosts")
    placement = place([a, b, c], nb_ps=2, nb_workers=5)
    assert placement.shards == (a, b)
    assert placement.workers == (c, a, b, c, a)
    assert placement.hosts == (a, b, c)
    assert place([a, b, c], 1, 1).hosts == (a, b)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 40))
def test_every_slot_gets_its_share(slots, nb_ps, nb_workers):
    hosts = [Host(f"h{number}") for number in range(slots)]
    placement = place(hosts, nb_ps, nb_workers)
    dealt = placement.shards + placement.workers
    assert (len(placement.shards), len(placement.workers)) == (nb_ps, nb_workers)
    counts = [dealt.count(host) for host in hosts]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
