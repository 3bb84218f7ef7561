"""Which tokens a chunk slot of packed sequences holds; the rule is in `kda_cute.factors`."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..factors import CHUNK
from .math import clamp


@cute.jit
def packed_chunk(cu_seqlens: cute.Tensor, T: Int32, slot: Int32):
    """(first token, tokens) of a slot, (0, 0) where no chunk owns it; whole warps.  Offsets out of
    range or out of order never lead outside the T tokens.
    """
    token, rows = Int32(0), Int32(0)
    n = find_sequence(cu_seqlens, T, slot)
    first, last = clamp(cu_seqlens[n], T), clamp(cu_seqlens[n + 1], T)
    chunk = slot - (first // CHUNK + n)
    if chunk >= 0:
        token = first + chunk * CHUNK
        rows = cutlass.max(cutlass.min(last - token, CHUNK), 0)
    return token, rows


@cute.jit
def find_sequence(cu_seqlens: cute.Tensor, T: Int32, slot: Int32):
    """The last sequence whose first slot is not past this one, by a 32-ary search."""
    low, high = Int32(0), Int32(cu_seqlens.shape[0] - 1)
    lane = cute.arch.lane_idx()
    while high - low > 1:
        step = (high - low + 31) // 32
        n = cutlass.min(low + lane * step, high - 1)
        before = clamp(cu_seqlens[n], T) // CHUNK + n <= slot
        count = cute.arch.popc(cute.arch.vote_ballot_sync(before))
        low = cutlass.min(low + cutlass.max(count - 1, 0) * step, high - 1)
        high = cutlass.min(low + step, high)
    return low
