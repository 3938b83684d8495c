"""The bench's traffic over kernel queues; the queues themselves need root."""

import socket
import subprocess
import threading

import pytest

from bench.transport import netns


def test_classes_are_class_selectors():
    assert [netns.tos_of(priority) for priority in (0, 3, 7)] == [0xE0, 0x80, 0]


def test_background_keeps_its_rate_and_mark():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
        receiver.settimeout(10)
        num_sent = netns.blast("127.0.0.1", receiver.getsockname()[1], 12.0, 4, seconds=0.2)
        data, extra, _, _ = receiver.recvmsg(2000, 100)
    assert num_sent <= 0.25 * 12e6 / 8 / 1500
    assert len(data) + 28 == 1500
    assert [value[0] for _, _, value in extra] == [0x60]


def test_a_stream_learns_its_rate():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            stream, _ = server.accept()
            netns._count(stream)

        thread = threading.Thread(target=answer)
        thread.start()
        assert netns.reached("127.0.0.1", server.getsockname()[1], 0, seconds=0.05) > 1
        thread.join()


@pytest.mark.parametrize("arguments", [[], ["sing"], ["sink"], ["sink", "1", "2"]])
def test_unknown_commands_are_told_of(arguments, capsys):
    assert netns.main(arguments) == 2
    assert "python -m bench.transport.netns" in capsys.readouterr().err


def test_the_script_is_sound_and_tells_its_usage():
    done = subprocess.run(["bash", "bench/transport/netns.sh"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--check" in done.stderr
