"""The run's status document: counters of shard 0, of all other shards and of the workers."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.ops.privacy.accountant import privacy_block
from thinwire.ops.routing.counters import BLOCK
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import MAX_MESSAGE_BYTES
from thinwire.ps.core.core import PsCore
from thinwire.ps.datagrams.counters import DatagramCounts, summary_block
from thinwire.ps.wire import reports
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry import run_status

#: Largest size of a status document in a message, in characters. A character takes one byte,
#: because the JSON text is ASCII. The remaining bytes of the message are for its other fields.
_LONGEST_STATUS = MAX_MESSAGE_BYTES - 1024


@dataclasses.dataclass(frozen=True)
class StatusSources:
    """Functions that return what a status document needs of a shard. A server, the Simulator and
    tests each pass their own functions.

    Attributes:
        core: Function that returns the shard's current state machine.
        num_parameters: Function that returns the number of parameters of the whole model.
        run_id: Function that returns the run's random identifier; "" if it is not known yet.
        bytes_down: Function that returns worker id -> training bytes that the shard has sent.
        reports: Function that returns (role, id) of a node -> newest JSON document that the node
            reported. Other threads may change the dictionary meanwhile.
        received: Function that returns the counts of received datagrams, or None if the training
            method sends no datagrams.
        refused_peers: Function that returns reason -> number of clients that were refused or
            disconnected.
        journal: Function that returns the journal's counters for the run's summary, or {} without a
            journal.
        awaits: Function that returns True if another shard has not sent its last counters yet.
        runs_script: Function that returns True if the script of a worker is expected to continue. A
            worker leaves the training at the end of each `fit` of its script, and joins again at
            the next `fit`.
    """

    core: Callable[[], PsCore]
    num_parameters: Callable[[], int]
    run_id: Callable[[], str]
    bytes_down: Callable[[], dict[int, int]]
    reports: Callable[[], dict[tuple[int, int], str]]
    received: Callable[[], DatagramCounts | None] = lambda: None
    refused_peers: Callable[[], dict[str, int]] = dict
    journal: Callable[[], dict[str, Any]] = dict
    awaits: Callable[[], bool] = bool
    runs_script: Callable[[int], bool] = lambda worker: False


class StatusReporter:
    """Maker of a shard's status documents, for supervisors, the run's summary and shard 0.

    For each status document, the writer thread reads the current values of the counters.

    Args:
        run: Settings of the training run.
        sources: Functions that return the shard's counters and its current model.
    """

    def __init__(self, run: Run, sources: StatusSources) -> None:
        self._run, self._sources = run, sources
        self._privacy = run.method.privacy, run.dp_delta

    @property
    def _core(self) -> PsCore:
        return self._sources.core()

    def about(self) -> dict[str, Any]:
        """Return the settings of the run that the shard sends in the Welcome message to a
        client.
        """
        run = self._run
        return {
            "method": run.method.name,
            "seams": self._composition(),
            "iter_max": run.iter_max or 0,
            "nb_workers": run.nb_workers,
            "seed": run.seed,
        }

    def shard_document(self, is_last: bool = False) -> str:
        """Return the counters of a shard other than 0 as JSON, which the shard sends to shard 0.

        Args:
            is_last: True if this is the last report of the shard.
        """
        core = self._core
        model = core.model
        figures = {
            "bytes_down": self._sources.bytes_down(),
            "rejected": dict(core.counters.rejected),
            "weighting": model.memory(),
            "down": model.downlink.summary(),
            "group_staleness": core.counters.groups.histograms(),
            "refused_peers": self._sources.refused_peers(),
            "is_last": is_last,
            "membership": {"lost_updates": core.counters.lost_updates},
        }
        if guards := core.guard_summary():
            figures["guards"] = guards["refused"]
        if (received := self._sources.received()) is not None:
            figures["datagrams"] = received.summarized().to_dict()
        return json.dumps(figures)

    def document(self) -> str:
        """Return the run's status as JSON text that fits into one wire message.

        If the status document is too long, it omits the label counts of the workers' data, which
        take most of the space and rarely change.
        """
        status = self.status()
        text = status.to_json()
        if len(text) <= _LONGEST_STATUS:
            return text
        workers = [dataclasses.replace(worker, labels={}) for worker in status.workers]
        return dataclasses.replace(status, workers=workers).to_json()

    def status(self) -> run_status.RunStatus:
        """Return the status of the whole run, computed from the counters that shard 0 has
        received.
        """
        run, core = self._run, self._core
        workers = self._workers()
        counters, membership = core.counters, core.membership
        return run_status.RunStatus(
            run_id=self._sources.run_id(),
            method=run.method.name,
            seams=self._composition(),
            nb_workers=run.nb_workers,
            nb_ps=run.nb_ps,
            num_parameters=self._sources.num_parameters(),
            seed=run.seed,
            iter_max=run.iter_max or 0,
            version=core.version,
            generation=core.config.generation,
            samples=core.samples,
            seconds=core.seconds(),
            learning_rate=core.model.learning_rate,
            staleness=run_status.Histogram(dict(counters.staleness)),
            rejected_pushes=self._all_rejected(),
            bytes_up=sum(worker.bytes_up for worker in workers),
            bytes_down=sum(worker.bytes_down for worker in workers),
            pushes=sum(worker.pushes for worker in workers),
            pulls=counters.num_replies,
            membership=run_status.MembershipCounts(
                epochs=membership.epoch % (1 << 16),
                left=membership.num_left,
                returned=membership.num_returned,
                lost_updates=self._lost_updates(),
            ),
            workers=workers,
            policies=self._policies(workers),
            stop_reason=core.stop_reason,
        )

    def states(self) -> dict[int, str]:
        """Return worker id -> state, for example "training", of every worker that has joined."""
        core = self._core
        waits = core.rounds.waiting()
        return {worker: self._state(worker, worker in waits) for worker in core.known_workers()}

    def guards(self) -> dict[str, Any]:
        """Return the numbers of pushes that any shard refused, and the workers in quarantine."""
        block = self._core.guard_summary()
        if not block:
            return {}
        refused = {why: collections.Counter(by) for why, by in block["refused"].items()}
        for text in self._reports(pb.ROLE_SHARD).values():
            for reason, counts in reports.tables(text, "guards").items():
                refused.setdefault(reason, collections.Counter()).update(counts)
        return {"guards": block | {"refused": {why: dict(by) for why, by in refused.items()}}}

    def privacy(self) -> dict[str, Any]:
        """Return the run's privacy guarantee, such as epsilon; {} if the training method has no
        privacy bound.

        The status states the privacy guarantee for the worker whose updates were merged into the
        most rounds. The privacy accountant counts an upper bound of a worker's rounds, because a
        lost worker may have pushed in one more round on another shard, and updates that a crash has
        undone were sent to workers, too.
        """
        core = self._core
        pushes = [core.counters.worker(worker).pushes for worker in core.known_workers()]
        most = min(core.version, max(pushes, default=0) + core.membership.num_left)
        return privacy_block(*self._privacy, most + self._lost_updates())

    def _policies(self, workers: list[run_status.WorkerMetrics]) -> dict[str, Any]:
        """Return entries of the run's status that only some runs have, such as UDP datagram
        counts.
        """
        summary = self._core.summary()
        weighting, down = summary.pop("weighting"), summary.pop("down")
        return {
            **summary,
            "groups": self._groups(summary["groups"]),
            **self._over_shards("weighting", weighting),
            **self._over_shards("down", down),
            **self._datagrams(),
            **self.guards(),
            **self.privacy(),
            **self._refused_peers(),
            **_restarted(workers),
            **self._sources.journal(),
        }

    def _composition(self) -> dict[str, str]:
        """Return kind of policy (for example "codec") -> chosen policy, as in the run's summary."""
        method = self._run.method
        own = {} if self._run.policy is None else {"policy": self._run.policy.label}
        return {**method.choices, "collective": method.collective, **own}

    def _workers(self) -> list[run_status.WorkerMetrics]:
        down, states = self._bytes_down(), self.states()
        clocks = self._core.rounds.clocks()
        fastest = max(clocks.values(), default=0)
        return [
            self._worker(w, states[w], clocks.get(w, 0), fastest, down.get(w, 0))
            for w in sorted(states)
        ]

    def _worker(
        self, worker: int, state: str, clock: int, fastest: int, bytes_down: int
    ) -> run_status.WorkerMetrics:
        totals = self._core.counters.worker(worker)
        reported = reports.own_counters(self._sources.reports().get((pb.ROLE_WORKER, worker), "{}"))
        return run_status.WorkerMetrics(
            id=worker,
            state=state,  # type: ignore[arg-type]
            clock=clock,
            lag=fastest - clock,
            pushes=totals.pushes,
            samples=totals.samples,
            local_steps=totals.local_steps,
            bytes_down=bytes_down,
            loss=totals.loss,
            refused=totals.refused + reported.get("non_finite", 0),
            **{name: value for name, value in reported.items() if name != "non_finite"},
        )

    def _state(self, worker: int, waits: bool) -> str:
        membership = self._core.membership.state_of(worker)
        if membership == "left":
            if self._core.stop_reason is None:
                return "between fits" if self._sources.runs_script(worker) else "left"
            return "left" if self._sources.awaits() else "done"
        return "suspect" if membership == "suspect" else ("waiting" if waits else "training")

    def _bytes_down(self) -> dict[int, int]:
        totals = dict(self._sources.bytes_down())
        for text in self._reports(pb.ROLE_SHARD).values():
            for worker, count in reports.by_worker(text, "bytes_down").items():
                totals[worker] = totals.get(worker, 0) + count
        return totals

    def _over_shards(self, block: str, own: dict[str, int]) -> dict[str, dict[str, int]]:
        """Return a policy's memory counters summed over all shards; {} if the policy uses no
        memory.
        """
        total = self._totals(block, own)
        return {block: dict(total)} if total["bytes"] else {}

    def _datagrams(self) -> dict[str, Any]:
        """Return the datagram counts of all shards and workers; {} if the training method sends no
        datagrams.
        """
        received = self._sources.received()
        if received is None:
            return {}
        reported = map(reports.received, self._reports(pb.ROLE_SHARD).values())
        sent = {
            worker: counts
            for worker, text in self._reports(pb.ROLE_WORKER).items()
            if worker in self._core.known_workers() and (counts := reports.sent(text)) is not None
        }
        channels = self._run.method.router.channels
        return {BLOCK: summary_block([received, *reported], sent, channels)}

    def _groups(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the worker groups of shard 0, with staleness histograms of all other shards."""
        histograms = {
            str(shard): reports.tables(text, "group_staleness")
            for shard, text in self._reports(pb.ROLE_SHARD).items()
        }
        return own | ({"histograms_of_shards": histograms} if histograms else {})

    def _refused_peers(self) -> dict[str, dict[str, int]]:
        """Return refusal reason -> number of refused clients; {} if no client was refused."""
        total = self._totals("refused_peers", self._sources.refused_peers())
        return {"refused_peers": dict(total)} if total else {}

    def _lost_updates(self) -> int:
        """Return the number of updates lost in crashes, summed over all shards of the run."""
        lost = {"lost_updates": self._core.counters.lost_updates}
        return self._totals("membership", lost)["lost_updates"]

    def _reports(self, role: int) -> dict[int, str]:
        """Return client id -> newest status report, for the clients of one role such as workers."""
        # copy the reports of nodes, because reader threads write to `reports` meanwhile
        documents = self._sources.reports().copy()
        return {number: text for (client, number), text in documents.items() if client == role}

    def _totals(self, block: str, own: Mapping[str, int]) -> collections.Counter[str]:
        """Return counters summed over all shards; `own` contains shard 0's counters."""
        total = collections.Counter(own)
        for text in self._reports(pb.ROLE_SHARD).values():
            total.update(reports.counts(text, block))
        return total

    def _all_rejected(self) -> dict[str, int]:
        """Return reason -> number of pushes that shards rejected or that workers did not send."""
        total = self._totals("rejected", self._core.counters.rejected)
        for worker, text in self._reports(pb.ROLE_WORKER).items():
            if worker in self._core.known_workers():
                total["non_finite"] += reports.own_counters(text).get("non_finite", 0)
        return {reason: count for reason, count in total.items() if count}


def _restarted(workers: list[run_status.WorkerMetrics]) -> dict[str, dict[str, int]]:
    """Return worker id -> number of restarts by a `Cluster`; {} if no worker was restarted."""
    counts = {str(worker.id): worker.restarts for worker in workers if worker.restarts}
    return {"restarted_workers": counts} if counts else {}
