"""Flags of DGT (differential gradient transmission), and the original's environment variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from absl import flags, logging

from thinwire.ops.routing import dgt_choices
from thinwire.ops.routing.base import CLASSES, TRANSPORTS, Transport
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.flags import FlagRule, Topic, advanced, choice, integer, number, switch

_IS_BLOCK = FlagRule(lambda size: size % 4 == 0, "must be a multiple of 4, the bytes of a float32")
_IS_BITS = FlagRule(lambda bits: bits in dgt_choices.LOW_BITS, "must be 32, 16, 8 or 4")

TOPIC = Topic(
    "DGT (--router=dgt): blocks that contribute little are sent in datagrams",
    (
        number(
            "dgt_k",
            0.8,
            "Fraction of a gradient's blocks that DGT (differential gradient transmission) sends "
            "reliably; DGT sends the remaining blocks in datagrams.",
            "fraction",
            low=0.0,
            high=1.0,
        ),
        *advanced(
            switch(
                "dgt_adaptive_k",
                "Lower the fraction of reliable blocks (--dgt_k) as the training loss falls.",
            ),
            number(
                "dgt_pace_mbps",
                0.0,
                "Largest rate at which a worker sends DGT's datagrams; 0: no limit.",
                "Mbit/s",
                low=0.0,
                high=1_000_000.0,
            ),
            integer(
                "dgt_channels",
                3,
                "Number of UDP channels for DGT's datagrams; 0: send all blocks reliably.",
                "count",
                low=0,
                high=dgt_choices.MAX_CHANNELS,
            ),
            number(
                "dgt_k_min",
                0.2,
                "Smallest fraction of reliable blocks to which --dgt_adaptive_k lowers --dgt_k.",
                "fraction",
                low=0.0,
                high=1.0,
            ),
            switch(
                "dgt_enable_block",
                "Cut tensors into blocks; if off, each tensor is one block that is sent reliably.",
                default=True,
            ),
            integer(
                "dgt_block_size",
                4096,
                "Size of a block of consecutive float32 entries, which DGT ranks together.",
                "bytes",
                low=4,
                rule=_IS_BLOCK,
            ),
            number(
                "dgt_alpha",
                0.3,
                "Weight of the past in the moving average of a block's contribution.",
                "fraction",
                low=0.0,
                high=1.0,
            ),
            choice(
                "dgt_reception",
                "diff",
                "Use of gradient blocks whose datagrams arrive late at a shard: diff adds these "
                "blocks to the next step, drop discards them.",
                dgt_choices.RECEPTIONS,
            ),
            switch(
                "dgt_send_drop", "Control experiment: workers drop all of DGT's unreliable blocks."
            ),
            choice(
                "dgt_random",
                "0",
                "Control experiment: DGT ranks blocks at random, with new ranks in each step (1) "
                "or with the same ranks in all steps (fixed); 0: DGT ranks blocks by contribution.",
                dgt_choices.RANDOM,
            ),
            switch("dgt_clear_zero", "Do not send gradient blocks of zeros.", default=True),
            integer(
                "dgt_low_bits",
                32,
                "Number of bits of a value in the blocks that DGT sends in datagrams: 32, 16, 8 "
                "or 4; rounding errors are added to the next gradient.",
                "bits",
                low=4,
                rule=_IS_BITS,
            ),
            number(
                "dgt_wait_ms",
                0.0,
                "Time that a shard waits for a push's datagrams after the reliable part.",
                "milliseconds",
                low=0.0,
                high=3_600_000.0,
            ),
            integer(
                "dgt_max_late",
                5,
                "Largest lateness of a datagram block that a shard does not discard.",
                "steps",
                low=0,
            ),
            number(
                "dgt_late_decay",
                1.0,
                "Factor on a late datagram block for each step of lateness.",
                "factor",
                low=0.0,
                high=1.0,
            ),
            switch(
                "dgt_error_feedback",
                "Add values of lost datagrams to the next gradient; needs --dgt_reception=drop.",
            ),
            choice(
                "dgt_marker",
                "step",
                "Reliable part of a push that a shard must receive before the shard stops waiting "
                "for datagrams: step, the part of the whole step; tensor, the part of each tensor.",
                dgt_choices.MARKERS,
            ),
            number(
                "dgt_loss_ema",
                0.0,
                "Weight of the past in the training loss that --dgt_adaptive_k follows.",
                "fraction",
                low=0.0,
                high=0.9999,
            ),
            choice(
                "dgt_scope",
                "tensor",
                "Gradient blocks that DGT ranks together: tensor, the blocks of each tensor; "
                "model, all blocks of a shard.",
                dgt_choices.SCOPES,
            ),
            integer(
                "dgt_mtu",
                1472,
                "Largest size of DGT's UDP datagrams; use 1452 for IPv6.",
                "bytes",
                low=128,
                high=65_507,
            ),
            choice(
                "dgt_transport",
                "udp",
                "Transport of the blocks that DGT does not send reliably: udp, datagrams; grpc, "
                "the gRPC stream, after the reliable blocks.",
                TRANSPORTS,
            ),
            choice(
                "dgt_dscp",
                "cs",
                "Priority marks (DSCP) in the IP headers of DGT's datagrams; off: no marks.",
                CLASSES,
            ),
            number(
                "dgt_drop_rate",
                0.0,
                "For tests: fraction of datagrams that a shard drops on arrival.",
                "fraction",
                low=0.0,
                high=1.0,
            ),
            integer(
                "dgt_drop_seed",
                0,
                "For tests: seed of the random choice of datagrams for --dgt_drop_rate.",
                "number",
                low=0,
                high=2**31 - 1,
            ),
            switch(
                "dgt_info",
                "Log DGT's fraction of reliable blocks, numbers of blocks, ratios of arrived "
                "blocks, lateness and bytes in each step.",
            ),
            integer(
                "dgt_fallback_steps",
                20,
                "Number of consecutive steps with few arrived datagrams (--dgt_fallback_fill) "
                "after which a worker sends all blocks reliably; 0: never.",
                "steps",
                low=0,
                high=1_000_000,
            ),
            number(
                "dgt_fallback_fill",
                0.01,
                "Smallest fraction of a step's DGT datagrams that must arrive; "
                "--dgt_fallback_steps counts the steps with a smaller fraction.",
                "fraction",
                low=0.0,
                high=1.0,
            ),
        ),
    ),
)


_ON_OFF = {"0": "false", "1": "true"}
# Type of a function that maps the text of an environment variable to {name of a flag: text of the
# flag}.
_Value = Callable[[str], Mapping[str, str]]


def _to(name: str, words: Mapping[str, str] | None = None) -> _Value:
    """Return a function that maps an environment variable's text to the text of a flag."""

    def translate(text: str) -> dict[str, str]:
        if words is None:
            return {name: text}
        if text not in words:
            raise ValueError(f"expected the value {' or '.join(words)}")
        return {name: words[text]}

    return translate


