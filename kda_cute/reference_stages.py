"""Float64 oracles of the stages of `chunk_kda` (level 2): the equations of `factors`, each from the
tensors that the stage is given, and no rounding in between.
"""

from typing import NamedTuple

import torch

from .factors import CHUNK, HEAD_DIM, Factors


class Scanned(NamedTuple):
    """o [B, T, H, 128 (V)], final [N, H, 128 (V), 128 (K)], and the state on entering each chunk,
    states [slots, H, 128 (V), 128 (K)]; all float64, NaN where nothing is to be written.
    """

    o: torch.Tensor
    final: torch.Tensor
    states: torch.Tensor


def scan(
    factors: Factors,
    B: int,
    T: int,
    initial: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Scanned:
    """The scan of B sequences of T tokens, or of the packed ones of cu_seqlens [N + 1] (B = 1; they
    may leave tokens over).  initial: [N, H, 128 (V), 128 (K)].
    """
    f = Factors(*(x.double() for x in factors))
    slots, H = f.w.shape[:2]
    if cu_seqlens is None:
        chunks = -(-T // CHUNK)
        walks = [(n, 0, T, n * chunks) for n in range(B)]
    else:
        bounds = cu_seqlens.tolist()
        walks = [
            (0, first, last, first // CHUNK + n)
            for n, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False))
        ]
    o = f.w.new_full((B, T, H, HEAD_DIM), torch.nan)
    states = f.w.new_full((slots, H, HEAD_DIM, HEAD_DIM), torch.nan)
    final = f.w.new_zeros((len(walks), H, HEAD_DIM, HEAD_DIM))
    if initial is not None:
        final.copy_(initial)
    for n, (batch, first, last, slot) in enumerate(walks):
        S = final[n]  # [H, V, K]
        for token in range(first, last, CHUNK):
            rows = min(CHUNK, last - token)
            states[slot] = S
            St = S.transpose(1, 2)
            U = f.u[slot] - f.w[slot] @ St
            out = f.qd[slot] @ St + f.mqk[slot] @ U + f.qk[slot][..., None] * U
            o[batch, token : token + rows] = out[:, :rows].transpose(0, 1)
            S.mul_(f.eg[slot][:, None, :]).add_(U.transpose(1, 2) @ f.kr[slot])
            slot += 1
    return Scanned(o, final, states)
