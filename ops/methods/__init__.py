"""Methods: which policies train a model together.

A `Method` holds one policy for each interface; `METHODS` names the compositions of the papers, and
`compose` makes one from the flags' values. `thinwire.ops.methods.validation` knows which policies
go together, so that a run that cannot work is refused before it starts.
"""

from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.methods.method import INTERFACES, METHODS, Method
from thinwire.ops.methods.validation import validate

__all__ = ["INTERFACES", "METHODS", "Choices", "Method", "compose", "validate"]
