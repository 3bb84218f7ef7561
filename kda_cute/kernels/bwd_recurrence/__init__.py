"""The level-1 kernel: `kernel` (mathematics, launch), `schedule` (roles, barriers), `producer`, `value`, `key` (one role each)."""

from .kernel import trace
from .schedule import Config

__all__ = ["Config", "trace"]
