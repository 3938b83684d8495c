"""Codes membership epochs (lists of live workers) as messages from shard 0 to other shards."""

from __future__ import annotations

from thinwire.ops.sync.base import Draw, Joiners
from thinwire.ops.sync.groups import Groups
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events


def encode_epoch(epoch: events.MembershipEpoch, groups: Groups) -> pb.Membership:
    """Return the wire message of a membership epoch; `groups` are the worker groups in force."""
    named, formed = epoch.incarnations or [0] * len(epoch.live), epoch.formed
    incarnations = dict(zip(epoch.live, named, strict=True))
    return pb.Membership(
        epoch=epoch.number,
        groups=[
            pb.Group(
                workers=[worker for worker in group if worker in incarnations],
                incarnations=[incarnations[worker] for worker in group if worker in incarnations],
            )
            for group in groups
        ],
        started=epoch.started,
        formed=[_group_of(group, formed) for group in formed.groups] if formed else [],
        formed_epoch=formed.epoch if formed else 0,
        draws=[pb.Draw(**vars(draw)) for draw in epoch.draws],
        over=[pb.OverStep(worker=worker, step=step) for worker, step in epoch.over.items()],
        joiners=[pb.Joiners(**vars(joiners)) for joiners in epoch.joiners],
    )


def decode_epoch(message: pb.Membership) -> events.MembershipEpoch:
    """Return the membership epoch that a wire message describes.

    Raises:
        Malformed: The number of steps or incarnations in the message of a membership epoch differs
            from the number of workers that they belong to.
    """
    incarnations: dict[int, int] = {}
    # Incarnation 0 means that shard 0 does not send the worker's incarnation.
    for group in message.groups:
        listed = group.incarnations or [0] * len(group.workers)
        if len(listed) != len(group.workers):
            raise Malformed(
                f"epoch {message.epoch}: a group does not list one incarnation for each worker"
            )
        incarnations |= zip(group.workers, listed, strict=True)
    live = tuple(sorted(incarnations))
    named = tuple(incarnations[worker] for worker in live)
    for draw in message.draws:
        if len(draw.after) != len(draw.workers) or len(draw.steps) not in (0, len(draw.workers)):
            raise Malformed(
                f"membership epoch {message.epoch}: a draw does not list one step for each worker"
            )
    if any(len(entry.after) != len(entry.members) for entry in message.joiners):
        raise Malformed(
            f"membership epoch {message.epoch}: joiners do not list one step for each member"
        )
    joiners = tuple(
        Joiners(tuple(entry.workers), entry.has_entered, tuple(entry.members), tuple(entry.after))
        for entry in message.joiners
    )
    draws = tuple(
        Draw(draw.number, draw.of_round, tuple(draw.workers), tuple(draw.steps), tuple(draw.after))
        for draw in message.draws
    )
    over = {entry.worker: entry.step for entry in message.over}
    return events.MembershipEpoch(
        message.epoch, live, message.started, _formed_of(message), named, draws, joiners, over
    )


def _formed_of(message: pb.Membership) -> events.GroupAssignment | None:
    if not message.formed:
        return None
    if any(len(group.workers) != len(group.steps) for group in message.formed):
        raise Malformed(
            f"membership epoch {message.epoch}: a group does not list one step for each worker"
        )
    after = {
        worker: step - 1
        for group in message.formed
        for worker, step in zip(group.workers, group.steps, strict=True)
        if step
    }
    groups = tuple(tuple(group.workers) for group in message.formed)
    return events.GroupAssignment(message.formed_epoch, groups, after)


def _group_of(group: tuple[int, ...], formed: events.GroupAssignment) -> pb.Group:
    """Return the wire message of one formed group of workers.

    The wire message of a worker group contains each worker's last step plus one, and 0 for a live
    worker that has not pushed yet.
    """
    steps = [formed.after[worker] + 1 if worker in formed.after else 0 for worker in group]
    return pb.Group(workers=group, steps=steps)
