"""Which policies go together: `validate` checks a method, `check_shards` the shards it runs on.

Every check that looks at more than one policy stands here; what one policy refuses by itself stands
in its own class.
"""

from __future__ import annotations

from thinwire.ops.aggregation.aggregates import LEAST_MEMBERS
from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.codecs.dense import Dense, Sparsifier
from thinwire.ops.codecs.error_feedback import coding_of
from thinwire.ops.codecs.wrappers import has_clipping
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink.exact import DownDelta, DownDense
from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.local import LOCAL_FLAGS, LocalUpdate
from thinwire.ops.routing.reliable import Reliable
from thinwire.ops.sync.base import SyncPolicy
from thinwire.ops.sync.groups import uneven
from thinwire.ops.sync.rule import ClosedGroupSync, GroupSync
from thinwire.ops.types import VALUE_BITS, ConfigurationError, Kind, describe
from thinwire.ops.weighting.by_samples import BySamples
from thinwire.ops.weighting.by_staleness import Unweighted
from thinwire.ops.weighting.dc_asgd import DcAsgd
from thinwire.ops.weighting.per_entry import PerEntry

#: Interface -> the one policy that leaves nothing for a parameter server to do.
_ONLY = {
    "codec": Dense,
    "down_codec": DownDense,
    "router": Reliable,
    "weighting": Unweighted,
}


def rule_for(rule: SyncPolicy, collective: str) -> SyncPolicy:
    """Return the rule with rounds closed to joiners, where a collective needs that."""
    plain = len(rule.groups) == 1 and rule == GroupSync(rule.groups)  # all that one group can be
    closes = plain and collective != THROUGH_PS
    return ClosedGroupSync(rule.groups) if closes else rule


def validate(method: Method) -> list[str]:
    """Refuse what cannot work; return warnings about what has no effect.

    Raises:
        ConfigurationError: The pacer's updates are not what the codec sends, or the weighting
            cannot weigh them, the rule of release cannot merge them, or the PS cannot step with
            them.
    """
    _check_kinds(method)
    _check_collective(method)
    _check_overlap(method)
    warnings = method.router.check(method.codec)
    _check_server(method)
    check_dense(method)
    _check_local(method)
    _check_ahead(method)
    _check_script_steps(method)
    _check_privacy(method)
    warnings += [text for is_idle, text in _idle_choices(method) if is_idle]
    warnings += _check_aggregate(method)
    warning = uneven(method.sync.groups)
    return [*warnings, warning] if warning else warnings


def _check_kinds(method: Method) -> None:
    """Refuse policies that take gradients where changes of weights travel."""
    if method.codec.kind is Kind.DELTA and method.takes_local_steps:
        raise ConfigurationError(
            f"--codec={method.choices['codec']} makes its own weight change of every gradient; "
            f"--pacer={method.choices['pacer']} already sends changes of weights."
        )
    if isinstance(method.weighting, DcAsgd) and method.kind is Kind.DELTA:
        raise ConfigurationError(
            f"--weighting=dc_asgd compensates gradients; --pacer={method.choices['pacer']} with "
            f"--codec={method.choices['codec']} sends changes of weights. Take another weighting, "
            "or --pacer=every with a codec of gradients."
        )


