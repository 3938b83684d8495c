"""Codecs select and encode the part of a step's dense tensors that a worker sends.

A `Codec` encodes the tensors into a packet. Wrappers around a codec keep the entries that were not
sent, correct momentum, clip, or send small tensors whole. Each value of the flag --codec is a row
of `CODECS`; `build_codec` adds the wrappers that every codec can have.
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
