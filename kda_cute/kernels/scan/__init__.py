"""The scan over a sequence's chunks: `kernel` (mathematics, launch), `schedule` (roles, barriers),
and a file for each role.
"""

from .kernel import trace
from .schedule import Config, MmaRow, mma_account

__all__ = ["Config", "MmaRow", "mma_account", "trace"]