def _check_collective(method: Method) -> None:
    """Refuse a collective with anything that only a parameter server can do.

    Raises:
        ConfigurationError: Not one synchronous group, or updates that are not plain and dense.
    """
    if method.collective == THROUGH_PS:
        return
    here = f"--collective={method.collective}"
    if not method.sync.takes_all:
        raise ConfigurationError(
            f"{here} sums over all workers in every round, and --fraction or --draws leave some "
            "out; leave these out, or take --collective=ps."
        )
    if not isinstance(method.sync, ClosedGroupSync):
        raise ConfigurationError(
            f"{here} sums over all workers in every round, and --sync={method.choices['sync']} "
            "does not wait for all of them; take --method=bsp or --method=esync, or "
            "--collective=ps."
        )
    for interface, policy in _ONLY.items():
        if not isinstance(getattr(method, interface), policy):
            raise ConfigurationError(
                f"{here} sends plain dense sums from worker to worker, and this is "
                f"--{interface}={method.choices[interface]}; leave --{interface} out, or take "
                "--collective=ps."
            )
    if method.server.awaits_offer or method.server.needs_whole_variables:
        raise ConfigurationError(
            f"{here} steps one flat vector on each worker, and "
            f"--server_optimizer={method.server.optimizer} needs variables with their names and "
            "shapes. Take --collective=ps, or another --server_optimizer."
        )
    if describe(method.server).get("global_lr_schedule"):
        raise ConfigurationError(
            f"{here}: workers do not know how much of the budget is spent, so that "
            "--global_lr_schedule cannot act; leave it out, or take --collective=ps."
        )
    if method.codec.value_dtype != "float32":
        raise ConfigurationError(
            f"{here} sums float32, and this is --value_dtype={method.codec.value_dtype}; leave it "
            "out, or take --collective=ps."
        )


def _check_overlap(method: Method) -> None:
    """Refuse to compute ahead where the next step must start from the answer."""
    why = why_no_overlap(method)
    if method.overlap and why is not None:
        raise ConfigurationError(
            f"--overlap computes the next gradient before an exchange is answered; this is {why}. "
            "Leave one of them out."
        )


def why_no_overlap(method: Method) -> str | None:
    """Return what of a method needs an exchange's answer before the next step; None: nothing."""
    if method.takes_local_steps:
        return f"--pacer={method.choices['pacer']}, whose local steps start from the answer"
    if not method.sync.takes_all:
        return "--fraction or --draws, by which a worker may wait for many rounds"
    if method.collective != THROUGH_PS:
        return f"--collective={method.collective}, where every worker steps the model itself"
    if method.weighting.needs_copies:
        return (
            f"--weighting={method.choices['weighting']}, which needs the model that a gradient was "
            "computed at, and the PS keeps the one that it last gave"
        )
    return None


def check_dense(method: Method) -> None:
    """Refuse gradients of which only a part is sent, where the optimizer cannot step with them.

    Raises:
        ConfigurationError: They are not all sent.
    """
    if method.server.needs_dense and method.codec.sends_fraction:
        raise ConfigurationError(
            f"{method.server.described.name} divides by means over rows and columns of the "
            f"gradient, which are 0 where --codec={method.choices['codec']} sends nothing of "
            "them. Take --method=asgd or --method=bsp, or another optimizer."
        )


def _check_server(method: Method) -> None:
    """Refuse an optimizer on the PS where a codec's own changes of weights are added."""
    if method.kind is Kind.GRADIENT:
        return
    if method.server.awaits_offer:
        raise ConfigurationError(
            f"--server_optimizer=script steps with gradients, and --pacer="
            f"{method.choices['pacer']} with --codec={method.choices['codec']} sends changes of "
            "weights. Leave --server_optimizer out: the workers step with the script's optimizer."
        )
    if method.server.keeps_sparse or method.takes_local_steps:
        return
    raise ConfigurationError(
        f"--server_optimizer={method.server.optimizer} with --momentum={method.server.momentum:g} "
        f"and --weight_decay={method.server.weight_decay:g}: with "
        f"--pacer={method.choices['pacer']} "
        f"and --codec={method.choices['codec']} the PS adds changes of weights, which hold the "
        "learning rate already. Leave these out (the codec has its own momentum; for decay there "
        "is --worker_weight_decay, and for scripts what their compiled optimizer is given)."
    )


