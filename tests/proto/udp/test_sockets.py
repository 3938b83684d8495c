"""Classes of service: the authors' DSCP table, the compact table, local queues."""

import pytest

from thinwire.proto.udp.sockets import SCHEMES, queue_priority, stream_dscp, tos


def every(scheme, channels):
    return [tos(scheme, channel, channels) for channel in range(channels + 1)]


def test_cs_gives_the_stream_the_top_and_the_last_channel_best_effort():
    assert every("cs", 7) == [224, 192, 160, 128, 96, 64, 32, 0]
    assert every("cs", 3) == [96, 64, 32, 0]
    assert every("cs", 1) == [32, 0]
    assert every("cs", 0) == [0]


def test_compact_stays_out_of_network_control():
    assert every("compact", 1) == [160, 0]
    assert every("compact", 2) == [160, 64, 0]
    assert every("compact", 3) == [160, 96, 32, 0]
    assert every("compact", 7) == [160, 128, 96, 64, 64, 32, 0, 0]
    assert every("compact", 0) == [160]


def test_off_marks_nothing():
    assert every("off", 3) == [None] * 4
    assert stream_dscp("off", 3) is None


@pytest.mark.parametrize("scheme", ["cs", "compact"])
@pytest.mark.parametrize("channels", range(8))
def test_better_channels_never_have_lower_classes_and_ecn_bits_stay_free(scheme, channels):
    classes = every(scheme, channels)
    assert classes == sorted(classes, reverse=True)
    assert all(0 <= byte <= 255 and byte % 32 == 0 for byte in classes)
    assert stream_dscp(scheme, channels) * 4 == classes[0]


@pytest.mark.parametrize(
    ("scheme", "channel", "channels"),
    [
        ("best", 1, 3),
        ("cs", 4, 3),
        ("cs", -1, 3),
        ("cs", 1, 8),
    ],
)
def test_what_makes_no_sense_is_refused(scheme, channel, channels):
    with pytest.raises(ValueError, match=r"none of|expected"):
        tos(scheme, channel, channels)


def test_local_priorities_need_no_privileges_and_wait_behind_the_stream():
    for channels in range(1, 8):
        found = [queue_priority(channel, channels) for channel in range(1, channels + 1)]
        assert found == sorted(found, reverse=True)
        assert set(found) <= {1, 2, 3} and found[0] == 3
    assert [queue_priority(channel, 3) for channel in (1, 2, 3)] == [3, 2, 1]
    assert "cs" in SCHEMES
