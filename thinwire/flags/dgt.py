"""DGT's flags, and the variables of the original that are read where a flag is not given."""

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
    "DGT: blocks that contribute little travel in datagrams (--router=dgt)",
    (
        number("dgt_k", 0.8, "Blocks that are reliable.", "fraction", low=0.0, high=1.0),
        *advanced(
            switch("dgt_adaptive_k", "Let the fraction fall with the training loss."),
            number(
                "dgt_pace_mbps",
                0.0,
                "Rate of a worker's datagrams; 0: no limit.",
                "Mbit/s",
                low=0.0,
                high=1_000_000.0,
            ),
            integer(
                "dgt_channels",
                3,
                "Channels for datagrams; 0: all is reliable.",
                "count",
                low=0,
                high=dgt_choices.MAX_CHANNELS,
            ),
            number(
                "dgt_k_min",
                0.2,
                "Least reliable part with --dgt_adaptive_k.",
                "fraction",
                low=0.0,
                high=1.0,
            ),
            switch(
                "dgt_enable_block",
                "Cut tensors into blocks; without, everything is reliable.",
                default=True,
            ),
            integer(
                "dgt_block_size",
                4096,
                "Size of a block of float32.",
                "bytes",
                low=4,
                rule=_IS_BLOCK,
            ),
            number(
                "dgt_alpha",
                0.3,
                "Weight of the past in the contribution of a block.",
                "fraction",
                low=0.0,
                high=1.0,
            ),
            choice(
                "dgt_reception",
                "diff",
                "Late blocks are added to the next step, or dropped.",
                dgt_choices.RECEPTIONS,
            ),
            switch("dgt_send_drop", "A control: throw unreliable blocks away at the sender."),
            choice(
                "dgt_random",
                "0",
                "A control: rank at random, anew in each step, or always the same as the original.",
                dgt_choices.RANDOM,
            ),
            switch("dgt_clear_zero", "Leave out blocks of zeros.", default=True),
            integer(
                "dgt_low_bits",
                32,
                "Size of a value in unreliable blocks: 32, 16, 8 or 4; errors are kept for the "
                "next step.",
                "bits",
                low=4,
                rule=_IS_BITS,
            ),
            number(
                "dgt_wait_ms",
                0.0,
                "Time that a shard waits for datagrams after the reliable part.",
                "milliseconds",
                low=0.0,
                high=3_600_000.0,
            ),
            integer("dgt_max_late", 5, "How late a block may be.", "steps", low=0),
            number(
                "dgt_late_decay",
                1.0,
                "Factor on late blocks, for each step of lateness.",
                "factor",
                low=0.0,
                high=1.0,
            ),
            switch(
                "dgt_error_feedback",
                "Add what did not arrive to the next gradient; with --dgt_reception=drop.",
            ),
            choice(
                "dgt_marker",
                "step",
                "Whose reliable part ends the wait: the step's, or each tensor's own.",
                dgt_choices.MARKERS,
            ),
            number(
                "dgt_loss_ema",
                0.0,
                "Weight of the past in the loss that k follows.",
                "fraction",
                low=0.0,
                high=0.9999,
            ),
            choice(
                "dgt_scope",
                "tensor",
                "k of each tensor's blocks, or of all of a shard's.",
                dgt_choices.SCOPES,
            ),
            integer(
                "dgt_mtu",
                1472,
                "Largest datagram; 1452 for IPv6.",
                "bytes",
                low=128,
                high=65_507,
            ),
            choice(
                "dgt_transport",
                "udp",
                "grpc: unreliable blocks follow on the reliable stream.",
                TRANSPORTS,
            ),
            choice("dgt_dscp", "cs", "How priorities are marked in IP headers.", CLASSES),
            number(
                "dgt_drop_rate",
                0.0,
                "For tests: datagrams that a shard drops on arrival.",
                "fraction",
                low=0.0,
                high=1.0,
            ),
            integer(
                "dgt_drop_seed",
                0,
                "For tests: seed of --dgt_drop_rate.",
                "number",
                low=0,
                high=2**31 - 1,
            ),
            switch("dgt_info", "Log k, blocks, ratios, lateness and bytes of each step."),
            integer(
                "dgt_fallback_steps",
                20,
                "Send all reliably after so many steps in which few datagrams arrived; 0: never.",
                "steps",
                low=0,
                high=1_000_000,
            ),
            number(
                "dgt_fallback_fill",
                0.01,
                "Datagrams that arrive, below which --dgt_fallback_steps counts a step.",
                "fraction",
                low=0.0,
                high=1.0,
            ),
        ),
    ),
)