def _check_local(method: Method) -> None:
    """Refuse settings of local steps where no local steps are taken."""
    defaults = describe(LocalUpdate())
    given = [
        LOCAL_FLAGS[name]
        for name, value in describe(method.local).items()
        if value != defaults[name]
    ]
    if given and not (method.takes_local_steps or method.steps_on_workers):
        raise ConfigurationError(
            f"--{', --'.join(given)}: a worker takes local steps only with --pacer=esync, or "
            f"with --pacer=fixed and --local_steps above 1; this is --pacer="
            f"{method.choices['pacer']}. Leave out, or change the pacer."
        )


def _check_ahead(method: Method) -> None:
    """Refuse to begin local steps ahead of the model where none are taken."""
    if method.ahead and not method.takes_local_steps:
        raise ConfigurationError(
            f"--error_ahead={method.ahead:g}: a worker takes local steps only with --pacer=esync, "
            "or with --pacer=fixed and --local_steps above 1; this is --pacer="
            f"{method.choices['pacer']}. Leave it out, or change the pacer."
        )


def _check_script_steps(method: Method) -> None:
    """Refuse a script's own steps where what they change is not what travels."""
    if not method.steps_on_workers:
        return
    here = f"--local_optimizer={method.local.optimizer}"
    if method.kind is Kind.GRADIENT:
        raise ConfigurationError(
            f"{here}: the workers step by themselves, and --pacer={method.choices['pacer']} with "
            f"--codec={method.choices['codec']} sends gradients. Take --method=dgs, dgc, gd or "
            "esync, or --pacer=fixed with --local_steps above 1; or leave it out."
        )
    if has_clipping(method.codec) and not method.takes_local_steps:
        raise ConfigurationError(
            f"--dgc_clip_norm clips gradients, and with {here} changes of weights are sent. Leave "
            "it out, and give the script's optimizer a clipnorm."
        )
    if method.local.prox_mu and not method.takes_local_steps:
        raise ConfigurationError(
            f"--prox_mu={method.local.prox_mu:g} pulls local steps to the round's model, and with "
            f"--pacer={method.choices['pacer']} every step is a round. Leave it out, or take "
            "--pacer=fixed with --local_steps above 1."
        )


def refuse_local_epochs(method: Method, who: str) -> None:
    """Refuse rounds of epochs where there are none; `who` takes the steps.

    Raises:
        ConfigurationError: The method has such rounds.
    """
    if method.pacer.local_epochs:
        raise ConfigurationError(
            f"--local_epochs={method.pacer.local_epochs} ends rounds with the epochs of a fit, and "
            f"{who} has none. Take --local_steps."
        )


def refuse_script_steps(method: Method, who: str) -> None:
    """Refuse a method that needs a script where there is none; `who` computes gradients.

    Raises:
        ConfigurationError: The method takes weights.
    """
    if method.steps_on_workers:
        raise ConfigurationError(
            f"--local_optimizer={method.local.optimizer} is for scripts, whose compiled optimizer "
            f"steps, and {who} computes gradients. Leave it out, or take "
            "--local_optimizer=momentum, adam or another of Keras' by its name."
        )


