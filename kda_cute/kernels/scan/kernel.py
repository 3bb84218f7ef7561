"""The scan: state, X and output of every chunk of C = 64 tokens, K = V = 128.

Per (sequence, head), from the first chunk to the last, S the state on entering the chunk:

    X = v - kd S        o = qd S + p X + diag(qk) X        S <- diag(eg) S + z^T X

The recurrence acts on each column v of S alone, so a warpgroup owns 64 of them, as rows of S^T: fp32
accumulators of wgmma with all K, and after rounding to bf16 the left operands of the next products.
X^T is an operand as it stands, too.  The serial chain S -> X -> S crosses neither shared memory nor
another warpgroup.

    role       warps         registers   work of a chunk                    MMA (m64 n k16)
    consumer   4 per group   232         S^T kd^T, S^T qd^T, X^T p^T        8 + 8 + 4 of n = 64
                                         X^T z                              4 of n = 128
    producer   1             40          tensor copies of kd, qd, v, z, p; bulk copies of eg, qk

With groups = 2 a CTA owns a (sequence, head), with groups = 1 half of its columns v.  Warpgroups
never wait for each other: each has its own tiles to stage o, the state and X in, and only stages
of the loaded tiles are shared.  The order inside a chunk keeps an MMA in flight wherever registers are
at work: the decay of S, the subtraction from v and the copies out run under S^T kd^T and S^T qd^T,
the diagonal under X^T z, and rounding the state under X^T p^T.

The state on entering each chunk and X are saved for a backward pass when asked for.  Rows past a
sequence's end are 0 in every factor, and v is zeroed there in shared memory: they add nothing to S
and are 0 in X; only o must not be written there.  Sequences may be empty.  Shared-memory layouts come
from `kda_cute.layouts`.
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import const_expr

from ...device import records
from .consumer import ConsumerRole
from .producer import ProducerRole
from .schedule import Config, Copies, Gmem
from .walker import BY_TOKEN, Fakes, Walker


class Scan(Walker):
    """The kernel for one `Config`."""

    def __init__(self, config: Config):
        super().__init__(config, ConsumerRole, ProducerRole)

    @cute.jit
    def __call__(
        self, factors: cute.Tensor, v: cute.Tensor, initial, cu_seqlens, o: cute.Tensor, saved, final,
        stream: cuda.CUstream,
    ):  # fmt: skip
        f = records.parts("factors", factors)
        to_states, to_X = None, None
        if const_expr(self.config.save):
            chunk = records.parts("chunk", saved)
            to_states, to_X = self.store("states", chunk["S"]), self.store("X", chunk["X"])
        copies = Copies(
            *(self.load(name, f[name]) for name in ("kd", "z", "qd", "p")),
            self.load("v", v, BY_TOKEN), self.store("o", o, BY_TOKEN), to_states, to_X,
        )  # fmt: skip
        m = Gmem(f["qk"], f["eg"], initial, cu_seqlens, final, o)
        self.launch(m, copies, o, factors.shape[0], stream)


# ---------------------------------------------------------------- compile
def trace(config: Config):
    """(jit callable, fake arguments) for `compile.KernelSpec`."""
    fake = Fakes(config)
    arguments = (
        fake.records("factors"), fake.by_token(), fake.initial(), fake.cu_seqlens(), fake.by_token(),
        fake.records("chunk") if config.save else None, fake.final(),
    )  # fmt: skip
    return Scan(config), arguments
