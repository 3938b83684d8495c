"""The parameter server role: find or receive the model of a shard, and serve it; return an exit
code.
"""

from __future__ import annotations

import threading

from absl import logging

from thinwire.ops.offer import read_offer
from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import GrpcServer
from thinwire.ps import flags as ps_flags
from thinwire.ps.flags import PsFlags
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.ps.scripts.initial_model import InitialModel, model_of_flags, model_of_offer
from thinwire.ps.scripts.offering import NobodyAdmitted, OfferStage
from thinwire.ps.service.dialogues.offer import ReceivedOffer
from thinwire.ps.service.handshake import guard_of
from thinwire.ps.shard.preparation import PreparedShard
from thinwire.ps.shard.process import ShardProcess
from thinwire.runtime.keras_backend import choose_backend_on_processor
from thinwire.runtime.malloc import return_freed_memory
from thinwire.runtime.persistence.places import discard_checkpoints
from thinwire.runtime.run.directory import clear_node
from thinwire.runtime.run.lock import LockOwner
from thinwire.runtime.run.quiet import import_quietly
from thinwire.runtime.run.resuming import OtherRun
from thinwire.runtime.run.settings import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REFUSED, Run
from thinwire.runtime.run.signals import handle_signals


def main(run: Run) -> int:
    """Serve one shard of the parameter server until the run has ended; return the exit code.

    Raises:
        ConfigurationError: The port is in use, or the run directory holds another run.
        Unreachable, Refused: A shard with id 1 or higher cannot connect to shard 0, or shard 0
            refuses it.
    """
    settings = ps_flags.read(run.addresses)
    code = _serve(run, settings)
    if code == EXIT_DONE and settings.stay:
        _stay(run, settings)
    return code


def _stay(run: Run, own: PsFlags) -> None:
    """Keep a finished shard's network port open until a signal arrives; close all clients'
    streams.
    """
    ended = threading.Event()
    with handle_signals(lambda number, frame: ended.set()):
        listening = GrpcServer(
            own.bind, own.port, lambda stream: stream.close(), guard=guard_of(run)
        )
        logging.info("the run is finished; --stay keeps this PS running until it receives a signal")
        ended.wait()
        listening.stop(0.5)


def _serve(run: Run, own: PsFlags) -> int:
    """Serve one shard like `main`, but ignore the flag --stay; return the exit code."""
    if run.overwrite:
        _discard(run, own)
    saved, why = SavedShard(run, own.node), ""
    if saved.last.script_failed and not (run.resume or own.resume_only):
        _discard(run, own)
        saved, why = SavedShard(run, own.node), ", because the script of the run before failed"
    if saved.last.core is None:
        logging.info("run %s: begins%s", run.run_dir, why)
    if own.resume_only and saved.last.core is None:
        raise ConfigurationError(
            f"the node {own.node} was lost, but {saved.where} on this machine has no checkpoint of "
            "the node: either none was written yet (--checkpoint_interval_seconds), or it is on "
            "the disk of the lost machine. Expected --checkpoint_dir, or --run_dir on a disk that "
            "all machines share; the same command begins the run again."
        )
    if not run.model_is_offered:
        model = model_of_flags(run, own.id_ps)
        return_freed_memory()  # free the memory of the Keras network from which the model was built
        return _run(ShardProcess.open(PreparedShard.of(run, own, model, saved)))
    if saved.last.offer is None:
        if saved.last.core is not None:
            raise ConfigurationError(
                f"--run_dir={run.run_dir} contains a run whose model came from flags, but this run "
                "has --model_from=worker; give it another --run_dir, or --overwrite the old run."
            )
        return _serve_offered(run, own, saved)
    # With --resume, workers offer the model of phase 0 (the script's first model) again.
    if run.resume and not saved.last.phase:
        return _serve_offered(run, own, saved)
    if own.preload_keras:
        _preload_keras()
    model = saved_model(run, own, saved)
    logging.info("this PS shard loads the model that a worker sent before the shard's restart")
    return _run(ShardProcess.open(PreparedShard.of(run, own, model, saved)))