def _percent(text: str) -> dict[str, str]:
    return {"dgt_drop_rate": repr(float(text) / 100)}


def _mode(text: str) -> dict[str, str]:
    """Translate ENABLE_DGT to flags: the text 2 selects gRPC, 3 selects gRPC and 4-bit values."""
    modes = {"2": {"dgt_transport": "grpc"}}
    modes |= {"0": {}, "1": {}, "3": modes["2"] | {"dgt_low_bits": "4"}}
    if text not in modes:
        raise ValueError("expected the value 0, 1, 2 or 3")
    return modes[text]


#: Environment variable of the original DGT, or of GeoMX -> function from the variable's text to
#: flags and their texts.
VARIABLES: dict[str, _Value] = {
    "ENABLE_DGT": _mode,
    "DMLC_UDP_CHANNEL_NUM": _to("dgt_channels"),
    "DMLC_K": _to("dgt_k"),
    "DMLC_K_MIN": _to("dgt_k_min"),
    "ADAPTIVE_K_FLAG": _to("dgt_adaptive_k", _ON_OFF),
    "DGT_ENABLE_BLOCK": _to("dgt_enable_block", _ON_OFF),
    "DGT_BLOCK_SIZE": _to("dgt_block_size"),
    "DGT_CONTRI_ALPHA": _to("dgt_alpha"),
    "DGT_CONTRIBUTION_ALPHA": _to("dgt_alpha"),
    "DGT_RECONSTRUCT": _to("dgt_reception", {"0": "drop", "1": "diff"}),
    "DGT_ENABLE_SEND_DROP": _to("dgt_send_drop", _ON_OFF),
    "DGT_SET_RANDOM": _to("dgt_random", {"0": "0", "1": "1"}),
    "DGT_INFO": _to("dgt_info", _ON_OFF),
    "CLEAR_ZERO": _to("dgt_clear_zero", _ON_OFF),
    "PS_DROP_MSG": _percent,
}
#: Environment variable of the original DGT that Thinwire does not read -> advice to the user. The
#: variables' values are not logged, because SUDO_PASSWD is a password.
NOT_READ = {
    "NS_DELAY": "give --dgt_pace_mbps, a rate instead of pauses",
    "ENABLE_ENCODE": "give --dgt_low_bits=16, 8 or 4; 2 bits are not supported",
    "SUDO_PASSWD": "unset the variable: --dgt_dscp needs no privileges",
    "DGT_MSG_SIZE_LIMIT": "give --dgt_block_size; the original DGT does not read this variable",
}


