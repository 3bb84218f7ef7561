"""The gradients of `chunk_kda`: from states and their gradients to those of every input.

`kernel` (mathematics, launch), `schedule` (config, arguments, shared memory), and a file for each
part.
"""

from .kernel import trace
from .schedule import Config

__all__ = ["Config", "trace"]
