"""The reverse scan: gradients of the state and of v for every chunk of C = 64 tokens, K = V = 128.

Per (sequence, head), from the last chunk to the first, dS the gradient of the state after the chunk:

    dv = p^T do + diag(qk) do + z dS        dS <- diag(eg) dS + qd^T do - kd^T dv

This is `kernel` the other way round, with the same roles, registers and stages: a warpgroup owns 64
columns v of dS, as rows of dS^T in fp32 accumulators, and neither dS^T nor dv^T goes through shared
memory to become an operand.  do^T is one where it lies, [token, v] as loaded.

    role       work of a chunk                       MMA (m64 n k16)
    consumer   do^T p, dS^T z^T                      4 + 8 of n = 64
               do^T qd, dv^T kd                      4 + 4 of n = 128
    producer   tensor copies of do, p, z, qd, kd; bulk copies of eg, qk

What needs no fresh dS or dv covers the work on registers: rounding and staging dS run under do^T p,
the decay and the copies out under dS^T z^T, rounding dv under do^T qd, staging it under dv^T kd.
dv is rounded once, to nearest, so its negative, which makes the last product a difference, has the
same digits as what is stored.

Rows past a sequence's end are 0 in every factor, and do is zeroed there in shared memory: dv is 0 in
those rows, and is not written.  An empty sequence passes the gradient of its last state on.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute

from ...device import records
from .producer import ReverseProducerRole
from .reverse_consumer import ReverseConsumerRole
from .schedule import Gmem, ReverseConfig, ReverseCopies
from .walker import BY_TOKEN, Fakes, Walker


class ReverseScan(Walker):
    """The kernel for one `ReverseConfig`."""

    def __init__(self, config: ReverseConfig):
        super().__init__(config, ReverseConsumerRole, ReverseProducerRole)

    @cute.jit
    def __call__(
        self, factors: cute.Tensor, do: cute.Tensor, dfinal, cu_seqlens,
        dv: cute.Tensor, dchunk: cute.Tensor, dinitial, stream: cuda.CUstream,
    ):  # fmt: skip
        f, d = records.parts("backward factors", factors), records.parts("dchunk", dchunk)
        copies = ReverseCopies(
            *(self.load(name, f[name]) for name in ("kd", "z", "qd", "p")),
            self.load("do", do, BY_TOKEN), self.store("dv", dv, BY_TOKEN),
            self.store("dstates", d["dS"]),
        )  # fmt: skip
        m = Gmem(f["qk"], f["eg"], dfinal, cu_seqlens, dinitial, dv)
        self.launch(m, copies, do, factors.shape[0], stream)


# ---------------------------------------------------------------- compile
def trace(config: ReverseConfig):
    """(jit callable, fake arguments) for `compile.KernelSpec`."""
    fake = Fakes(config)
    arguments = (
        fake.records("backward factors"), fake.by_token(), fake.initial(), fake.cu_seqlens(),
        fake.by_token(), fake.records("dchunk"), fake.final(),
    )  # fmt: skip
    return ReverseScan(config), arguments