def _idle_choices(method: Method) -> list[tuple[bool, str]]:
    """Return (applies, warning) for each choice that cannot make a difference."""
    one_group = len(method.sync.groups) == 1
    delays = method.weighting if isinstance(method.weighting, DcAsgd) else None
    compensates_fresh = delays is not None and delays.shares_backup
    by_age = not isinstance(method.weighting, Unweighted | BySamples)
    alone = one_group and not compensates_fresh and by_age
    coding = coding_of(method.codec)
    dense_up = not method.codec.sends_fraction
    per_entry = isinstance(method.weighting, PerEntry)
    delta_down = isinstance(method.down_codec, DownDelta)
    down = f"--down_codec={method.choices['down_codec']}"
    is_coarse = VALUE_BITS[method.codec.value_dtype] < VALUE_BITS["float32"]
    relays_coarse = method.down_codec.relays and is_coarse
    local = method.local if isinstance(method.local, LocalUpdate) else LocalUpdate()
    return [
        (
            alone,
            f"--weighting={method.choices['weighting']} does nothing with one group: "
            "nobody is stale.",
        ),
        (
            isinstance(method.weighting, BySamples)
            and not (method.sync.waits_for_start or method.sync.auto),
            "--weighting=samples with groups of one: every update is released alone.",
        ),
        (
            delays is not None and delays.strength == 0,
            "--dcasgd_lambda=0: nothing is compensated.",
        ),
        (
            isinstance(coding, Sparsifier) and coding.compression_rate > 1,
            "--compression_rate above 1: it is the "
            "fraction of entries kept, not how many times fewer are sent. All are sent, as "
            "by 1.",
        ),
        (
            per_entry and dense_up and not alone,
            "--weighting=per_entry with dense updates: every entry has the same staleness.",
        ),
        (
            delta_down and dense_up and not relays_coarse,
            f"{down} with dense updates: every entry changes, replies are dense.",
        ),
        (
            delta_down and not dense_up and method.privacy.adds_noise,
            f"{down} with --dp_noise: every entry changes, replies are dense.",
        ),
        (
            delta_down
            and not dense_up
            and not (method.server.keeps_sparse or method.server.awaits_offer),
            f"{down} with momentum, adam or weight decay on the PS: every entry "
            "changes, replies are dense.",
        ),
        (
            method.pacer.queries and not (method.sync.waits_for_start or method.sync.auto),
            f"--pacer={method.choices['pacer']} "
            "with groups of one: nobody waits, so every worker takes one local step.",
        ),
        (
            local.opt_state != "keep" and not local.has_slots,
            f"--local_opt_state={local.opt_state} with plain SGD: it keeps no state.",
        ),
        (
            one_group and method.sync.bound is not None,
            "--staleness_bound with one group: nobody can run ahead.",
        ),
    ]


def _check_aggregate(method: Method) -> list[str]:
    """Return warnings about a robust rule that makes no difference.

    Raises:
        ConfigurationError: Groups too small to outvote anybody, or updates that are mostly zeros.
    """
    if not method.aggregate.is_robust:
        return []
    here = f"--aggregate={method.aggregate.name}"
    if method.collective != THROUGH_PS:
        raise ConfigurationError(
            f"{here} needs every update by itself, and --collective={method.collective} hands on "
            "sums of them; take --collective=ps, or leave --aggregate out."
        )
    if method.codec.sends_fraction:
        raise ConfigurationError(
            f"{here} with --codec={method.choices['codec']}: what few workers send of an entry is "
            "outvoted by the zeros of the others, so nothing would be learnt. Take --codec=dense "
            "or powersgd, or guard with --max_update_norm or --update_norm_factor instead."
        )
    sizes = method.sync.sizes
    if method.sync.auto is None and max(sizes) == 1:
        return [f"{here} with groups of one: every update is released alone."]
    if method.sync.auto is not None or min(sizes) < LEAST_MEMBERS:
        raise ConfigurationError(
            f"{here} needs groups of {LEAST_MEMBERS} or more members, known from the start, so "
            f"that one faulty worker is outvoted; the smallest of --sync={method.choices['sync']} "
            f"{'is not known' if method.sync.auto else f'has {min(sizes)}'}. Change --groups or "
            "--nb_workers or --fraction, or leave --aggregate out."
        )
    return []


