"""A script that downloads, extracts and makes folders at its top, with real processes."""

import contextlib
import http.server
import io
import threading
import zipfile

import pytest

from tests.thinwire.launcher.commands import Command, commands, toy_script, wait_for_nodes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SCRIPT = """
with open("top.log", "a") as log:
    log.write("top\\n")
origin = sys.argv[1] + "/texts.zip"
folder = keras.utils.get_file(origin=origin, extract=True, cache_dir="cache")
lengths = [len(open(f"{folder}/{number}.txt").read()) for number in range(100)]
assert lengths == [1000] * 100, lengths
os.makedirs("out")

model = dense()
model.compile("sgd", "mse")
model = thinwire.distribute(model)
each_epoch = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: os.mkdir(f"out/{epoch}"))
model.fit(x, x.sum(1), batch_size=16, epochs=2, verbose=0, callbacks=[each_epoch])
"""


@contextlib.contextmanager
def serving(content, may_end):
    """Serve content over HTTP, half of it before `may_end`; yield the address and the requests."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            may_end()
            self.wfile.write(content[len(content) // 2 :])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_workers_download_once_and_make_the_same_folders(tmp_path):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for number in range(100):
            file.writestr(f"{number}.txt", "a" * 1000)
    (tmp_path / "cache").mkdir()
    log = tmp_path / "top.log"

    def all_are_there():
        wait_for_nodes(lambda: log.read_text().count("top") >= 2)

    def start(folder, *arguments):
        return Command(
            folder, "--nb_workers=2", "toy.py", *arguments, script=toy_script(SCRIPT, 32)
        )

    served = serving(archive.getvalue(), all_are_there)
    with served as (origin, requests), commands(start, tmp_path) as command:
        run = command(origin)
        assert run.end() == 0, run.output()
    assert requests == ["/texts.zip"]
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["0", "1"]
    assert not (tmp_path / "run" / "settings").exists()
