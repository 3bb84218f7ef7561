"""KDA (Kimi Delta Attention) training kernels for NVIDIA Hopper, in the CuTe Python DSL, as torch callables."""

from .api import bwd_recurrence
from .chunk import chunk_kda
from .prepare import Gradients, Prepared, finish, prepare
from .workspace import CHUNK, HEAD_DIM, RecurrenceGrads, Workspace

__version__ = "0.1.0"

__all__ = [
    "CHUNK",
    "HEAD_DIM",
    "Gradients",
    "Prepared",
    "RecurrenceGrads",
    "Workspace",
    "bwd_recurrence",
    "chunk_kda",
    "finish",
    "prepare",
]
