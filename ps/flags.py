"""Flags that only a PS reads."""

from __future__ import annotations

import dataclasses

from absl import flags

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.flags import Topic, advanced, choice, integer, number, switch
from thinwire.runtime.run.settings import Run

FLAGS = flags.FLAGS

#: --journal values.
JOURNAL = ("auto", "on", "off")

TOPICS = (
    Topic(
        "Parameter server",
        (
            integer("id_ps", 0, "Which shard this is, 0..nb_ps-1.", "number", low=0),
            switch("insecure", "Allow listening beyond this machine to whoever comes."),
            choice(
                "journal",
                "auto",
                "Whether a PS records what it accepts, so that no acknowledged update is lost when "
                "it dies; auto: where a push is below a tenth of the model.",
                JOURNAL,
            ),
            *advanced(
                number(
                    "start_timeout_seconds",
                    600.0,
                    "Synchronous runs wait this long for all workers, then start with those "
                    "present.",
                    "seconds",
                    low=0.0,
                ),
                number(
                    "linger_seconds",
                    15.0,
                    "Time that a finished PS waits for workers and Supervisor to leave.",
                    "seconds",
                    low=0.0,
                ),
                switch(
                    "resume_only",
                    "End, rather than begin anew, where the run directory has no checkpoint of "
                    "this PS: it takes the place of one that is lost.",
                ),
                switch(
                    "stay",
                    "Keep the port of a finished run's PS, serving nothing, until a signal: for "
                    "engines that start again what has ended, and probe whether it listens.",
                ),
                switch(
                    "preload_keras",
                    "With --model_from=worker: import Keras while the model is awaited, for "
                    "optimizers that need it.",
                ),
                integer(
                    "max_model_bytes",
                    8 << 30,
                    "Largest model, as float32, that a worker may offer to a PS without one.",
                    "bytes",
                    low=1,
                ),
            ),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class PsFlags:
    """One shard's own settings."""

    id_ps: int
    bind: str
    port: int
    insecure: bool
    start_timeout_seconds: float
    linger_seconds: float
    journal: str = "auto"
    max_model_bytes: int = 8 << 30
    preload_keras: bool = False
    resume_only: bool = False
    stay: bool = False

    @property
    def node(self) -> str:
        """Name of the shard's folders in the run directory."""
        return f"ps-{self.id_ps}"


def check(run: Run, given: flags.FlagValues = FLAGS) -> None:
    """Refuse what cannot work, before anything heavy is imported.

    Raises:
        ConfigurationError: A shard that the run does not have, or an address beyond this machine
            without certificates, token or --insecure, or a --checkpoint_dir of no use.
    """
    from thinwire.proto.grpc import check_bind

    own = read(run.addresses, given)
    if own.id_ps >= run.nb_ps:
        raise ConfigurationError(
            f"--id_ps={own.id_ps}: this run has shards 0..{run.nb_ps - 1} (--nb_ps, --ps_hosts)."
        )
    check_bind(own.bind, own.insecure, run.credentials.protection)
    if run.checkpoint_dir is not None:
        from thinwire.runtime.persistence.places import CHECKPOINTS, check_place

        check_place(run.checkpoint_dir, CHECKPOINTS)


def read(addresses: tuple[str, ...], given: flags.FlagValues = FLAGS) -> PsFlags:
    """Return this shard's settings; `addresses` are those of all shards."""
    port = int(addresses[given.id_ps].rpartition(":")[2]) if given.id_ps < len(addresses) else 0
    return PsFlags(
        id_ps=given.id_ps,
        bind=given.ip_PS,
        port=port,
        insecure=given.insecure,
        start_timeout_seconds=given.start_timeout_seconds,
        linger_seconds=given.linger_seconds,
        journal=given.journal,
        max_model_bytes=given.max_model_bytes,
        preload_keras=given.preload_keras,
        resume_only=given.resume_only,
        stay=given.stay,
    )
