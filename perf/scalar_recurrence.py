"""The scalar baseline of `bwd_recurrence`: no tensor core, every product a plain fp32 loop.

One CTA of 256 threads per (sequence, head) walks the chunks of 16 rows from last to first.  dS
[K,V] stays in shared memory in fp32; the threads stride over the elements of each product, one
output element at a time, and each element is an fp32 loop over the contraction.  Per chunk, with S
the state on entering it and b = sigmoid(beta):

    1   diff = v - kd S               U   = INV (b diff)
    2   dU   = Mqk^T do + kr dS       dkr = U dS^T
    3   dvc  = INV^T dU               dL  = -tril(dvc U^T, -1)
    4   dv   = b dvc                  dbeta  = rowsum(dvc * diff)
    5   dM   = tril(do U^T)           dqd = do S^T + dM ki
    6   dki  = dM^T qd
    7   dki += (b dL)^T kd            dkd = -(b dvc) S^T + (b dL) ki       dbeta += rowsum(dL * kd ki^T)
    8   dgT  = exp(gT) rowsum(dS * S) + colsum(dkr * kr)
        dS  <- exp(gT) dS + qd^T do - kd^T (b dvc)

Shared memory is dS (64 KB) under a stack of row-major scratch tiles; do, v, kd, qd, kr, ki and the
states are read where they lie in global memory.  Step 6 stages dki in the bytes of dvc, so steps 7
and 8 compute dvc anew, element by element, wherever they need it (`recompute=True`).  That costs
about four times the other arithmetic, so `recompute=False` keeps dvc in a tile of its own: the
fairer figure of what scalar code can do. dL owns its bytes in both.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from kda_cute.compile import KernelSpec, load
from kda_cute.workspace import RecurrenceGrads, Workspace

C, D, THREADS = 16, 128, 256
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class ScalarConfig:
    """What is fixed at compile time: `beta` and `state` name dtypes ("none": no dfinal_state)."""

    beta: str = "float32"
    state: str = "none"
    varlen: bool = False
    recompute: bool = True


def tile_shapes(config: ScalarConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each fp32 shared-memory tile, in stack order."""
    shapes: dict[str, tuple[int, ...]] = {
        "dS": (D, D),
        "gT": (D,),
        "beta": (C,),
        "inv": (C, C),
        "mqk": (C, C),
        "diff": (C, D),
        "U": (C, D),
        "dU": (C, D),
        "dkr": (C, D),
        "dvc": (C, D),
        "dL": (C, C),
        "pairs": (C, C),
        "dbeta": (C,),
    }
    if not config.recompute:
        shapes["dki"] = (C, D)
    return shapes


def smem_bytes(config: ScalarConfig) -> int:
    """Shared memory of one CTA."""
    total = 0
    for shape in tile_shapes(config).values():
        size = 4
        for extent in shape:
            size *= extent
        total += size
    return total


class Smem(NamedTuple):
    """Shared-memory tiles, fp32 and row-major.  dki shares dvc's bytes when dvc is computed anew."""

    dS: Any  # [K,V]
    gT: Any  # [K] exp(gT)
    beta: Any  # [C] b
    inv: Any  # [C,C]
    mqk: Any  # [C,C], dM from step 5 on
    diff: Any  # [C,V] v - kd S
    U: Any  # [C,V]
    dU: Any  # [C,V]
    dkr: Any  # [C,K]
    dvc: Any  # [C,V]
    dL: Any  # [C,C]
    pairs: Any  # [C,C] kd ki^T
    dbeta: Any  # [C]
    dki: Any  # [C,K]


class Chunk(NamedTuple):
    """Global-memory views of one chunk of one head."""

    do: Any  # [rows,V] from the chunk's first token on
    v: Any
    dv: Any
    kd: Any  # [C,K]
    qd: Any
    kr: Any
    ki: Any
    state: Any  # [V,K], stored transposed
    dkd: Any  # [C,K]
    dqd: Any
    dki: Any
    dkr: Any


