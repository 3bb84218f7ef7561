"""The transition of `chunk_kda`: what a chunk of 64 tokens does to the state, as factors.

`kernel` (mathematics, launch), `schedule` (config, arguments), and a file for each part.
"""

from .kernel import trace
from .schedule import Config, mma_account

__all__ = ["Config", "mma_account", "trace"]
