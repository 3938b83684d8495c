"""Checks of training methods: whether policies fit together, and the number of shard servers.

The module `validation` holds every check that concerns more than one policy. Checks of a single
policy's settings are in the policy's class.
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
from thinwire.ops.optimizers.local import LocalUpdate
from thinwire.ops.policy import describe, options_of
from thinwire.ops.routing.reliable import Reliable
from thinwire.ops.sync.base import Agreement, SyncRule
from thinwire.ops.sync.groups import uneven
from thinwire.ops.sync.rule import ClosedGroupSync
from thinwire.ops.types import VALUE_BITS, ConfigurationError, Kind
from thinwire.ops.weighting.by_staleness import BySamples, Unweighted
from thinwire.ops.weighting.dc_asgd import DcAsgd
from thinwire.ops.weighting.per_entry import PerEntry

#: Policy interface -> name of the only policy that works if workers sum updates without a parameter
#: server.
_ONLY = {
    "codec": Dense,
    "down_codec": DownDense,
    "router": Reliable,
    "weighting": Unweighted,
}


def rule_for(rule: SyncRule, collective: str) -> SyncRule:
    """Return the synchronization rule; with --collective no worker may join during a round."""
    is_plain = len(rule.groups) == 1 and rule.bound is None and rule.auto is None
    closes = is_plain and rule.agreement is Agreement.JOINERS and collective != THROUGH_PS
    return ClosedGroupSync(rule.groups) if closes else rule


def validate(method: Method) -> list[str]:
    """Raise an error if a training method cannot work; return warnings about unused flags.

    Raises:
        ConfigurationError: The codec cannot send the workers' updates, the weighting cannot scale
            them, the synchronization rule cannot merge them, or the parameter server cannot step
            with them.
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
    """Raise an error if workers push changes of weights but a policy needs gradients."""
    if method.codec.kind is Kind.DELTA and method.takes_local_steps:
        raise ConfigurationError(
            f"--codec={method.choices['codec']} computes changes of weights from gradients, but "
            f"--pacer={method.choices['pacer']} already sends such changes. Change one flag."
        )
    if isinstance(method.weighting, DcAsgd) and method.kind is Kind.DELTA:
        raise ConfigurationError(
            f"--weighting=dc_asgd compensates gradients, but --pacer={method.choices['pacer']} "
            f"with --codec={method.choices['codec']} sends changes of weights. Take another "
            "weighting, or --pacer=every with a codec of gradients."
        )


def _check_collective(method: Method) -> None:
    """Raise an error if --collective is given with a policy that needs a parameter server.

    Raises:
        ConfigurationError: With --collective, the workers are not one synchronous group, or the
            updates are not dense and uncompressed.
    """
    if method.collective == THROUGH_PS:
        return
    flag = f"--collective={method.collective}"
    if method.sync.draws_workers:
        raise ConfigurationError(
            f"{flag} sums the updates of all workers in every round, but --fraction and --draws "
            "omit some workers. Leave --fraction and --draws out, or take --collective=ps."
        )
    if not isinstance(method.sync, ClosedGroupSync):
        raise ConfigurationError(
            f"{flag} sums the updates of all workers in every round, but "
            f"--sync={method.choices['sync']} does not wait for all workers; take --method=bsp or "
            "--method=esync, or --collective=ps."
        )
    for interface, policy in _ONLY.items():
        if not isinstance(getattr(method, interface), policy):
            raise ConfigurationError(
                f"{flag} sends plain dense sums from worker to worker, but this run has "
                f"--{interface}={method.choices[interface]}; leave --{interface} out, or take "
                "--collective=ps."
            )
    if method.awaits_offer or method.server.traits.whole_variables:
        raise ConfigurationError(
            f"with {flag}, each worker updates the weights as one flat vector, but "
            f"--server_optimizer={method.choices['server_optimizer']} needs variables with their "
            "names and shapes. Take --collective=ps, or another --server_optimizer."
        )
    if getattr(method.server, "global_lr_schedule", ""):
        raise ConfigurationError(
            f"{flag}: workers do not know which fraction of the run's budget is consumed, so "
            "--global_lr_schedule has no effect. Leave --global_lr_schedule out, or take "
            "--collective=ps."
        )
    if method.codec.value_dtype != "float32":
        raise ConfigurationError(
            f"{flag} sums float32, but this run has --value_dtype={method.codec.value_dtype}; "
            "leave --value_dtype out, or take --collective=ps."
        )


