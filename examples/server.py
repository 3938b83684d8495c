"""Run the parameter server that the workers of loop_worker.py connect to.

python examples/server.py --nb_workers=2 --method=dgs --learning_rate=0.03 --epochs=10
"""

import sys

import keras
from convnet import build_model

from thinwire import init_server


def main():
    keras.utils.set_random_seed(1)
    model = build_model()
    server = init_server(sys.argv[1:], model, num_train=10_000).start()
    sys.stdout.write(f"serving at {server.address}\n")
    reason = server.join(idle_seconds=30)
    sys.stdout.write(f"{reason} after {server.version} updates\n")


if __name__ == "__main__":
    main()
