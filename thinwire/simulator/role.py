"""The Simulator role: a whole run in one process, on a virtual clock, with real gradients.

The cores are those of the real roles; what is simulated is what lies between them: the time that
devices take, links and their losses, deaths, a shard's capacity.
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
    """Simulate the run to its end; return the exit code.

    Raises:
        ConfigurationError: Data, model, batch size or number of shards do not fit, or the run
            directory holds a run that is not simulated.
    """
    refuse_script_steps(run.method, "the Simulator")
    own = simulator_flags.read(run)
    together = executors.num_together(run.nb_workers, has_gpu(run))
    limit_threads(executors.threads_of_each(own.threads, together), together)
    tf.config.experimental.enable_op_determinism()
    if not run.overwrite:
        _refuse_real_run(run)
        if finished := finished_summary(run):
            logging.info("this run is finished (%s); see %s", finished, run.run_dir / "report")
            return EXIT_DONE
    shared = SharedModel(run.model, run.seed)
    dataset = load_dataset(run.data, run.model, shared.user_module, run.seed)
    check_examples(shared.model, dataset.train_images, dataset.train_labels)
    check_examples(shared.model, dataset.test_images, dataset.test_labels, "test")
    bodies = load_kernels(run.kernels, on_gpu=has_gpu(run))
    trainer = Trainer(shared, run.method.bn_sync, own.clip_norm, own.weight_decay)
    executor = ThreadPoolExecutor(together, "gradients")
    simulation = Simulation(run, own, trainer, dataset, bodies, executor=executor)
    # A simulation that was cut short is played again from its start: it comes out the same.
    anew = dataclasses.replace(run, batch_size=max(run.batch_size, 500), overwrite=True)
    evaluated = SharedModel(run.model, run.seed)  # apart: batch statistics stay as on a Supervisor
    scorer = ModelScorer(anew, evaluated, dataset.test_images, dataset.test_labels)
    recorder = Recorder(anew, scorer)
    records = SimulationRecords(run, supervisor_flags.read(), recorder, simulation)
    try:
        return _play(simulation, records)
    finally:
        executor.shutdown(cancel_futures=True)


def _play(simulation: Simulation, records: SimulationRecords) -> int:
    """Let the run happen; Ctrl-C ends it with its records written."""
    interrupted: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        del frame
        logging.info("%s: stopping", signal.Signals(number).name)
        interrupted.append(number)

    begun = time.perf_counter(), time.process_time()
    with handle_signals(interrupt), records.dashboard:
        reason = simulation.play(records.keep, lambda: bool(interrupted))
    logging.info(
        "%d updates, %.3f simulated seconds, in %.2f s of this machine, %.2f s of its cores",
        simulation.shards[0].core.version,
        simulation.clock.now,
        time.perf_counter() - begun[0],
        time.process_time() - begun[1],
    )
    if reason == "interrupted" and not interrupted:
        logging.error("every worker is dead and none returns: the run cannot go on")
    records.finish(reason)
    return EXIT_OF_STOP.get(reason, EXIT_DONE)


def _refuse_real_run(run: Run) -> None:
    """Do not write over what real processes have left."""
    try:
        simulated = "simulator" in json.loads((run.run_dir / "summary.json").read_text())
    except (OSError, ValueError):
        simulated = not (run.run_dir / "checkpoints").exists()
    if not simulated:
        raise ConfigurationError(
            f"--run_dir={run.run_dir} holds a run of real processes; give the simulation another "
            "--run_dir, or --overwrite the records of that run."
        )
