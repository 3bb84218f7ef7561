"""The level-1 kernel: `kernel` (mathematics, launch), `schedule` (roles, barriers), and a file for
each role.
"""

from .kernel import trace
from .schedule import Config, mma_account

__all__ = ["Config", "mma_account", "trace"]
