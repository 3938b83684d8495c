"""Main function of the Simulator role, which simulates a whole run in one process.

Simulated workers and PS shards use the cores (state machines) of the real roles, with real
gradients. The Simulator simulates the time of devices, links with losses, deaths of workers, and
the capacity of PS shards.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf
from absl import logging

from thinwire.data.loading import load_dataset
from thinwire.models.fitting import check_examples
from thinwire.models.flat_model import SharedModel, has_gpu
from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.validation import refuse_script_steps
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.finished import finished_summary
from thinwire.runtime.run.settings import EXIT_DONE, EXIT_OF_STOP, Run
from thinwire.runtime.run.signals import handle_signals
from thinwire.simulator import executors
from thinwire.simulator import flags as simulator_flags
from thinwire.simulator.records import SimulationRecords
from thinwire.simulator.simulation import Simulation
from thinwire.simulator.trainer import Trainer
from thinwire.supervisor import flags as supervisor_flags
from thinwire.supervisor.recorder import Recorder
from thinwire.supervisor.scorer import ModelScorer
from thinwire.worker.role import limit_threads


def main(run: Run) -> int:
    """Simulate the training run to its end; return the exit code.

    Raises:
        ConfigurationError: Data, model, batch size or number of PS shards do not fit, or the run
            directory contains a run of real processes.
    """
    refuse_script_steps(run.method, "the Simulator")
    settings = simulator_flags.read(run)
    together = executors.num_together(run.nb_workers, has_gpu(run))
    limit_threads(executors.threads_of_each(settings.threads, together), together)
    tf.config.experimental.enable_op_determinism()
    if not run.overwrite:
        _refuse_real_run(run)
        if finished := finished_summary(run):
            logging.info("this run is finished (%s); results: %s", finished, run.run_dir / "report")
            return EXIT_DONE
    shared = SharedModel(run.model, run.seed)
    dataset = load_dataset(run.data, run.model, shared.user_module, run.seed)
    check_examples(shared.model, dataset.train_images, dataset.train_labels)
    check_examples(shared.model, dataset.test_images, dataset.test_labels, "test")
    bodies = load_kernels(run.kernels, on_gpu=has_gpu(run))
    trainer = Trainer(shared, run.method.bn_sync, settings.clip_norm, settings.weight_decay)
    executor = ThreadPoolExecutor(together, "gradients")
    simulation = Simulation(run, settings, trainer, dataset, bodies, executor=executor)
    # An interrupted simulation is repeated from its start, with the same results, so the records of
    # the first attempt may be overwritten. Large batches make the evaluations faster.
    record_run = dataclasses.replace(run, batch_size=max(run.batch_size, 500), overwrite=True)
    # Evaluate a separate model, as a Supervisor does, because training does not change the moving
    # statistics of a separate model.
    evaluated = SharedModel(run.model, run.seed)
    scorer = ModelScorer(record_run, evaluated, dataset.test_images, dataset.test_labels)
    recorder = Recorder(record_run, scorer)
    records = SimulationRecords(run, supervisor_flags.read(), recorder, simulation)
    try:
        return _play(simulation, records)
    finally:
        executor.shutdown(cancel_futures=True)


def _play(simulation: Simulation, records: SimulationRecords) -> int:
    """Run the simulation to its end, and write the run's records, also after Ctrl-C."""
    interrupted: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        logging.info("%s: stopping", signal.Signals(number).name)
        interrupted.append(number)

    begun = time.perf_counter(), time.process_time()
    with handle_signals(interrupt), records.dashboard:
        reason = simulation.play(records.keep, lambda: bool(interrupted))
    logging.info(
        "%d updates in %.3f simulated seconds took %.2f s of real and %.2f s of processor time",
        simulation.shards[0].core.version,
        simulation.clock.now,
        time.perf_counter() - begun[0],
        time.process_time() - begun[1],
    )
    if reason == "interrupted" and not interrupted:
        logging.error("every worker is dead and --sim_failures schedules no return: the run ends")
    records.finish(reason)
    return EXIT_OF_STOP.get(reason, EXIT_DONE)


def _refuse_real_run(run: Run) -> None:
    """Raise ConfigurationError if the run directory contains a run of real processes."""
    try:
        simulated = "simulator" in json.loads((run.run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        simulated = not (run.run_dir / "checkpoints").exists()
    if not simulated:
        raise ConfigurationError(
            f"--run_dir={run.run_dir} holds a run of real processes; choose another --run_dir for "
            "the simulation, or set --overwrite to replace the records of that run."
        )
