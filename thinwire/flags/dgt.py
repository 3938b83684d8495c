"""Flags of DGT (differential gradient transmission), and the original's environment variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from absl import flags, logging

from thinwire.ops.routing.base import Transport
from thinwire.ops.types import ConfigurationError

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
