"""Run Flower's side of `bench.studies.federated`: a simulation of the same rounds, with Keras.

The program runs in a separate environment with flwr[simulation], tensorflow and keras. It does not
import Thinwire; it reads the files that `bench.studies.federated` wrote. Each Ray actor builds the
model and traces the step once; the fit instructions of a round name the client that an actor plays.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import flwr
import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server import strategy as strategies

SETTINGS: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 2 else {}
#: Method -> (Flower's strategy, its arguments).
_STRATEGIES: dict[str, tuple[type, dict[str, float]]] = {
    "fedavg": (strategies.FedAvg, {}),
    "fedyogi": (strategies.FedYogi, {"eta": 0.01, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}),
    "fedprox": (strategies.FedProx, {"proximal_mu": 0.01}),
}


class _ActorTrainer:
    """The model, the data and the compiled step of one Ray actor."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import keras
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        folder = pathlib.Path(settings["folder"])
        self.settings = settings
        self.model = keras.models.load_model(folder / "model.keras", compile=False)
        data = np.load(folder / "data.npz")
        self.x, self.y = data["train_x"], data["train_y"]
        lines = (folder / "parts.txt").read_text().splitlines()
        self.parts = [np.array(line.split(), dtype=np.int64) for line in lines]
        mu = settings.get("proximal_mu", 0.0)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        variables = self.model.trainable_variables
        rate = settings["learning_rate"]

        @tf.function(reduce_retracing=True, autograph=False)
        def step(images: Any, labels: Any, base: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, self.model(images, training=True))
            gradients = tape.gradient(loss, [variable.value for variable in variables])
            for variable, gradient, start in zip(variables, gradients, base, strict=True):
                pulled = gradient + mu * (variable.value - start) if mu else gradient
                variable.assign_sub(rate * pulled)

        self._step, self._tf = step, tf

    def train(self, weights: list[Any], client: int, number: int) -> tuple[list[Any], int]:
        """Train a client's local epochs; return its weights and its number of examples."""
        self.model.set_weights(weights)
        base = [self._tf.constant(array) for array in weights]
        client_rows, size = self.parts[client - 1], self.settings["batch_size"]
        rng = np.random.default_rng([client, number])
        for _ in range(self.settings["local_epochs"]):
            order = rng.permutation(client_rows)
            for start in range(0, len(order), size):
                chosen = order[start : start + size]
                self._step(
                    self._tf.constant(self.x[chosen]), self._tf.constant(self.y[chosen]), base
                )
        return self.model.get_weights(), len(client_rows) * self.settings["local_epochs"]


class _FederatedClient(NumPyClient):
    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        """Train as the client that the instructions name."""
        # Ray pickles this class for each call, so its own globals do not persist in an actor. An
        # attribute of an imported module does, so that the trainer is built once per actor.
        cache: dict[str, Any] = flwr.__dict__.setdefault("federated_kept", {})
        if not cache:
            settings = json.loads(str(config["settings"]))
            cache["trainer"] = _ActorTrainer(
                settings | {"proximal_mu": config.get("proximal_mu", 0)}
            )
        trainer = cache["trainer"]
        weights, count = trainer.train(parameters, int(config["client"]), int(config["round"]))
        return weights, count, {}


def _drawn(base: type) -> type:
    class DrawnStrategy(base):  # type: ignore[misc, valid-type]
        """The strategy with the clients of the Simulator's draws, read from a file."""

        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            """Assign the round's clients from the file to the proxies that the strategy drew."""
            pairs = super().configure_fit(server_round, parameters, client_manager)
            config = {"round": server_round, "settings": json.dumps(SETTINGS)}
            return [
                (
                    proxy,
                    flwr.common.FitIns(
                        parameters, instructions.config | config | {"client": client}
                    ),
                )
                for (proxy, instructions), client in zip(
                    pairs, self.draws[server_round - 1], strict=True
                )
            ]

    return DrawnStrategy


def main() -> None:
    """Execute the run; write the accuracy of the last model."""
    import keras

    folder = pathlib.Path(SETTINGS["folder"])
    model = keras.models.load_model(folder / "model.keras", compile=False)
    data = np.load(folder / "data.npz")
    lines = pathlib.Path(SETTINGS["draws"]).read_text().splitlines()
    draws = [[int(word) for word in line.split()] for line in lines if not line.startswith("#")]
    result: dict[str, float] = {}

    def evaluate(number: int, weights: list[Any], config: Any) -> tuple[float, dict]:
        del config
        if number < SETTINGS["rounds"]:
            return 0.0, {}
        model.set_weights(weights)
        answers = model.predict(data["test_x"], batch_size=500, verbose=0).argmax(axis=1)
        result["accuracy"] = float((answers == data["test_y"]).mean())
        return 0.0, {}

    base, settings = _STRATEGIES[SETTINGS["method"]]
    strategy = _drawn(base)(
        fraction_fit=len(draws[0]) / SETTINGS["clients"],
        fraction_evaluate=0.0,
        min_fit_clients=len(draws[0]),  # a share of the connected clients may be fewer
        min_available_clients=SETTINGS["clients"],
        evaluate_fn=evaluate,
        initial_parameters=flwr.common.ndarrays_to_parameters(model.get_weights()),
        **settings,
    )
    strategy.draws = draws
    server = ServerApp(
        server_fn=lambda context: ServerAppComponents(
            strategy=strategy, config=ServerConfig(num_rounds=SETTINGS["rounds"])
        )
    )
    client = ClientApp(client_fn=lambda context: _FederatedClient().to_client())
    logging.getLogger("flwr").setLevel(logging.ERROR)
    flwr.simulation.run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=SETTINGS["clients"],
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    pathlib.Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