def _check_overlap(method: Method) -> None:
    """Raise an error for --overlap if a worker's next step needs the shard servers' reply."""
    obstacle = why_no_overlap(method)
    if method.overlap and obstacle is not None:
        raise ConfigurationError(
            "--overlap computes the next gradient before the PS has answered an exchange, but this "
            f"run has {obstacle}. Leave --overlap out, or change the other flag."
        )


def why_no_overlap(method: Method) -> str | None:
    """Return, as text, the setting that excludes --overlap; None if --overlap is possible.

    A setting excludes --overlap if the worker needs the shard servers' reply to an exchange before
    its next step.
    """
    if method.takes_local_steps:
        return f"--pacer={method.choices['pacer']}, whose local steps start from the answer"
    if method.sync.draws_workers:
        return "--fraction or --draws, with which a worker may wait for many rounds"
    if method.collective != THROUGH_PS:
        return f"--collective={method.collective}, where every worker steps the model itself"
    if method.weighting.needs_copies:
        return (
            f"--weighting={method.choices['weighting']}, which needs the model that a gradient was "
            "computed at, while the PS stores only the model that it sent last"
        )
    return None


def check_dense(method: Method) -> None:
    """Raise an error if the codec sends sparse gradients and the optimizer needs dense gradients.

    Raises:
        ConfigurationError: The optimizer needs dense gradients, and the codec sends only a part of
            a gradient.
    """
    optimizer = method.server.traits.dense_only
    if optimizer and method.codec.sends_fraction:
        raise ConfigurationError(
            f"the optimizer {optimizer} divides by means over rows and columns "
            f"of the gradient. Such a mean is 0 if --codec={method.choices['codec']} sends no "
            "entry of its row or column. Take --method=asgd or --method=bsp, or another optimizer."
        )


def _check_server(method: Method) -> None:
    """Raise an error if the codec sends weight changes that the PS optimizer cannot apply."""
    if method.kind is Kind.GRADIENT:
        return
    if method.awaits_offer:
        raise ConfigurationError(
            "--server_optimizer=script applies gradients on the PS, but "
            f"--pacer={method.choices['pacer']} with --codec={method.choices['codec']} sends "
            "changes of weights. Leave it out: the workers step with the script's optimizer."
        )
    if method.server.traits.keeps_sparse or method.takes_local_steps:
        return
    settings = {"momentum": 0.0, "weight_decay": 0.0, **describe(method.server)}
    raise ConfigurationError(
        f"--server_optimizer={method.choices['server_optimizer']} with "
        f"--momentum={settings['momentum']:g} and --weight_decay={settings['weight_decay']:g}: "
        f"with --pacer={method.choices['pacer']} and --codec={method.choices['codec']} the PS adds "
        "changes of weights, which already include the learning rate. Leave the first three flags "
        "out. The codec has its own momentum. For weight decay give --worker_weight_decay, or "
        "give a script's compiled optimizer a decay."
    )


def _check_local(method: Method) -> None:
    """Raise an error if flags of the workers' local optimizer are given without local steps."""
    usual = LocalUpdate()
    flags = [
        option.name
        for field, option in options_of(type(method.local)).items()
        if getattr(method.local, field) != getattr(usual, field)
    ]
    if flags and not (method.takes_local_steps or method.steps_on_workers):
        raise ConfigurationError(
            f"--{', --'.join(flags)}: a worker takes local steps only with --pacer=esync, or with "
            "--pacer=fixed and --local_steps above 1, but this run has "
            f"--pacer={method.choices['pacer']}. Leave the first flags out, or change --pacer."
        )


