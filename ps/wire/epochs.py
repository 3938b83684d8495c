"""Membership epochs as messages of the wire, from shard 0 to the others."""

from __future__ import annotations

from thinwire.ops.sync.base import Draw, Joiners
from thinwire.ops.sync.groups import Groups
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events


def encode_epoch(epoch: events.MembershipEpoch, groups: Groups) -> pb.Membership:
    """Return the message for an epoch; `groups` are those in force."""
    named, formed = epoch.incarnations or [0] * len(epoch.live), epoch.formed
    lives = dict(zip(epoch.live, named, strict=True))
    return pb.Membership(
        epoch=epoch.number,
        groups=[
            pb.Group(
                workers=[worker for worker in group if worker in lives],
                incarnations=[lives[worker] for worker in group if worker in lives],
            )
            for group in groups
        ],
        started=epoch.started,
        formed=[_group_of(group, formed) for group in formed.groups] if formed else [],
        formed_epoch=formed.epoch if formed else 0,
        draws=[pb.Draw(**vars(each)) for each in epoch.draws],
        over=[pb.OverStep(worker=worker, step=step) for worker, step in epoch.over.items()],
        joiners=[pb.Joiners(**vars(each)) for each in epoch.joiners],
    )


def decode_epoch(message: pb.Membership) -> events.MembershipEpoch:
    """Return the epoch of a message.

    Raises:
        Malformed: A group has other steps than workers, or a draw or a joiner other steps before
            it.
    """
    lives: dict[int, int] = {}
    for group in message.groups:  # of a shard 0 that names no lives, these are 0
        given = group.incarnations or [0] * len(group.workers)
        if len(given) != len(group.workers):
            raise Malformed(f"epoch {message.epoch}: a group of other lives than workers")
        lives |= zip(group.workers, given, strict=True)
    live = tuple(sorted(lives))
    named = tuple(lives[worker] for worker in live)
    for each in message.draws:
        if len(each.after) != len(each.workers) or len(each.steps) not in (0, len(each.workers)):
            raise Malformed(f"epoch {message.epoch}: a draw of other steps than workers")
    if any(len(each.after) != len(each.members) for each in message.joiners):
        raise Malformed(f"epoch {message.epoch}: a joiner of other steps than members")
    joiners = tuple(
        Joiners(tuple(each.workers), each.has_entered, tuple(each.members), tuple(each.after))
        for each in message.joiners
    )
    draws = tuple(
        Draw(each.number, each.of_round, tuple(each.workers), tuple(each.steps), tuple(each.after))
        for each in message.draws
    )
    over = {each.worker: each.step for each in message.over}
    return events.MembershipEpoch(
        message.epoch, live, message.started, _formed_of(message), named, draws, joiners, over
    )


def _formed_of(message: pb.Membership) -> events.GroupAssignment | None:
    if not message.formed:
        return None
    if any(len(group.workers) != len(group.steps) for group in message.formed):
        raise Malformed(f"epoch {message.epoch}: a group of other steps than workers")
    after = {
        worker: step - 1
        for group in message.formed
        for worker, step in zip(group.workers, group.steps, strict=True)
        if step
    }
    groups = tuple(tuple(group.workers) for group in message.formed)
    return events.GroupAssignment(message.formed_epoch, groups, after)


def _group_of(group: tuple[int, ...], formed: events.GroupAssignment) -> pb.Group:
    """Steps travel plus one: a live worker may have taken none."""
    steps = [formed.after[worker] + 1 if worker in formed.after else 0 for worker in group]
    return pb.Group(workers=group, steps=steps)