def _preload_keras() -> None:
    """Import Keras with a backend on the processor, if this environment has a backend.

    Without a backend, an offer whose optimizer needs Keras is refused when it arrives.
    """
    try:
        choose_backend_on_processor()
    except ConfigurationError as error:
        logging.warning("--preload_keras has no effect: %s", error)
        return
    import_quietly("keras")


def _run(shard: ShardProcess | None) -> int:
    """Serve an open shard until the run ends or a signal arrives; return the exit code.

    Args:
        shard: The open shard; None if the run is already finished.
    """
    if shard is None:
        return EXIT_DONE
    with handle_signals(shard.on_signal):
        return shard.run_to_end()


def saved_model(run: Run, own: PsFlags, saved: SavedShard) -> InitialModel:
    """Build the model from a saved description; leave out the weights, which the checkpoint holds.

    Raises:
        ConfigurationError: This version of Thinwire refuses the saved description of a script's
            model, although an earlier version accepted the description. In this case no file of the
            run is deleted.
    """
    try:
        offer = read_offer(saved.last.offer or "", own.max_model_bytes)
        return model_of_offer(run, own.id_ps, offer, None)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"--run_dir={run.run_dir} contains a model from a worker, but this PS cannot serve "
            f"the model: {error} The model's checkpoints in {saved.where} are kept. Correct the "
            "problem in the script or in this command; to train a corrected script, give the run "
            "another --run_dir, or --overwrite this one."
        ) from error


def _discard(run: Run, own: PsFlags) -> None:
    """Delete the files and checkpoints that this shard has stored in an earlier run."""
    clear_node(run.run_dir, own.node)
    if run.checkpoint_dir is not None:
        discard_checkpoints(run.checkpoint_dir, own.node, str(LockOwner.here("PS", own.id_ps)))


def _serve_offered(run: Run, own: PsFlags, saved: SavedShard) -> int:
    """Wait for a worker's offered model, then serve that model; return the exit code."""
    # Workers that took part before a --resume send the id of the saved run.
    stage = OfferStage(run, own, run_id=saved.last.run_id)
    stage.listen()
    if own.preload_keras:
        threading.Thread(target=_preload_keras, name="keras", daemon=True).start()
    try:
        with handle_signals(lambda number, frame: stage.interrupt()):
            shard = start_offered(run, own, saved, stage)
    except NobodyAdmitted as error:
        logging.error("%s", error)
        return EXIT_REFUSED
    if shard is None:
        return EXIT_INTERRUPTED
    with handle_signals(shard.on_signal):
        if stage.interrupted:
            shard.interrupt()
        return shard.run_to_end()


def start_offered(
    run: Run, own: PsFlags, saved: SavedShard, stage: OfferStage
) -> ShardProcess | None:
    """Wait for a worker that offers its script's model, and start a shard with that model.

    Args:
        run: Settings of the training run.
        own: Settings of this PS shard from its command-line flags.
        saved: Saved files of the shard, which contain no model to continue.
        stage: Open network port at which workers offer (send) their model to the shard.

    Returns:
        The started shard, or None if this process was interrupted first.

    Raises:
        NobodyAdmitted: The shard has refused all clients that connected.
        ConfigurationError, Unreachable, RequestRejected: `ShardProcess.open` could not start the
            shard.
    """
    prepared: PreparedShard | None = None
    shard: ShardProcess | None = None
    try:
        while prepared is None and (received := stage.next_offer()) is not None:
            prepared = _prepared_for_offer(run, own, saved, stage, received)
        if prepared is not None:
            shard = ShardProcess.open(prepared, stage)
    finally:
        stage.close(shard is not None)
    return shard


def _prepared_for_offer(
    run: Run, own: PsFlags, saved: SavedShard, stage: OfferStage, received: ReceivedOffer
) -> PreparedShard | None:
    """Build the shard for a worker's offered model; on failure refuse the offer and return None."""
    try:
        model = model_of_offer(run, own.id_ps, received.offer, received.payload)
        prepared = PreparedShard.of(run, own, model, saved)
    except OtherRun as error:
        stage.refuse(received, f"{error}", pb.REASON_OTHER_PROGRAM)
        return None
    except Exception as error:  # noqa: BLE001 - Keras raises any type for odd arguments
        stage.refuse(received, f"{error}" or type(error).__name__)
        return None
    saved.programs.record(received.worker, received.program)
    return prepared