_ON_OFF = {"0": "false", "1": "true"}
_Value = Callable[[str], Mapping[str, str]]  # a variable's text -> flag and its text


def _to(name: str, words: Mapping[str, str] | None = None) -> _Value:
    """Return what hands a variable's text to a flag, as it is or translated word by word."""

    def translate(text: str) -> dict[str, str]:
        if words is None:
            return {name: text}
        if text not in words:
            raise ValueError(f"expected {' or '.join(words)}")
        return {name: words[text]}

    return translate


def _percent(text: str) -> dict[str, str]:
    return {"dgt_drop_rate": repr(float(text) / 100)}


def _mode(text: str) -> dict[str, str]:
    """GeoMX knew 2, the stream alone, and 3, that with four bits."""
    modes = {"2": {"dgt_transport": "grpc"}}
    modes |= {"0": {}, "1": {}, "3": modes["2"] | {"dgt_low_bits": "4"}}
    if text not in modes:
        raise ValueError("expected 0, 1, 2 or 3")
    return modes[text]


#: Variable of the original, or of GeoMX -> the flags that it speaks for.
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
#: Variable that is not read -> what to do instead. Its value is not logged: one is a password.
NOT_READ = {
    "NS_DELAY": "give --dgt_pace_mbps, a rate in place of pauses",
    "ENABLE_ENCODE": "give --dgt_low_bits=16, 8 or 4; there are no 2 bits",
    "SUDO_PASSWD": "unset it: --dgt_dscp needs no privileges",
    "DGT_MSG_SIZE_LIMIT": "give --dgt_block_size; the original does not read it either",
}


def fill(values: flags.FlagValues, variables: Mapping[str, str]) -> None:
    """Set the flags that were not given from the original's variables; log each.

    Args:
        values: The parsed flags.
        variables: Of the environment.

    Raises:
        ConfigurationError: A variable's value is not what its flag takes.
    """
    for variable, translate in VARIABLES.items():
        text = variables.get(variable, "").strip()
        if not text:
            continue
        try:
            found = translate(text)
        except ValueError as error:
            raise _bad(variable, text, error) from error
        if not found and text == "0":
            logging.warning("%s=%s is not heeded: the router is chosen by --router", variable, text)
        for name, word in found.items():
            _give(values, variable, text, name, word)
    for variable, advice in NOT_READ.items():
        if variables.get(variable, "").strip() not in ("", "0"):
            logging.warning("%s is not read; %s", variable, advice)


def _give(values: flags.FlagValues, variable: str, text: str, name: str, word: str) -> None:
    """Give one flag a variable's value, as if it had been on the command line."""
    flag = values[name]
    if flag.present:
        logging.info("--%s=%s wins over %s=%s", name, flag.value, variable, text)
        return
    try:
        setattr(values, name, flag.parser.parse(word))  # runs the flag's rules
    except (flags.Error, ValueError) as error:
        raise _bad(variable, text, error) from error
    flag.present, flag.using_default_value = 1, False  # handed on to nodes that this one starts
    logging.info("--%s=%s, from %s=%s", name, flag.value, variable, text)


def _bad(variable: str, text: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{variable}={text!r}: {error}. Mend the variable, or unset it and give the flag."
    )


def transport(given: flags.FlagValues, router: str) -> Transport:
    """Return how datagrams travel.

    Raises:
        ConfigurationError: A flag about that was given, and there are no datagrams.
    """
    settings = {field.name: getattr(given, field.name) for field in dataclasses.fields(Transport)}
    for name, value in settings.items():
        if router != "dgt" and value != getattr(Transport, name):
            raise ConfigurationError(
                f"--{name}={value} is for --router=dgt, and this is --router={router}; change one."
            )
    return Transport(**settings)
