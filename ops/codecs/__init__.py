"""What of a step's dense tensors is sent.

A `Codec` makes a packet of the tensors; wrappers around it keep what it leaves out, correct
momentum, clip, or send small tensors whole. A value of --codec is a row of `CODECS`; `build_codec`
adds the wrappers that any codec can have.
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
