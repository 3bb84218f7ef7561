"""The reverse scan: gradients of the state and of U for every chunk of C = 64 tokens, K = V = 128.

Per (sequence, head), from the last chunk to the first, dS the gradient of the state after the chunk:

    dU = mqk^T do + diag(qk) do + kr dS        dS <- diag(eg) dS + qd^T do - w^T dU

This is `kernel` the other way round, with the same roles, registers and stages: a warpgroup owns 64
columns v of dS, as rows of dS^T in fp32 accumulators, and neither dS^T nor dU^T goes through shared
memory to become an operand.  do^T is one where it lies, [token, v] as loaded.

    role       work of a chunk                       MMA (m64 n k16)
    consumer   do^T mqk, dS^T kr^T                   4 + 8 of n = 64
               do^T qd, dU^T w                       4 + 4 of n = 128
    producer   tensor copies of do, mqk, kr, qd, w; bulk copies of eg, qk
    storer     tensor copies out of dS, dU

What needs no fresh dS or dU covers the work on registers: rounding dS runs under do^T mqk, the decay
under dS^T kr^T, rounding dU under do^T qd, staging both under dU^T w.
dU is rounded once, to nearest, so its negative, which makes the last product a difference, has the
same digits as what is stored.

Rows past a sequence's end are 0 in every factor, and do is zeroed there in shared memory: dU is 0 in
those rows.  An empty sequence passes the gradient of its last state on.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from ...device import records
from .producer import ReverseProducerRole
from .reverse_consumer import ReverseConsumerRole
from .schedule import Gmem, ReverseConfig, ReverseCopies
from .storer import ReverseStorerRole
from .walker import BY_TOKEN, Fakes, Walker


class ReverseScan(Walker):
    """The kernel for one `ReverseConfig`."""

    def __init__(self, config: ReverseConfig):
        super().__init__(config, ReverseConsumerRole, ReverseProducerRole, ReverseStorerRole)

    @cute.jit
    def __call__(
        self, factors: cute.Tensor, do: cute.Tensor, dfinal, cu_seqlens,
        dchunk: cute.Tensor, dinitial, stream: cuda.CUstream,
    ):  # fmt: skip
        f, d = records.parts("backward factors", factors), records.parts("chunk", dchunk)
        copies = ReverseCopies(
            *(self.load(name, f[name]) for name in ("w", "kr", "qd", "mqk")),
            self.load("do", do, BY_TOKEN), self.store("dstates", d["S"]), self.store("dU", d["U"]),
        )  # fmt: skip
        m = Gmem(f["qk"], f["eg"], dfinal, cu_seqlens, dinitial)
        self.launch(m, copies, do, factors.shape[0], stream)


# ---------------------------------------------------------------- compile
def trace(config: ReverseConfig):
    """(jit callable, fake arguments) for `compile.KernelSpec`."""
    fake = Fakes(config)
    arguments = (
        fake.records("backward factors"), fake.by_token(), fake.initial(), fake.cu_seqlens(),
        fake.records("chunk"), fake.final(),
    )  # fmt: skip
    return ReverseScan(config), arguments
