"""Float64 oracles of the stages of `chunk_kda` (level 2): the equations of `factors`, each from the
tensors that the stage is given, and no rounding in between.
"""

from typing import NamedTuple

import torch

from .factors import CHUNK, HEAD_DIM, LEAST_B, Factors, slot_count
from .gates import gate as gate_forward
from .gates import gate_backward, l2norm, l2norm_backward


class Scanned(NamedTuple):
    """o [B, T, H, 128 (V)], final [N, H, 128 (V), 128 (K)], and the state on entering each chunk,
    states [slots, H, 128 (V), 128 (K)], and its X [slots, H, 64, 128 (V)], 0 in rows past a sequence's
    end; all float64, NaN where nothing is to be written.
    """

    o: torch.Tensor
    final: torch.Tensor
    states: torch.Tensor
    X: torch.Tensor


def scan(
    factors: Factors,
    v: torch.Tensor,
    initial: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Scanned:
    """The scan of v [B, T, H, 128 (V)], B sequences of T tokens, or the packed ones of cu_seqlens
    [N + 1] (B = 1).  initial: [N, H, 128 (V), 128 (K)].  Rows of v that no sequence has may hold
    anything.
    """
    f, v = Factors(*(x.double() for x in factors)), v.double()
    slots, H = f.kd.shape[:2]
    B, T = v.shape[:2]
    walks = _walks(B, T, cu_seqlens)
    o = torch.full_like(v, torch.nan)
    states = v.new_full((slots, H, HEAD_DIM, HEAD_DIM), torch.nan)
    saved_X = v.new_full((slots, H, CHUNK, HEAD_DIM), torch.nan)
    final = v.new_zeros((len(walks), H, HEAD_DIM, HEAD_DIM))
    if initial is not None:
        final.copy_(initial)
    for n, (batch, first, last, slot) in enumerate(walks):
        S = final[n]  # [H, V, K]
        for token in range(first, last, CHUNK):
            rows = min(CHUNK, last - token)
            states[slot] = S
            St = S.transpose(1, 2)
            X = _whole(v[batch, token : token + rows]) - f.kd[slot] @ St
            out = f.qd[slot] @ St + f.p[slot] @ X + f.qk[slot][..., None] * X
            saved_X[slot] = X
            o[batch, token : token + rows] = out[:, :rows].transpose(0, 1)
            S.mul_(f.eg[slot][:, None, :]).add_(X.transpose(1, 2) @ f.z[slot])
            slot += 1
    return Scanned(o, final, states, saved_X)


class Reversed(NamedTuple):
    """dinitial [N, H, 128 (V), 128 (K)], the gradient of the state on leaving each chunk, dstates
    [slots, H, 128 (V), 128 (K)], and dv [B, T, H, 128 (V)]; all float64, NaN where nothing is to be
    written.
    """

    dinitial: torch.Tensor
    dstates: torch.Tensor
    dv: torch.Tensor


def reverse_scan(
    factors: Factors,
    do: torch.Tensor,
    dfinal: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> Reversed:
    """The gradients that `scan` passes on: do [B, T, H, 128 (V)] of its o, dfinal of its final.  Rows
    of do that no sequence has may hold anything.
    """
    f, do = Factors(*(x.double() for x in factors)), do.double()
    slots, H = f.kd.shape[:2]
    walks = _walks(*do.shape[:2], cu_seqlens)
    dstates = do.new_full((slots, H, HEAD_DIM, HEAD_DIM), torch.nan)
    dv = torch.full_like(do, torch.nan)
    dinitial = do.new_zeros((len(walks), H, HEAD_DIM, HEAD_DIM))
    if dfinal is not None:
        dinitial.copy_(dfinal)
    for n, (batch, first, last, slot) in enumerate(walks):
        dS = dinitial[n]  # [H, V, K]
        for c in reversed(range(-(-(last - first) // CHUNK))):
            token, at = first + CHUNK * c, slot + c
            tokens = slice(token, min(token + CHUNK, last))
            rows = _whole(do[batch, tokens])
            dstates[at] = dS
            out = f.p[at].mT @ rows + f.qk[at][..., None] * rows + f.z[at] @ dS.mT
            dv[batch, tokens] = out[:, : tokens.stop - token].transpose(0, 1)
            dS.mul_(f.eg[at][:, None, :]).add_(rows.mT @ f.qd[at] - out.mT @ f.kd[at])
    return Reversed(dinitial, dstates, dv)


def _whole(tokens: torch.Tensor) -> torch.Tensor:
    """A chunk's [rows, H, 128] as [H, 64, 128], 0 in rows that it doesn't have."""
    rows = tokens.transpose(0, 1)
    return torch.nn.functional.pad(rows, (0, 0, 0, CHUNK - rows.shape[1]))


def _walks(B: int, T: int, cu_seqlens: torch.Tensor | None) -> list[tuple[int, int, int, int]]:
    """(batch row, first token, end, first slot) of each sequence."""
    if cu_seqlens is None:
        chunks = -(-T // CHUNK)
        return [(n, 0, T, n * chunks) for n in range(B)]
    bounds = cu_seqlens.tolist()
    pairs = zip(bounds, bounds[1:], strict=False)
    return [(0, first, last, first // CHUNK + n) for n, (first, last) in enumerate(pairs)]


# ---------------------------------------------------------------- backward
class Inputs(NamedTuple):
    """A call of `chunk_kda` in the dtype of the oracle: q, k, do, g [B, T, H, 128], beta [B, T, H],
    A_log [H] and dt_bias [H, 128] or None, cu_seqlens [N + 1] or None, and its options.
    """

    q: torch.Tensor
    k: torch.Tensor
    do: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    gate: str = "log"
    scale: float = HEAD_DIM**-0.5
    lower_bound: float = -5.0
    beta_scale: float = 1.0
    l2norm: bool = True
    beta_sigmoid: bool = True

    def double(self) -> "Inputs":
        """The same in float64."""
        tensors = (x if x is None else x.double() for x in self[:7])
        return Inputs(*tensors, *self[7:])

    @property
    def slots(self) -> int:
        B, T = self.q.shape[:2]
        packed = self.cu_seqlens is not None
        return slot_count(B * T, len(self.cu_seqlens) - 1 if packed else B, packed)

    def walks(self) -> list[tuple[int, int, int, int]]:
        """(batch row, first token, end, first slot) of every sequence."""
        return _walks(*self.q.shape[:2], self.cu_seqlens)

    def chunk(self, batch: int, token: int, end: int) -> "Activated":
        """A chunk's tokens after activation, [H, rows, ..]."""
        rows = slice(token, min(token + CHUNK, end))
        q, k, do, g, beta = (x[batch, rows].transpose(0, 1) for x in self[:5])
        b = self.beta_scale * (beta.sigmoid() if self.beta_sigmoid else beta)
        parameters = (x if x is None else x[:, None] for x in (self.A_log, self.dt_bias))
        g = gate_forward(g, *parameters, self.lower_bound, self.gate)
        if self.l2norm:
            q, k = l2norm(q), l2norm(k)
        return Activated(q, k, do, g.cumsum(1), b)


class Activated(NamedTuple):
    """Normalised q and k, do, running sums of the gate [H, rows, 128], and b [H, rows]."""

    q: torch.Tensor
    k: torch.Tensor
    do: torch.Tensor
    gc: torch.Tensor
    b: torch.Tensor

    def pairs(self) -> torch.Tensor:
        """exp(gc_i - gc_j) for i >= j, 0 otherwise [H, rows, rows, 128]."""
        n = self.gc.shape[1]
        later = torch.ones(n, n, dtype=torch.bool, device=self.gc.device).triu(1)
        exponent = self.gc[:, :, None] - self.gc[:, None]
        return exponent.masked_fill(later[..., None], -torch.inf).exp()


def factors(x: Inputs) -> tuple[Factors, torch.Tensor]:
    """The factors of every chunk, and INV [slots, H, 64, 64]; 0 in rows that no token has (INV: those
    of I), NaN in slots that no chunk owns.  No |b| is below LEAST_B, as in the backward form of the
    kernel.
    """
    x = x.double()
    H, D = x.q.shape[2:]
    fill = lambda *shape: x.q.new_full((x.slots, H, *shape), torch.nan)  # noqa: E731
    wide, square = (CHUNK, D), (CHUNK, CHUNK)
    out = Factors(fill(*wide), fill(*wide), fill(*wide), fill(*square), fill(CHUNK), fill(D))
    inverses = fill(*square)
    eye = torch.eye(CHUNK, dtype=x.q.dtype, device=x.q.device)
    for batch, first, end, slot in x.walks():
        for i, token in enumerate(range(first, end, CHUNK)):
            c, at = x.chunk(batch, token, end), slot + i
            rows = c.b.shape[1]
            b, decay = torch.where(c.b.abs() < LEAST_B, LEAST_B, c.b), c.pairs()
            products = torch.einsum("hik,hjk,hijk->hij", c.k, c.k, decay).tril(-1) * b[:, None]
            INV = torch.linalg.inv(eye[:rows, :rows] + products)
            mqk = x.scale * torch.einsum("hik,hjk,hijk->hij", c.q, c.k, decay) * b[:, None]
            z = INV.mT @ (b[..., None] * c.k * (c.gc[:, -1:] - c.gc).exp())
            p = mqk @ INV
            for to, value in zip(
                (out.kd, out.z, out.qd, out.p),
                (c.k * c.gc.exp(), z, x.scale * c.q * c.gc.exp(), p.tril(-1)),
                strict=True,
            ):
                to[at] = 0
                to[at, :, :rows, : value.shape[-1]] = value
            out.qk[at] = 0
            out.qk[at, :, :rows] = torch.diagonal(p, dim1=1, dim2=2)
            out.eg[at] = c.gc[:, -1].exp()
            inverses[at] = eye
            inverses[at, :, :rows, :rows] = INV
    return out, inverses


class ChunkTensors(NamedTuple):
    """What the other stages leave for `gradients`, 0 in rows that no token has and NaN in slots that no
    chunk owns.

    dv     [B, T, H, 128]                 NaN for tokens of no sequence
    S, dS  [slots, H, 128 (V), 128 (K)]   state on entering a chunk, gradient of that on leaving it
    X      [slots, H, 64, 128]
    INV    [slots, H, 64, 64]
    """

    dv: torch.Tensor
    S: torch.Tensor
    dS: torch.Tensor
    X: torch.Tensor
    INV: torch.Tensor


def chunk_tensors(
    x: Inputs, v: torch.Tensor, initial: torch.Tensor, dfinal: torch.Tensor
) -> tuple[ChunkTensors, torch.Tensor]:
    """All stages before `gradients`, and dinitial.  v as q; initial, dfinal [N, H, V, K]."""
    f, INV = factors(x)
    forward = scan(f, v, initial, x.cu_seqlens)
    back = reverse_scan(f, x.do, dfinal, x.cu_seqlens)
    tensors = ChunkTensors(back.dv, forward.states, back.dstates, forward.X, INV)
    return tensors, back.dinitial


class Gradients(NamedTuple):
    """What `gradients` writes: [B, T, H, ..] as the inputs, NaN for tokens of no sequence; partial
    sums of ddt_bias [slots, H, 128] and dA_log [slots, H], 0 for slots without a chunk, None for gate
    "log".
    """

    dq: torch.Tensor
    dk: torch.Tensor
    dg: torch.Tensor
    dbeta: torch.Tensor
    dA_part: torch.Tensor | None
    ddt_part: torch.Tensor | None


def gradients(x: Inputs, tensors: ChunkTensors) -> Gradients:
    """Gradients of the inputs, chunk by chunk, from states and their gradients."""
    x, tensors = x.double(), ChunkTensors(*(t.double() for t in tensors))
    H, D = x.q.shape[2:]
    fill = lambda like: torch.full_like(like, torch.nan)  # noqa: E731
    with_parameters = x.gate != "log"
    out = Gradients(
        *(fill(t) for t in (x.q, x.k, x.g, x.beta)),
        x.q.new_zeros(x.slots, H) if with_parameters else None,
        x.q.new_zeros(x.slots, H, D) if with_parameters else None,
    )
    for batch, first, end, slot in x.walks():
        for i, token in enumerate(range(first, end, CHUNK)):
            rows = slice(token, min(token + CHUNK, end))
            c, at = x.chunk(batch, token, end), slot + i
            dv = tensors.dv[batch, rows].transpose(0, 1)
            dq, dk, dg, db = _chunk_gradients(x.scale, c, dv, *(t[at] for t in tensors[1:]))
            q, k, _, g, _ = (t[batch, rows].transpose(0, 1) for t in x[:5])
            if x.l2norm:
                dq, dk = l2norm_backward(dq, q), l2norm_backward(dk, k)
            parameters = (p if p is None else p[:, None] for p in (x.A_log, x.dt_bias))
            dg, dA = gate_backward(dg, g, *parameters, x.lower_bound, x.gate)
            db = db * (c.b * (1 - c.b / x.beta_scale) if x.beta_sigmoid else x.beta_scale)
            for to, value in zip(out[:4], (dq, dk, dg, db), strict=True):
                to[batch, rows] = value.transpose(0, 1)
            if with_parameters:
                out.dA_part[at] = dA.sum((1, 2))
                out.ddt_part[at] = dg.sum(1)
    return out


def _chunk_gradients(scale, c: Activated, dv, S, dS, X, INV):
    """(dqn, dkn, d of the log-space gate [H, rows, 128], db [H, rows])."""
    rows = c.b.shape[1]
    U = INV[:, :rows, :rows] @ X[:, :rows]
    db = (dv * U).sum(-1) / torch.where(c.b.abs() < LEAST_B, LEAST_B, c.b)
    U = c.b[..., None] * U
    start, end, eg = c.gc.exp(), (c.gc[:, -1:] - c.gc).exp(), c.gc[:, -1].exp()
    dqn, dkn, dkr = scale * start * (c.do @ S), -start * (dv @ S), end * (U @ dS)
    dgc = c.q * dqn + c.k * dkn

    decay = c.pairs()
    dM, dL = scale * (c.do @ U.mT), -(dv @ U.mT).tril(-1)
    strict = dM.tril(-1)
    rows_q = torch.einsum("hij,hijk,hjk->hik", strict, decay, c.k)
    rows_k = torch.einsum("hij,hijk,hjk->hik", dL, decay, c.k)
    columns = torch.einsum("hij,hijk,hik->hjk", strict, decay, c.q)
    columns = columns + torch.einsum("hij,hijk,hik->hjk", dL, decay, c.k)
    same = torch.diagonal(dM, dim1=1, dim2=2)[..., None]
    dgc = dgc + c.q * rows_q + c.k * rows_k - c.k * columns

    moved = c.k * dkr
    before = torch.nn.functional.pad(moved.cumsum(1)[:, :-1], (0, 0, 1, 0))  # never minus its own
    dg = dgc.flip(1).cumsum(1).flip(1) + before
    dg = dg + (eg * (dS * S).sum(1))[:, None]
    return dqn + rows_q + same * c.k, dkn + dkr + rows_k + columns + same * c.q, dg, db