def _check_ahead(method: Method) -> None:
    """Raise an error if --error_ahead (weights plus residual) is given without local steps."""
    if method.ahead and not method.takes_local_steps:
        raise ConfigurationError(
            f"--error_ahead={method.ahead:g}: a worker takes local steps only with --pacer=esync, "
            "or with --pacer=fixed and --local_steps above 1, but this run has "
            f"--pacer={method.choices['pacer']}. Leave --error_ahead out, or change --pacer."
        )


def _check_script_steps(method: Method) -> None:
    """Raise an error if a script's optimizer steps on workers that do not send weight changes."""
    if not method.steps_on_workers:
        return
    flag = f"--local_optimizer={method.local.optimizer}"
    if method.kind is Kind.GRADIENT:
        raise ConfigurationError(
            f"with {flag}, the workers take the steps of the script's optimizer, but "
            f"--pacer={method.choices['pacer']} with --codec={method.choices['codec']} sends "
            "gradients. Take --method=dgs, dgc, gd or esync, or --pacer=fixed with --local_steps "
            "above 1; or leave --local_optimizer out."
        )
    if has_clipping(method.codec) and not method.takes_local_steps:
        raise ConfigurationError(
            f"--dgc_clip_norm clips gradients, but with {flag} the workers send changes of "
            "weights. Leave --dgc_clip_norm out, and give the script's optimizer a clipnorm."
        )
    if method.local.prox_mu and not method.takes_local_steps:
        raise ConfigurationError(
            f"--prox_mu={method.local.prox_mu:g} pulls local steps towards the model at the start "
            f"of the round, but with --pacer={method.choices['pacer']} every step is a round of "
            "its own. Leave --prox_mu out, or take --pacer=fixed with --local_steps above 1."
        )


def refuse_local_epochs(method: Method, who: str) -> None:
    """Raise an error if --local_epochs is given in a training loop without epochs.

    Args:
        method: Training method of the run, which is checked.
        who: Name of the training loop without epochs, for the error message.

    Raises:
        ConfigurationError: The training method has --local_epochs: its rounds end with training
            epochs.
    """
    if method.pacer.local_epochs:
        raise ConfigurationError(
            f"--local_epochs={method.pacer.local_epochs} ends rounds with the epochs of "
            f"model.fit, but {who} has no epochs. Use --local_steps instead."
        )


def refuse_script_steps(method: Method, who: str) -> None:
    """Raise an error if a script's optimizer must step in a run without a script.

    Args:
        method: Training method of the run, which is checked.
        who: Name of the program that computes gradients, for the error message.

    Raises:
        ConfigurationError: In the given training method a script's optimizer steps on the workers.
    """
    if method.steps_on_workers:
        raise ConfigurationError(
            f"--local_optimizer={method.local.optimizer} takes steps with the compiled optimizer "
            f"of a script, but {who} only computes gradients. Leave --local_optimizer out, or "
            "take --local_optimizer=momentum, adam or another Keras optimizer by its name."
        )


