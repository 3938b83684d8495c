"""Addresses of shards that an engine has moved."""

from thinwire.proto.grpc import ClientStream
from thinwire.proto.moved import MOVED_VARIABLE, moved_lines, present_address


def test_every_attempt_goes_where_the_shard_is_now(monkeypatch, tmp_path):
    former, now = "10.0.0.1:2223", "[fd00::2]:40001"
    assert present_address(former) == former
    monkeypatch.setenv(MOVED_VARIABLE, str(tmp_path / "moved"))
    assert present_address(former) == former, "nothing has moved yet"
    (tmp_path / "moved").write_text(moved_lines({former: "10.0.0.2:5", "10.0.0.3:1": now}))
    assert present_address(former) == ClientStream(former).address == "10.0.0.2:5"
    assert present_address("10.0.0.3:1") == present_address(now) == now
    (tmp_path / "moved").write_text("no line of ours\n\n")
    assert present_address(former) == former
