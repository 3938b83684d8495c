"""Gradient codecs select and encode the part of a step's dense gradients that a worker sends.

A `Codec` encodes the gradient tensors of a step into a packet. Wrappers around a gradient codec
store the entries that were not sent, correct momentum, clip gradients, or send small tensors whole.
Each value of the flag --codec is a key of `CODECS`; `build_codec` adds the wrappers that every
codec can have.
"""

from thinwire.ops.codecs.base import Codec, EncodeContext, NonFiniteUpdate
from thinwire.ops.codecs.error_feedback import coding_of
from thinwire.ops.codecs.registry import CODECS, CodecChoices, build_codec

__all__ = [
    "CODECS",
    "Codec",
    "CodecChoices",
    "EncodeContext",
    "NonFiniteUpdate",
    "build_codec",
    "coding_of",
]