class ScalarRecurrence:
    def __init__(self, config: ScalarConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        tokens: tuple,
        workspace: tuple,
        mdFinal: cute.Tensor | None,
        mCu: cute.Tensor | None,
        outputs: tuple,
        stream: cuda.CUstream,
    ):
        """tokens: do, v [T,H,V] bf16, beta [T,H].  workspace, outputs: the fields in their order."""
        sequences, heads = outputs[7].shape[0], outputs[7].shape[1]
        self.kernel(tokens, workspace, mdFinal, mCu, outputs).launch(
            grid=(sequences, heads, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tokens: tuple,
        workspace: tuple,
        mdFinal: cute.Tensor | None,
        mCu: cute.Tensor | None,
        outputs: tuple,
    ):
        mDo, mV, mBeta = tokens
        mKd, mQd, mKr, mKi, mGt, mInv, mMqk, mStates = workspace
        mdKd, mdQd, mdKi, mdKr, mdGt, mdV, mdBeta, mdInitial = outputs
        tid = cute.arch.thread_idx()[0]
        seq, head, _ = cute.arch.block_idx()
        s = self.allocate()
        start, length, first_tile, tiles = self.locate(mDo.shape[0], mKd.shape[1], mCu, seq)

        for e in cutlass.range(tid, D * D, THREADS, unroll=1):
            k, v = e // D, e % D
            if const_expr(mdFinal is not None):
                s.dS[k, v] = mdFinal[seq, head, v, k].to(Float32)
            else:
                s.dS[k, v] = Float32(0)

        for step in cutlass.range(tiles, unroll=1):
            t = tiles - 1 - step
            tile = Int64(first_tile + t)
            row = start + t * C
            rows = cutlass.min(length - t * C, C)
            from_row = (Int64(row), 0)
            g = Chunk(
                do=cute.domain_offset(from_row, mDo[None, head, None]),
                v=cute.domain_offset(from_row, mV[None, head, None]),
                dv=cute.domain_offset(from_row, mdV[None, head, None]),
                kd=mKd[head, tile, None, None],
                qd=mQd[head, tile, None, None],
                kr=mKr[head, tile, None, None],
                ki=mKi[head, tile, None, None],
                state=mStates[head, tile, None, None],
                dkd=mdKd[head, tile, None, None],
                dqd=mdQd[head, tile, None, None],
                dki=mdKi[head, tile, None, None],
                dkr=mdKr[head, tile, None, None],
            )
            cute.arch.sync_threads()
            for k in cutlass.range(tid, D, THREADS, unroll=1):
                s.gT[k] = mGt[head, tile, k]
            for c in cutlass.range(tid, C, THREADS, unroll=1):
                b = Float32(0)
                if c < rows:
                    logit = mBeta[Int64(row + c), head].to(Float32)
                    b = cute.arch.rcp_approx(1.0 + cute.math.exp2(-logit * LOG2_E, fastmath=True))
                s.beta[c] = b
            for e in cutlass.range(tid, C * C, THREADS, unroll=1):
                i, j = e // C, e % C
                s.inv[i, j] = mInv[head, tile, i, j].to(Float32)
                s.mqk[i, j] = mMqk[head, tile, i, j].to(Float32)
            cute.arch.sync_threads()
            self.recompute_U(s, g, tid, rows)
            self.output_adjoint(s, g, tid, rows)
            self.solve_adjoint(s, g, tid, rows)
            self.key_query_grads(s, g, tid, rows)
            cute.arch.sync_threads()
            for c in cutlass.range(tid, C, THREADS, unroll=1):
                mdBeta[head, tile, c] = s.dbeta[c]
            for k in cutlass.range(tid, D, THREADS, unroll=1):
                mdGt[head, tile, k] = self.gate_grad(s, g, k, rows)
            cute.arch.sync_threads()
            self.update_dS(s, g, tid, rows)

        cute.arch.sync_threads()
        for e in cutlass.range(tid, D * D, THREADS, unroll=1):
            v, k = e // D, e % D
            mdInitial[seq, head, v, k] = s.dS[k, v].to(mdInitial.element_type)

    @cute.jit
    def allocate(self):
        memory = cutlass.memory.SmemAllocator()
        tiles = {}
        for name, shape in tile_shapes(self.config).items():
            layout = cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))
            tiles[name] = memory.allocate_tensor(Float32, layout, byte_alignment=16)
        if const_expr(self.config.recompute):
            tiles["dki"] = tiles["dvc"]
        return Smem(**tiles)

    @cute.jit
    def locate(self, total, total_tiles, mCu, seq):
        """First token, length, first tile and tile count of a sequence; clamped, so never out of
        bounds.
        """
        start, length, first_tile = Int32(0), Int32(0), Int32(0)
        if const_expr(mCu is not None):
            for n in cutlass.range(seq, unroll=1):
                before = Int32(mCu[n + 1]) - Int32(mCu[n])
                before = cutlass.min(cutlass.max(before, 0), total)
                first_tile = cutlass.min(first_tile + (before + C - 1) // C, total_tiles)
            start = cutlass.min(cutlass.max(Int32(mCu[seq]), 0), total)
            length = cutlass.max(cutlass.min(Int32(mCu[seq + 1]), total) - start, 0)
        else:
            length = total // cute.arch.grid_dim()[0]
            start = seq * length
            first_tile = seq * ((length + C - 1) // C)
        tiles = cutlass.min((length + C - 1) // C, cutlass.max(total_tiles - first_tile, 0))
        return start, length, first_tile, tiles

    @cute.jit
    def recompute_U(self, s, g, tid, rows):
        """1: diff = v - kd S, then U = INV (b diff)."""
        for e in cutlass.range(tid, C * D, THREADS, unroll=1):
            c, v = e // D, e % D
            acc = Float32(0)
            if c < rows:
                acc = g.v[c, v].to(Float32)
                for k in cutlass.range(D, unroll=4):
                    acc -= g.kd[c, k] * g.state[v, k].to(Float32)
            s.diff[c, v] = acc
        cute.arch.sync_threads()
        for e in cutlass.range(tid, C * D, THREADS, unroll=1):
            c, v = e // D, e % D
            acc = Float32(0)
            if c < rows:
                for j in cutlass.range(c + 1, unroll=4):
                    acc += s.inv[c, j] * (s.beta[j] * s.diff[j, v])
            s.U[c, v] = acc
        cute.arch.sync_threads()

    @cute.jit
    def output_adjoint(self, s, g, tid, rows):
        """2: dU = Mqk^T do + kr dS, and dkr = U dS^T."""
        for e in cutlass.range(tid, C * D, THREADS, unroll=1):
            c, v = e // D, e % D
            acc = Float32(0)
            if c < rows:
                for i in cutlass.range(c, rows, unroll=4):
                    acc += s.mqk[i, c] * g.do[i, v].to(Float32)
                for k in cutlass.range(D, unroll=4):
                    acc += g.kr[c, k] * s.dS[k, v]
            s.dU[c, v] = acc
        for e in cutlass.range(tid, C * D, THREADS, unroll=1):
            c, k = e // D, e % D
            acc = Float32(0)
            if c < rows:
                for v in cutlass.range(D, unroll=4):
                    acc += s.U[c, v] * s.dS[k, v]
            s.dkr[c, k] = acc
            g.dkr[c, k] = acc
        cute.arch.sync_threads()

    @cute.jit
    def dvc_element(self, s, c, v, rows):
        """dvc[c,v] = sum over i >= c of INV[i,c] dU[i,v]."""
        acc = Float32(0)
        for i in cutlass.range(c, rows, unroll=4):
            acc += s.inv[i, c] * s.dU[i, v]
        return acc

    @cute.jit
    def dvc_again(self, s, c, v, rows):
        """dvc where step 6 may have overwritten its tile."""
        if const_expr(self.config.recompute):
            acc = self.dvc_element(s, c, v, rows)
        else:
            acc = s.dvc[c, v]
        return acc

    @cute.jit
    def solve_adjoint(self, s, g, tid, rows):
        """3: dvc = INV^T dU, dL = -tril(dvc U^T, -1).  4: dv, first part of dbeta.  5: dM, over
        Mqk.  7: kd ki^T.
        """
        for e in cutlass.range(tid, C * D, THREADS, unroll=1):
            c, v = e // D, e % D
            s.dvc[c, v] = self.dvc_element(s, c, v, rows)
        cute.arch.sync_threads()
        for e in cutlass.range(tid, C * C, THREADS, unroll=1):
            i, j = e // C, e % C
            dL, dM, pair = Float32(0), Float32(0), Float32(0)
            if i < rows and j < i:
                for v in cutlass.range(D, unroll=4):
                    dL -= s.dvc[i, v] * s.U[j, v]
                for k in cutlass.range(D, unroll=4):
                    pair += g.kd[i, k] * g.ki[j, k]
            if i < rows and j <= i:
                for v in cutlass.range(D, unroll=4):
                    dM += g.do[i, v].to(Float32) * s.U[j, v]
            s.dL[i, j] = dL
            s.pairs[i, j] = pair
            s.mqk[i, j] = dM
        for e in cutlass.range(tid, C * D, THREADS, unroll=1):
            c, v = e // D, e % D
            if c < rows:
                g.dv[c, v] = (s.beta[c] * s.dvc[c, v]).to(BFloat16)
        for c in cutlass.range(tid, C, THREADS, unroll=1):
            acc = Float32(0)
            if c < rows:
                for v in cutlass.range(D, unroll=4):
                    acc += s.dvc[c, v] * s.diff[c, v]
            s.dbeta[c] = acc
        cute.arch.sync_threads()

    @cute.jit
    def key_query_grads(self, s, g, tid, rows):
        """5: dqd.  6: dki from Mqk.  7: dki from L, dkd, second part of dbeta."""
        for e in cutlass.range(tid, C * D, THREADS, unroll=1):
            c, k = e // D, e % D
            acc = Float32(0)
            if c < rows:
                for v in cutlass.range(D, unroll=4):
                    acc += g.do[c, v].to(Float32) * g.state[v, k].to(Float32)
                for j in cutlass.range(c + 1, unroll=4):
                    acc += s.mqk[c, j] * g.ki[j, k]
            g.dqd[c, k] = acc
        for e in cutlass.range(tid, C * D, THREADS, unroll=1):
            c, k = e // D, e % D
            acc = Float32(0)
            for i in cutlass.range(c, rows, unroll=4):
                acc += s.mqk[i, c] * g.qd[i, k]
            s.dki[c, k] = acc
        cute.arch.sync_threads()
        for e in cutlass.range(tid, C * D, THREADS, unroll=1):
            c, k = e // D, e % D
            acc = s.dki[c, k]
            for i in cutlass.range(c + 1, rows, unroll=4):
                acc += s.dL[i, c] * s.beta[i] * g.kd[i, k]
            g.dki[c, k] = acc
        for e in cutlass.range(tid, C * D, THREADS, unroll=1):
            c, k = e // D, e % D
            acc = Float32(0)
            if c < rows:
                for v in cutlass.range(D, unroll=4):
                    acc -= s.beta[c] * self.dvc_again(s, c, v, rows) * g.state[v, k].to(Float32)
                for j in cutlass.range(c, unroll=4):
                    acc += s.beta[c] * s.dL[c, j] * g.ki[j, k]
            g.dkd[c, k] = acc
        for c in cutlass.range(tid, C, THREADS, unroll=1):
            acc = s.dbeta[c]
            for j in cutlass.range(c, unroll=4):
                acc += s.dL[c, j] * s.pairs[c, j]
            s.dbeta[c] = acc

    @cute.jit
    def gate_grad(self, s, g, k, rows):
        """8: dgT[k], from the dS that follows the chunk."""
        acc = Float32(0)
        for v in cutlass.range(D, unroll=4):
            acc += s.dS[k, v] * g.state[v, k].to(Float32)
        acc = acc * s.gT[k]
        for c in cutlass.range(rows, unroll=4):
            acc += s.dkr[c, k] * g.kr[c, k]
        return acc

    @cute.jit
    def update_dS(self, s, g, tid, rows):
        """8: dS <- exp(gT) dS + qd^T do - kd^T (b dvc), in place."""
        for e in cutlass.range(tid, D * D, THREADS, unroll=1):
            k, v = e // D, e % D
            acc = s.gT[k] * s.dS[k, v]
            for c in cutlass.range(rows, unroll=1):
                acc += g.qd[c, k] * g.do[c, v].to(Float32)
                acc -= g.kd[c, k] * s.beta[c] * self.dvc_again(s, c, v, rows)
            s.dS[k, v] = acc


def _trace(config: ScalarConfig) -> tuple[Any, tuple]:
    dtypes = {"float32": Float32, "bfloat16": BFloat16}
    T, H, N, tiles = (cute.sym_int() for _ in range(4))

    def fake(dtype: Any, *shape: Any) -> Any:
        order = tuple(reversed(range(len(shape))))
        return cute.runtime.make_fake_compact_tensor(
            dtype, shape, stride_order=order, assumed_align=dtype.width // 8
        )

    tokens = (fake(BFloat16, T, H, D), fake(BFloat16, T, H, D), fake(dtypes[config.beta], T, H))
    workspace = (
        *(fake(Float32, H, tiles, C, D) for _ in range(4)),
        fake(Float32, H, tiles, D),
        *(fake(BFloat16, H, tiles, C, C) for _ in range(2)),
        fake(BFloat16, H, tiles, D, D),
    )
    dfinal = None if config.state == "none" else fake(dtypes[config.state], N, H, D, D)
    offsets = None
    if config.varlen:
        offsets = cute.runtime.make_fake_tensor(
            Int32, (cute.sym_int(),), (cute.sym_int64(),), assumed_align=4
        )
    outputs = (
        *(fake(Float32, H, tiles, C, D) for _ in range(4)),
        fake(Float32, H, tiles, D),
        fake(BFloat16, T, H, D),
        fake(Float32, H, tiles, C),
        fake(dtypes.get(config.state, Float32), N, H, D, D),
    )
    return ScalarRecurrence(config), (tokens, workspace, dfinal, offsets, outputs)


def scalar_spec(config: ScalarConfig) -> KernelSpec:
    """The kernel for one config, as `kda_cute.compile` takes it."""
    return KernelSpec(
        name="scalar_recurrence",
        config=config,
        trace=functools.partial(_trace, config),
        sources=(str(Path(__file__).resolve()),),
    )


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def scalar_recurrence(
    do: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    workspace: Workspace,
    dfinal_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    num_seqs: int | None = None,
    *,
    recompute: bool = True,
) -> RecurrenceGrads:
    """`kda_cute.bwd_recurrence` by scalar loops: same arguments, shapes and results.  For
    comparison only.
    """
    T, H, _ = do.shape
    tiles = workspace.kd.shape[1]
    sequences = (num_seqs or 1) if cu_seqlens is None else cu_seqlens.numel() - 1
    if cu_seqlens is None and T % sequences:
        raise ValueError(f"T = {T} is not a multiple of num_seqs = {sequences}")
    state_dtype = torch.float32 if dfinal_state is None else dfinal_state.dtype

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, device=do.device, dtype=dtype)

    grads = RecurrenceGrads(
        dkd=empty(H, tiles, C, D),
        dqd=empty(H, tiles, C, D),
        dki=empty(H, tiles, C, D),
        dkr=empty(H, tiles, C, D),
        dgT=empty(H, tiles, D),
        dv=empty(T, H, D, dtype=torch.bfloat16),
        dbeta=empty(H, tiles, C),
        dinitial_state=empty(sequences, H, D, D, dtype=state_dtype),
    )
    if T == 0 or sequences == 0 or H == 0:
        final = 0.0 if dfinal_state is None else dfinal_state
        grads.dinitial_state.copy_(torch.as_tensor(final))
        return grads
    config = ScalarConfig(
        beta=_dtype_name(beta),
        state="none" if dfinal_state is None else _dtype_name(dfinal_state),
        varlen=cu_seqlens is not None,
        recompute=recompute,
    )
    offsets = cu_seqlens
    if cu_seqlens is not None and cu_seqlens.dtype == torch.int64:
        offsets = cu_seqlens.view(torch.int32)[::2]  # the low words, little endian
    load(scalar_spec(config))((do, v, beta), tuple(workspace), dfinal_state, offsets, tuple(grads))
    return grads
