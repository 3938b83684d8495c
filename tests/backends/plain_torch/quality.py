"""Accuracies of a torch CNN in runs and alone: `python -m tests.backends.plain_torch.quality`.

The network is that of torch's MNIST example with a quarter of its filters. The data are the sample
of Fashion-MNIST, which two workers divide. Each line of the result is a run.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
OPTIMIZERS = {
    "RMSprop": {"lr": 0.0005},
    "NAdam": {"lr": 0.001},
    "Adagrad": {"lr": 0.01},
}
FLAGS = {
    "dgs": (),
    "diloco": ("--local_steps=10",),
    # Its default is 64 of 4,096 changes in a round, for runs of many rounds.
    "sparseloco": ("--local_steps=4", "--chunk_k=512"),
}


def script(kind, seed, epochs):
    """Train and print the accuracy; this is the script of a worker."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    import thinwire
    from thinwire.data import registry

    torch.manual_seed(seed)
    data = registry.load("fashion_mnist_sample", None, 28, 1, 10, "standardize", seed)
    train, test = (
        TensorDataset(torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y).long())
        for x, y in ((data.train_images, data.train_labels), (data.test_images, data.test_labels))
    )
    module = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(2304, 64), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(64, 10),
    )
    optimizer = getattr(torch.optim, kind)(module.parameters(), **OPTIMIZERS[kind])
    optimizer = thinwire.distribute(optimizer, model=module)
    place = {"num_replicas": thinwire.num_workers(), "rank": max(0, thinwire.worker_id() - 1)}
    sampler = DistributedSampler(train, seed=seed, **place)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()

    def accuracy():
        module.eval()
        with torch.no_grad():
            hits = [(module(x).argmax(1) == y).sum() for x, y in DataLoader(test, 500)]
        return {"accuracy": float(sum(hits)) / len(test)}

    scores = thinwire.evaluate(accuracy)
    if scores is not None:
        sys.stdout.write(f"accuracy {scores['accuracy']}\n")


def run(method, kind, seed, epochs):
    """Return the accuracy of a run of two workers, or of the script alone."""
    words = [__file__, "--script", kind, str(seed), str(epochs)]
    with tempfile.TemporaryDirectory() as folder:
        if method != "alone":
            flags = [f"--method={method}", "--nb_workers=2", *FLAGS[method], f"--seed={seed}"]
            words = ["-m", "thinwire", "run", f"--run_dir={folder}/run", *flags, *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
        )
    lines = [line for line in done.stdout.splitlines() if "accuracy " in line]
    if done.returncode or not lines:
        raise SystemExit(done.stdout + done.stderr)
    return float(lines[-1].split()[-1])


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--results", default="torch-quality.jsonl")
    options.add_argument("--methods", nargs="*", default=["alone", *FLAGS])
    options.add_argument("--optimizers", nargs="*", default=[*OPTIMIZERS])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--epochs", type=int, default=5)
    given = options.parse_args()
    for seed in range(1, given.seeds + 1):
        for kind in given.optimizers:
            for method in given.methods:
                row = {"method": method, "optimizer": kind, "seed": seed, "epochs": given.epochs}
                row["accuracy"] = run(method, kind, seed, given.epochs)
                with open(given.results, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--script"]:
        script(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