def _idle_choices(method: Method) -> list[tuple[bool, str]]:
    """Return, for each warning about a flag without effect, whether it applies, and its text."""
    one_group = len(method.sync.groups) == 1 and method.sync.takes_all
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
            f"--weighting={method.choices['weighting']} has no effect with one worker group: no "
            "update is stale.",
        ),
        (
            isinstance(method.weighting, BySamples)
            and not (method.sync.waits_for_start or method.sync.auto),
            "--weighting=samples has no effect with groups of one: updates are applied singly.",
        ),
        (
            delays is not None and delays.strength == 0,
            "--dcasgd_lambda=0: nothing is compensated.",
        ),
        (
            isinstance(coding, Sparsifier) and coding.compression_rate > 1,
            "--compression_rate above 1: the rate is the "
            "fraction of the entries that is sent, not a ratio of sizes. All entries are sent, as "
            "with 1.",
        ),
        (
            per_entry and dense_up and not alone,
            "--weighting=per_entry with dense updates gives every entry the same staleness.",
        ),
        (
            delta_down and dense_up and not relays_coarse,
            f"{down} saves no bytes with dense updates: every entry changes, so replies are dense.",
        ),
        (
            delta_down and not dense_up and method.privacy.adds_noise,
            f"{down} saves no bytes with --dp_noise: every entry changes, so replies are dense.",
        ),
        (
            delta_down
            and not dense_up
            and not (method.server.traits.keeps_sparse or method.awaits_offer),
            f"{down} saves no bytes with momentum, adam or weight decay on the PS: every entry "
            "changes, so replies are dense.",
        ),
        (
            method.pacer.queries and not (method.sync.waits_for_start or method.sync.auto),
            f"--pacer={method.choices['pacer']} has no effect with groups of one worker: no "
            "worker waits, so every worker takes one local step.",
        ),
        (
            local.opt_state != "keep" and not local.has_slots,
            f"--local_opt_state={local.opt_state} has no effect: plain SGD has no state.",
        ),
        (
            len(method.sync.groups) == 1 and method.sync.bound is not None,
            "--staleness_bound has no effect with one worker group: no worker can run ahead.",
        ),
    ]


def _check_aggregate(method: Method) -> list[str]:
    """Return warnings about a robust aggregate (median or similar) that has no effect.

    Raises:
        ConfigurationError: With a robust aggregate, groups of workers are too small to outvote one
            worker, or updates are mostly zeros.
    """
    if not method.aggregate.is_robust:
        return []
    flag = f"--aggregate={method.aggregate.name}"
    if method.collective != THROUGH_PS:
        raise ConfigurationError(
            f"{flag} needs every update separately, but --collective={method.collective} sends "
            "only sums of updates. Take --collective=ps, or leave --aggregate out."
        )
    if method.codec.sends_fraction:
        raise ConfigurationError(
            f"{flag} with --codec={method.choices['codec']}: few workers send a given entry, and "
            "the zeros of the others outvote them, so the model would not learn. Take "
            "--codec=dense or powersgd, or guard with --max_update_norm or --update_norm_factor."
        )
    sizes = method.sync.sizes
    if method.sync.auto is None and max(sizes) == 1:
        return [f"{flag} has no effect with groups of one worker: updates are applied singly."]
    if method.sync.auto is not None or min(sizes) < LEAST_MEMBERS:
        raise ConfigurationError(
            f"{flag} needs groups of {LEAST_MEMBERS} or more members, known from the start, to "
            f"outvote a faulty worker; the smallest group of --sync={method.choices['sync']} "
            f"{'is not known' if method.sync.auto else f'has {min(sizes)}'}. Change --groups or "
            "--nb_workers or --fraction, or leave --aggregate out."
        )
    return []


def _check_privacy(method: Method) -> None:
    """Raise an error for --dp_clip unless the PS applies plain means of workers' weight changes.

    Raises:
        ConfigurationError: One worker's contribution to a mean of updates could exceed the bound
            for which the noise of --dp_noise is sized.
    """
    if not method.privacy.clip:
        return
    if not method.takes_local_steps:
        raise ConfigurationError(
            "--dp_clip bounds the change that a worker's local steps make to the weights in a "
            f"round, but --pacer={method.choices['pacer']} with --codec={method.choices['codec']} "
            "sends the update of every single step. Take --pacer=fixed with --local_steps above "
            "1, or a method with local steps, or leave --dp_clip and --dp_noise out."
        )
    if method.collective != THROUGH_PS:
        raise ConfigurationError(
            f"--collective={method.collective}: --dp_clip and --dp_noise need a PS, which adds the "
            "noise before any worker receives a round's result. Take --collective=ps."
        )
    if method.router.channels:
        raise ConfigurationError(
            f"--router={method.choices['router']} sends lost entries again with a later round, "
            "whose update then exceeds --dp_clip. Take --router=reliable."
        )
    if method.privacy.adds_noise:
        _check_noise(method)