def fill(values: flags.FlagValues, variables: Mapping[str, str]) -> None:
    """Set DGT flags that the user omitted from the original DGT's environment variables; log them.

    Args:
        values: Parsed flags of this process. This function changes them.
        variables: Environment variables of this process: name -> text.

    Raises:
        ConfigurationError: A flag of DGT does not accept the text of its environment variable.
    """
    for variable, translate in VARIABLES.items():
        text = variables.get(variable, "").strip()
        if not text:
            continue
        try:
            settings = translate(text)
        except ValueError as error:
            raise _bad(variable, text, error) from error
        if not settings and text == "0":
            logging.warning("variable %s=%s has no effect: use --router", variable, text)
        for name, word in settings.items():
            _give(values, variable, text, name, word)
    for variable, advice in NOT_READ.items():
        if variables.get(variable, "").strip() not in ("", "0"):
            logging.warning("environment variable %s is not read; %s", variable, advice)


def _give(values: flags.FlagValues, variable: str, text: str, name: str, word: str) -> None:
    """Set one flag from an environment variable, as if the command line had given the flag."""
    flag = values[name]
    if flag.present:
        logging.info("--%s=%s wins over variable %s=%s", name, flag.value, variable, text)
        return
    try:
        # Assigning a value runs the flag's validation rules
        setattr(values, name, flag.parser.parse(word))
    except (flags.Error, ValueError) as error:
        raise _bad(variable, text, error) from error
    # A Cluster passes a flag to its nodes only if absl counts the flag as present.
    flag.present, flag.using_default_value = 1, False
    logging.info("--%s=%s, from variable %s=%s", name, flag.value, variable, text)


def _bad(variable: str, text: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"variable {variable}={text!r}: {error}. Correct it, or unset it and give the flag."
    )


def transport(given: flags.FlagValues, router: str) -> Transport:
    """Return from the flags how DGT (differential gradient transmission) sends datagrams.

    Raises:
        ConfigurationError: A flag of DGT's transport differs from its default, but --router is not
            dgt.
    """
    settings = {field.name: getattr(given, field.name) for field in dataclasses.fields(Transport)}
    for name, value in settings.items():
        if router != "dgt" and value != getattr(Transport, name):
            raise ConfigurationError(
                f"--{name}={value} is for --router=dgt, but this run has --router={router}; "
                "change one of the two flags."
            )
    return Transport(**settings)
