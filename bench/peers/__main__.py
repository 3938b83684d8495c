"""All peers and ours on the same work, in turn (A B C A B C), as one table with ratios.

``python -m bench.peers --seconds 30``. Run ``bench/peers/setup.sh`` once before, for torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.peers import work
from bench.table import Row, render

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(__file__).resolve().parent / ".venv-torch" / "bin" / "python"
#: Name -> interpreter, module and its arguments.
CONTENDERS = {
    "thinwire asgd": (sys.executable, "thinwire", "--method=asgd"),
    "TensorFlow ParameterServerStrategy": (sys.executable, "tf_parameter_server"),
    "thinwire bsp": (sys.executable, "thinwire", "--method=bsp"),
    "torch DDP": (str(TORCH), "torch_ddp", "--hook=none"),
    "torch DDP, fp16": (str(TORCH), "torch_ddp", "--hook=fp16"),
    "torch DDP, PowerSGD": (str(TORCH), "torch_ddp", "--hook=powersgd"),
    # AdaComp has no momentum; with it the downlink would be dense.
    "thinwire adacomp": (sys.executable, "thinwire", "--method=adacomp", "--momentum=0"),
}
#: Ours, the peer's, goal of the ratio in samples/s.
PAIRS = (
    ("thinwire asgd", "TensorFlow ParameterServerStrategy", 1.0),
    ("thinwire bsp", "torch DDP", 0.95),
    ("thinwire bsp", "torch DDP, fp16", None),
    ("thinwire adacomp", "torch DDP, PowerSGD", None),
    ("thinwire adacomp", "TensorFlow ParameterServerStrategy", None),
)
_OVERHEAD_SECONDS = 300.0  # to start, warm up and end, on a busy machine


def _alone(command: list[str]) -> list[str]:
    """Give a contender a loopback interface of its own, where the system lets us.

    Then its byte counter counts nobody else. Without, it counts the whole machine's.
    """
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return command
    wrapped = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    possible = subprocess.run([*wrapped, "true"], capture_output=True, check=False)
    return [*wrapped, *command] if possible.returncode == 0 else command


def measure(name: str, seconds: float) -> dict[str, float] | None:
    """Run one contender once; return its JSON line, or None (and say why) if it failed."""
    interpreter, module, *arguments = CONTENDERS[name]
    if not Path(interpreter).exists():
        sys.stderr.write(f"{name}: no {interpreter}; run bench/peers/setup.sh\n")
        return None
    command = [interpreter, "-m", f"bench.peers.{module}", f"--seconds={seconds:g}", *arguments]
    try:
        done = subprocess.run(
            _alone(command),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=seconds + _OVERHEAD_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        output = (getattr(error, "stderr", "") or "")[-1000:]
        sys.stderr.write(f"{name}: {error}\n{output}\n")
        return None
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows(seconds: float, rounds: int, only: str = "") -> Iterator[Row]:
    """Measure every contender `rounds` times in turn; yield ours against the peers'."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for name in (name for name in CONTENDERS if only in name):
            result = measure(name, seconds)
            if result is not None:
                sys.stderr.write(f"round {number + 1}: {json.dumps(result)}\n")
                results[name].append(result)
    for ours, peer, goal in PAIRS:
        if results[ours] and results[peer]:
            yield _row(ours, peer, goal, results)


def _row(
    ours: str, peer: str, goal: float | None, results: dict[str, list[dict[str, float]]]
) -> Row:
    def median(name: str, key: str) -> float:
        return statistics.median(result[key] for result in results[name])

    mine, theirs = median(ours, "samples_per_second"), median(peer, "samples_per_second")
    sent = (
        f"{median(ours, 'bytes_per_step'):,.0f} B/step, peer {median(peer, 'bytes_per_step'):,.0f}"
    )
    return Row(f"{ours} / {peer}", mine, "samples/s", theirs, mine / theirs, goal, "higher", sent)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=30.0, help="measured time of each")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--only", default="", help="contenders whose name holds this")
    arguments = options.parse_args()
    if work.full_set_is_installed() is False:
        sys.stderr.write("Fashion-MNIST is not installed: all train on the shipped sample\n")
    sys.stdout.write(render(rows(arguments.seconds, arguments.rounds, arguments.only)))


if __name__ == "__main__":
    main()
