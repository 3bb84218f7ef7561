"""The tensors that travel between the stages of `chunk_kda` (level 2), chunks of 64 tokens.

Per chunk and head, with gc the running sum of the gate inside the chunk, gT its value at the
chunk's last valid token, b the activated beta, kn and qn the (normalised) keys and queries:

    kd  = kn exp(gc)     qd = scale qn exp(gc)     kr = diag(b) kn exp(gT - gc)
    L   = tril(kn_i . kn_j exp(gc_i - gc_j), -1) diag(b)         INV = (I + L)^-1
    mqk = scale tril(qn_i . kn_j exp(gc_i - gc_j)) diag(b)

    z = INV^T kr         p = mqk INV

and then, S the state on entering the chunk, forward and backward are an affine map and its transpose:

    X  = v - kd S                o = qd S + p X          S' = exp(gT) S + z^T X
    dv = p^T do + z dS'          dS = exp(gT) dS' + qd^T do - kd^T dv

X is what the tokens would change with nothing else in their chunk; with it, U = INV X is what they
write, over b.  z is the only factor that is summed into the carried S, where nothing erases its error:
it is made from kr in two bf16 words, high and low.  v enters X by the unit matrix, so its gradient is
that of X, and nobody divides by b but for the gradient of a b that is given (`LEAST_B`).

The tensors of one chunk and head lie together, in a record of rows of 128 bf16 (`RECORDS`), and the
records of a call in one tensor [slots, H, rows, 128]: one allocation, one argument of a kernel.

A sequence owns ceil(len / 64) consecutive slots, the first one number cu_seqlens[n] // 64 + n
(`first_slot`): slots of different sequences never meet, whatever the lengths, and nobody has to sum
up the sequences before. Dense batches number theirs without gaps. Slots that no chunk owns are
never written nor read.
"""

import math
from typing import NamedTuple

import torch

CHUNK = 64
HEAD_DIM = 128
ROW_BYTES = 2 * HEAD_DIM  # of a record
LEAST_B = 2.0**-60  # stands for a smaller |b| in a backward pass, where dv / b is wanted


class Part(NamedTuple):
    """One tensor of a record: its first row, its shape per chunk and head, and its dtype."""

    row: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        """Rows of 128 bf16 that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize // ROW_BYTES


def _record(**parts: tuple) -> dict[str, Part]:
    """Name -> part, one after another."""
    row, found = 0, {}
    for name, described in parts.items():
        found[name] = Part(row, *described)
        row += found[name].rows
    return found


_WIDE, _SQUARE = ((CHUNK, HEAD_DIM),), ((CHUNK, CHUNK),)
_LINES = {"qk": ((CHUNK,), torch.float32), "eg": ((HEAD_DIM,), torch.float32)}
_FACTORS = {**dict.fromkeys(("kd", "z", "qd"), _WIDE), "p": _SQUARE, **_LINES}
RECORDS = {
    "factors": _record(**_FACTORS),
    "backward factors": _record(**_FACTORS, INV=_SQUARE),
    # The state on entering a chunk, and X.
    "chunk": _record(S=((HEAD_DIM, HEAD_DIM),), X=_WIDE),
    # The gradient of the state on leaving a chunk.
    "dchunk": _record(dS=((HEAD_DIM, HEAD_DIM),)),
}


def record_rows(kind: str) -> int:
    """Rows of a record."""
    return sum(part.rows for part in RECORDS[kind].values())


def views(kind: str, records: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors [slots, H, ...] inside the records [slots, H, rows, 128] of a kind."""
    found = {}
    for name, part in RECORDS[kind].items():
        rows = records[:, :, part.row : part.row + part.rows].view(part.dtype)
        found[name] = rows.view(*records.shape[:2], *part.shape)
    return found


class Factors(NamedTuple):
    """What the transition leaves for the scans.  Rows past a sequence's end hold 0.

    kd, z, qd  [slots, H, 64, 128] bf16
    p          [slots, H, 64, 64]  bf16   strictly lower; the diagonal is qk
    qk         [slots, H, 64]      fp32   scale * b_i qn_i . kn_i
    eg         [slots, H, 128]     fp32   exp(gT)
    """

    kd: torch.Tensor
    z: torch.Tensor
    qd: torch.Tensor
    p: torch.Tensor
    qk: torch.Tensor
    eg: torch.Tensor


def slot_count(T: int, N: int, packed: bool) -> int:
    """Slots for N sequences of T tokens together: a bound for packed ones, exact for equal ones."""
    if packed:
        return T // CHUNK + N
    return N * -(-(T // N) // CHUNK) if N else 0