def _check_noise(method: Method) -> None:
    """Raise an error for --dp_noise if one of n workers can change a mean by over --dp_clip / n.

    Raises:
        ConfigurationError: One of n workers can change a released mean of updates by more than
            --dp_clip / n.
    """
    if not isinstance(method.weighting, Unweighted):
        raise ConfigurationError(
            f"--weighting={method.choices['weighting']} with --dp_noise: a worker with a larger "
            "weight than others moves the mean of n workers by more than --dp_clip / n, the "
            "change for which the noise is sized. Give --weighting=none, or leave --dp_noise out."
        )
    if method.aggregate.is_robust:
        raise ConfigurationError(
            f"--aggregate={method.aggregate.name} with --dp_noise: one of n workers can move the "
            "result by more than --dp_clip / n, the change for which the noise is sized. Take "
            "--aggregate=mean (--dp_clip bounds outliers too), or leave --dp_noise out."
        )
    if method.num_averaged(1):
        raise ConfigurationError(
            "--local_opt_state=average with --dp_noise: the means of the local "
            "optimizers' slots would be released without noise. Take --local_opt_state=keep or "
            "reset."
        )


def check_guards(method: Method, guards: Guards) -> None:
    """Raise an error for --dp_noise with limits on updates that compare workers with each other.

    If one worker's update decides whether the server accepts another worker's update, the first
    worker's influence exceeds the bound for which the noise of --dp_noise is sized.

    Raises:
        ConfigurationError: The training method adds noise, and a limit on updates compares workers'
            updates or rejects updates whose norm is at most --dp_clip.
    """
    if not method.privacy.adds_noise:
        return
    if guards.update_norm_factor:
        raise ConfigurationError(
            f"--update_norm_factor={guards.update_norm_factor:g} with --dp_noise: the norms of all "
            "n workers decide which updates pass, so one worker can move the mean by more than "
            "--dp_clip / n. Leave --update_norm_factor out; --dp_clip bounds every norm."
        )
    clip = method.privacy.clip
    if guards.max_update_norm and guards.max_update_norm < clip:
        raise ConfigurationError(
            f"--max_update_norm={guards.max_update_norm:g} is below --dp_clip={clip:g}: a shard "
            "would reject updates with a norm of at most --dp_clip. Raise --max_update_norm to "
            "--dp_clip, or leave --max_update_norm out."
        )
    if guards.update_peak_factor and guards.update_peak_factor < clip:
        raise ConfigurationError(
            f"--update_peak_factor={guards.update_peak_factor:g} is below --dp_clip={clip:g}, so "
            "the updates of all workers would decide which updates are accepted. Give "
            "--update_peak_factor=0, or a smaller --dp_clip."
        )


def check_averages(method: Method, num_averaged: int) -> None:
    """Raise an error for --dp_noise if averaged values other than weights would get no noise.

    Args:
        method: Training method of the run, which is checked.
        num_averaged: Number of the values, such as moving statistics, that shard 0 averages over
            the workers.

    Raises:
        ConfigurationError: The server averages values other than weights, and the training method
            adds noise to weights only.
    """
    if method.privacy.adds_noise and num_averaged:
        raise ConfigurationError(
            "--bn_sync with --dp_noise: the model has BatchNorm, whose moving statistics are "
            "averaged over the workers and released without noise. Give --nobn_sync."
        )


def check_shards(method: Method, nb_ps: int) -> None:
    """Raise an error for several shard servers if workers sum updates among themselves.

    Raises:
        ConfigurationError: In the training method workers sum updates among themselves, and the run
            has several shard servers.
    """
    if method.collective != THROUGH_PS and nb_ps > 1:
        raise ConfigurationError(
            f"--collective={method.collective} gives the PS only a copy of the model, but this "
            f"run has {nb_ps} PS shards (--nb_ps, --ps_hosts); use one shard."
        )