def _check_privacy(method: Method) -> None:
    """Refuse a bound on what is not a round's change, and noise on what is not a plain mean.

    Raises:
        ConfigurationError: The bound, or the sensitivity that the noise is for, would not hold.
    """
    if not method.privacy.clip:
        return
    if not method.takes_local_steps:
        raise ConfigurationError(
            "--dp_clip bounds the change that a worker's local steps make in a round, and --pacer="
            f"{method.choices['pacer']} with --codec={method.choices['codec']} sends each step's. "
            "Take --pacer=fixed with --local_steps above 1 or a method that has them, or leave "
            "--dp_clip and --dp_noise out."
        )
    if method.collective != THROUGH_PS:
        raise ConfigurationError(
            f"--collective={method.collective}: --dp_clip and --dp_noise need a PS, which adds the "
            "noise before anybody else sees a round; take --collective=ps."
        )
    if method.router.channels:
        raise ConfigurationError(
            f"--router={method.choices['router']} sends what was lost on the way once more, with "
            "a later round, which then exceeds --dp_clip; take --router=reliable."
        )
    if method.privacy.adds_noise:
        _check_noise(method)


def _check_noise(method: Method) -> None:
    """Refuse noise where one worker can move what is released by more than clip / n.

    Raises:
        ConfigurationError: It can.
    """
    if not isinstance(method.weighting, Unweighted):
        raise ConfigurationError(
            f"--weighting={method.choices['weighting']} with --dp_noise: a worker that counts more "
            "than others moves the mean by more than --dp_clip / n, which the noise is for. Give "
            "--weighting=none, or leave --dp_noise out."
        )
    if method.aggregate.is_robust:
        raise ConfigurationError(
            f"--aggregate={method.aggregate.name} with --dp_noise: one worker can move it by more "
            "than --dp_clip / n, which the noise is for. Take --aggregate=mean, for --dp_clip "
            "bounds outliers too, or leave --dp_noise out."
        )
    if method.num_averaged(1):
        raise ConfigurationError(
            "--local_opt_state=average with --dp_noise: the means of the local "
            "optimizers' slots would be released without noise. Take --local_opt_state=keep or "
            "reset."
        )


def check_guards(method: Method, guards: Guards) -> None:
    """Refuse guards by which one worker's update decides whether another's is accepted.

    Raises:
        ConfigurationError: They may, and the method adds noise for what one worker changes.
    """
    if not method.privacy.adds_noise:
        return
    if guards.update_norm_factor:
        raise ConfigurationError(
            f"--update_norm_factor={guards.update_norm_factor:g} with --dp_noise: the norms of all "
            "workers decide which are accepted, so one worker can move the mean by more than "
            "--dp_clip / n. Leave it out; --dp_clip bounds every norm."
        )
    clip = method.privacy.clip
    if guards.max_update_norm and guards.max_update_norm < clip:
        raise ConfigurationError(
            f"--max_update_norm={guards.max_update_norm:g} is below --dp_clip={clip:g}: a shard "
            "would refuse what workers may send. Raise it to the clip, or leave it out."
        )
    if guards.update_peak_factor and guards.update_peak_factor < clip:
        raise ConfigurationError(
            f"--update_peak_factor={guards.update_peak_factor:g} is below --dp_clip={clip:g}, so "
            "the updates of all workers would decide which are accepted. Give "
            "--update_peak_factor=0, or a smaller clip."
        )


def check_averages(method: Method, num_averaged: int) -> None:
    """Refuse means beside the weights, which no noise is added to.

    Args:
        method: Of the run.
        num_averaged: Values that are averaged over the workers.

    Raises:
        ConfigurationError: There are some, and the method adds noise to the weights.
    """
    if method.privacy.adds_noise and num_averaged:
        raise ConfigurationError(
            "--bn_sync with --dp_noise: the model has BatchNorm, whose moving statistics are "
            "averaged over the workers and released without noise. Give --nobn_sync."
        )


def check_shards(method: Method, nb_ps: int) -> None:
    """Refuse several shards where the workers step by themselves.

    Raises:
        ConfigurationError: There are several.
    """
    if method.collective != THROUGH_PS and nb_ps > 1:
        raise ConfigurationError(
            f"--collective={method.collective} leaves the PS only a copy of the model, and this "
            f"run has {nb_ps} shards (--nb_ps, --ps_hosts); take one."
        )
