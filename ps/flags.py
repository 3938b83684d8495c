"""Command-line flags that only a parameter server (PS) reads."""

from __future__ import annotations

import dataclasses

from absl import flags

from thinwire.ops.options import Topic, advanced, choice, integer, number, switch
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import Run

FLAGS = flags.FLAGS

#: Accepted values of the flag --journal.
JOURNAL = ("auto", "on", "off")

TOPICS = (
    Topic(
        "Parameter server",
        (
            integer("id_ps", 0, "Number of this PS shard, from 0 to nb_ps-1.", "number", low=0),
            switch(
                "insecure",
                "Allow listening on addresses beyond this machine without authentication.",
            ),
            choice(
                "journal",
                "auto",
                "Write a journal of accepted events, so that no acknowledged update is lost when "
                "a PS dies; auto: only if a push is smaller than a tenth of the model.",
                JOURNAL,
            ),
            *advanced(
                number(
                    "start_timeout_seconds",
                    600.0,
                    "Time that a synchronous run waits for all workers before it starts with the "
                    "workers that are present.",
                    "seconds",
                    low=0.0,
                ),
                number(
                    "linger_seconds",
                    15.0,
                    "Time that a finished PS waits until workers and Supervisor have left.",
                    "seconds",
                    low=0.0,
                ),
                switch(
                    "resume_only",
                    "End a PS with an error, rather than begin the run again, if the run "
                    "directory has no checkpoint of this PS: for a PS that replaces a lost PS.",
                ),
                switch(
                    "stay",
                    "After the run, keep the PS port open until a signal, without serving: for "
                    "cluster managers that restart ended processes, and probe ports.",
                ),
                switch(
                    "preload_keras",
                    "Import Keras while the PS waits for a model (--model_from=worker), for "
                    "optimizers that need Keras.",
                ),
                integer(
                    "max_model_bytes",
                    8 << 30,
                    "Largest model, as float32, that a PS without a model takes from a worker.",
                    "bytes",
                    low=1,
                ),
            ),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class PsFlags:
    """Settings of one shard of the parameter server, read from its command-line flags."""

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
        """Name of the PS shard's folders in the run directory, for example ``ps-0``."""
        return f"ps-{self.id_ps}"


def check(run: Run, given: flags.FlagValues = FLAGS) -> None:
    """Reject unusable settings of a parameter server before slow imports (TensorFlow, gRPC).

    Raises:
        ConfigurationError: The run has no shard with the id --id_ps, or --checkpoint_dir is
            unusable, or other machines can reach the server's address although certificates, token
            and --insecure are missing.
    """
    from thinwire.proto.grpc import check_bind

    settings = read(run.addresses, given)
    if settings.id_ps >= run.nb_ps:
        raise ConfigurationError(
            f"--id_ps={settings.id_ps}: this run has shards 0..{run.nb_ps - 1} (--nb_ps, "
            "--ps_hosts); expected one of these numbers."
        )
    check_bind(settings.bind, settings.insecure, run.credentials.protection)
    if run.checkpoint_dir is not None:
        from thinwire.runtime.persistence.places import CHECKPOINTS, check_place

        check_place(run.checkpoint_dir, CHECKPOINTS)


def read(addresses: tuple[str, ...], given: flags.FlagValues = FLAGS) -> PsFlags:
    """Return the settings of this parameter server process from its command-line flags.

    Args:
        addresses: ``host:port`` of each shard, in the order of the shards' ids.
        given: Parsed command-line flags of the parameter server process.
    """
    port = int(addresses[given.id_ps].rpartition(":")[2]) if given.id_ps < len(addresses) else 0
    own = {field.name for field in dataclasses.fields(PsFlags)} - {"bind", "port"}
    values = {name: getattr(given, name) for name in own}
    return PsFlags(bind=given.ip_PS, port=port, **values)
