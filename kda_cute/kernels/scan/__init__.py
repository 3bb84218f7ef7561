"""The scans over a sequence's chunks, forward and reverse: `kernel` and `reverse` (mathematics,
launch), `schedule` (roles, barriers), `walker` and `state` (what both directions share), and a file
for each role.
"""

from . import kernel, reverse
from .schedule import Config, ReverseConfig, mma_account

__all__ = ["Config", "ReverseConfig", "mma_account", "trace"]


def trace(config: Config | ReverseConfig):
    """(jit callable, fake arguments) for `compile.KernelSpec`, of the direction that config is for."""
    direction = reverse if config.reverse else kernel
    return direction.trace(config)
