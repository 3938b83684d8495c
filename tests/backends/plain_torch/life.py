"""A plain torch script that `thinwire run` starts; it writes its weights and what it has seen.

The first argument is the folder for the files, the second one the optimizer. With the third
argument "kill", worker 2 kills itself in the middle of an epoch, once; with "interrupt" it
interrupts the launcher.
"""

import json
import os
import pathlib
import signal
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire

FOLDER, KIND = pathlib.Path(sys.argv[1]), sys.argv[2]
ENDS = sys.argv[3] if len(sys.argv) > 3 else ""
RNG = np.random.default_rng(5)
X = torch.from_numpy(RNG.normal(size=(192, 6)).astype("float32"))
Y = (X @ torch.from_numpy(RNG.normal(size=(6, 4)).astype("float32"))).argmax(1)


def end_early(step):
    """Kill this process, or interrupt the launcher, in the middle of an epoch of worker 2, once."""
    mark = FOLDER / "called"
    if ENDS and step == 20 and thinwire.worker_id() == 2 and not mark.exists():
        mark.touch()
        whole = os.getpid() if ENDS == "kill" else int(os.environ["LAUNCHER"])
        os.kill(whole, signal.SIGKILL if ENDS == "kill" else signal.SIGINT)


def main():
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    options = {"momentum": 0.9} if KIND == "SGD" else {}
    optimizer = getattr(torch.optim, KIND)(module.parameters(), lr=0.02, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    optimizer = thinwire.distribute(optimizer, model=module)
    loader = DataLoader(TensorDataset(X, Y), batch_size=12, shuffle=True, num_workers=1)
    loader = optimizer.thinwire.shard(loader)
    step, seen = 0, []
    for _ in range(8):
        for x, y in loader:
            end_early(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            seen += x[:, 0].tolist()

        def accuracy():
            with torch.no_grad():
                return {"accuracy": (module(X).argmax(1) == Y).float().mean().item()}

        thinwire.evaluate(accuracy)
        torch.save(module.state_dict(), FOLDER / "model.pt")
    state = optimizer.state_dict()
    foreign = sorted({name.partition(".")[0] for name in sys.modules} & {"keras", "tensorflow"})
    number = thinwire.worker_id()
    torch.save([module.state_dict(), state], FOLDER / f"end-{number}.pt")
    rows = {"seen": seen, "foreign": foreign, "steps": step}
    (FOLDER / f"end-{number}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
