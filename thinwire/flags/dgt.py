"""Flags of DGT (differential gradient transmission), and the original's environment variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from absl import flags, logging

from thinwire.ops.routing.base import Transport
from thinwire.ops.routing.dgt import Dgt
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.types import ConfigurationError


def _percent(text: str) -> dict[str, str]:
    return {"dgt_drop_rate": repr(float(text) / 100)}


def _mode(text: str) -> dict[str, str]:
    """Translate ENABLE_DGT to flags: the text 2 selects gRPC, 3 selects gRPC and 4-bit values."""
    modes = {"2": {"dgt_transport": "grpc"}}
    modes |= {"0": {}, "1": {}, "3": modes["2"] | {"dgt_low_bits": "4"}}
    if text not in modes:
        raise ValueError("expected the value 0, 1, 2 or 3")
    return modes[text]


def _reception(text: str) -> dict[str, str]:
    return {"dgt_reception": {"0": "drop", "1": "diff"}.get(text, text)}


#: Environment variable of the original DGT, or of GeoMX -> flag that takes the variable's text, or
#: function from the text to {name of a flag: text of the flag}.
VARIABLES: dict[str, str | Callable[[str], Mapping[str, str]]] = {
    "ENABLE_DGT": _mode,
    "DMLC_UDP_CHANNEL_NUM": "dgt_channels",
    "DMLC_K": "dgt_k",
    "DMLC_K_MIN": "dgt_k_min",
    "ADAPTIVE_K_FLAG": "dgt_adaptive_k",
    "DGT_ENABLE_BLOCK": "dgt_enable_block",
    "DGT_BLOCK_SIZE": "dgt_block_size",
    "DGT_CONTRI_ALPHA": "dgt_alpha",
    "DGT_CONTRIBUTION_ALPHA": "dgt_alpha",
    "DGT_RECONSTRUCT": _reception,
    "DGT_ENABLE_SEND_DROP": "dgt_send_drop",
    "DGT_SET_RANDOM": "dgt_random",
    "DGT_INFO": "dgt_info",
    "CLEAR_ZERO": "dgt_clear_zero",
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
            settings = {translate: text} if isinstance(translate, str) else translate(text)
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


def is_dgt(router: str) -> bool:
    """Return True if a router, by value of --router, is DGT or a router derived from DGT."""
    return issubclass(ROUTERS[router], Dgt)


def transport(given: flags.FlagValues, router: str) -> Transport:
    """Return from the flags how DGT (differential gradient transmission) sends datagrams.

    Raises:
        ConfigurationError: A flag of DGT's transport differs from its default, but --router is not
            dgt.
    """
    settings = {field.name: getattr(given, field.name) for field in dataclasses.fields(Transport)}
    for name, value in settings.items():
        if not is_dgt(router) and value != getattr(Transport, name):
            raise ConfigurationError(
                f"--{name}={value} is for --router=dgt, but this run has --router={router}; "
                "change one of the two flags."
            )
    return Transport(**settings)
