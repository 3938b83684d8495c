"""A shard's files on a real S3-compatible server when the writer is killed during an upload."""

import json
import os
import random
import subprocess
import sys
import time

import pytest

from tests.object_storage import BUCKET, environment_of, s3_server
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.persistence.fsspec_objects import open_objects

KILLS = 50
#: Saves a megabyte in ten parts over and over; writes a line for each that is safely there.
WRITER = """
import functools, sys
import numpy as np
from tests.command_line import given
from tests.virtual.toy import SPEC
from thinwire.flags.run import read_run
from thinwire.runtime.persistence import places
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.persistence.shard_checkpoint import ShardCheckpoint, model_rows
from thinwire.ps.persistence.shard_store import SavedShard

places.Checkpoints = functools.partial(places.Checkpoints, part_bytes=100_000)
with given("--nb_workers=2", f"--run_dir={sys.argv[1]}", f"--checkpoint_dir={sys.argv[2]}"):
    run = read_run()
saved = SavedShard(run, "ps-0")
saved.check(SPEC)
version = saved.last.core["version"] if saved.last.core else 0
print("found", version, saved.generation, flush=True)
saved.open()
while True:
    version += 1
    core = {"theta": np.full(250_000, version, np.float32), "generation": saved.generation}
    core |= {"version": version, "lifecycle": {"stop_reason": None}}
    saved.put(version, ShardCheckpoint(core=core, run_id="abc", model=model_rows(SPEC)))
    saved.flush()
    print("saved", version, flush=True)
"""


def leftovers(store):
    """Return the names that the log does not need."""
    names = store.names()
    logs = [name for name in names if name.startswith("log/")]
    contents = [json.loads(store.get(name))["content"] for name in logs]
    return {*names} - {*logs} - {p["name"] for each in contents for p in each.get("parts", [])}


@pytest.mark.product
@pytest.mark.timeout(900)
def test_the_newest_whole_snapshot_is_taken_after_each_of_fifty_kills(tmp_path):
    rng, cut, saved = random.Random(3), 0, 0
    address = f"s3://{BUCKET}/run"
    with s3_server() as environment, environment_of(environment):
        store = open_objects(address, "checkpoint_dir").below("ps-0")
        for kill in range(KILLS + 1):
            command = [sys.executable, "-c", WRITER, str(tmp_path / f"machine {kill}"), address]
            writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
            with writer:
                found, version, generation = writer.stdout.readline().split()
                assert (found, int(generation)) == ("found", kill)
                assert saved <= int(version) <= saved + 1, "the newest whole one"
                assert writer.stdout.readline().split()[0] == "saved"
                time.sleep(rng.uniform(0.0, 0.4))
                writer.kill()
                rest = [line for line in writer.stdout if line.endswith("\n")]
                saved = int(version) + 1 + len(rest)
            cut += bool(leftovers(store))
        sys.stdout.write(f"{cut} of {KILLS + 1} kills left parts without an entry\n")
        assert cut > KILLS // 4
        last = Checkpoints(store, keep=3)
        assert last.load_latest()[0] in (saved, saved + 1)
        assert last.log.claim(KILLS + 1, "the end")
        assert leftovers(store) == set()
        logs = [name for name in store.names() if name.startswith("log/")]
        assert len(logs) <= 3 + 4, "three snapshots, and the claims among and after them"
