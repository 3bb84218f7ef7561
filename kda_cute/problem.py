"""One call of `chunk_kda` after validation: what the stages, the operators and the reference take.

The fields are in the order of the operators' schema (chunk_ops.py), so `Problem(*arguments)` reads
an operator's arguments and `torch.ops.kda_cute.chunk_kda_fwd(*problem)` calls it.
"""

from typing import NamedTuple

import torch

from .factors import HEAD_DIM


class Problem(NamedTuple):
    """Tensors and flags of one call; B sequences of T tokens, or N packed ones with B = 1.

    q, k, v        [B, T, H, 128] bf16, any strides
    g              [B, T, H, 128] bf16 or fp32, any strides: log-space decay, or raw for the gate
    beta           [B, T, H] bf16 or fp32, any strides: b itself, or logits with `beta_sigmoid`
    A_log          [H] or None for 0; dt_bias [H * 128] or [H, 128] or None for 0; both None for
                   gate "log"
    initial_state  [N, H, K, V], or [N, H, V, K] with `state_v_first`; bf16 or fp32; None for 0
    cu_seqlens     [N + 1] int32 or int64, contiguous, on q's device; None for N = B equal ones
    scale          multiplies q
    gate           "log": g is the gate; "safe": lower_bound sigmoid(exp(A_log) (g + dt_bias));
                   "softplus": -exp(A_log) softplus(g + dt_bias)
    lower_bound    read by gate "safe" only
    l2norm         q, k / sqrt(sum of squares + 1e-6) first
    beta_sigmoid   b = beta_scale sigmoid(beta); otherwise b = beta, and beta_scale is 1
    save_states    keep what the backward wants of the forward

    On the way to the kernels `for_kernels` narrows this down: see there.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    scale: float
    gate: str
    lower_bound: float
    l2norm: bool
    beta_sigmoid: bool
    beta_scale: float
    state_v_first: bool
    output_final_state: bool
    save_states: bool

    @property
    def num_seqs(self) -> int:
        """N, the number of sequences."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    def state_shape(self) -> tuple[int, ...]:
        """Shape of the initial and of the final state, in either layout."""
        return (self.num_seqs, self.q.shape[2], HEAD_DIM, HEAD_DIM)

    def for_kernels(self) -> "Problem":
        """The same problem as the kernels take it: q, k, v, g are tensors that TMA can address (see
        `addressable`; one copy of each that is not), A_log and dt_bias contiguous fp32, initial_state
        contiguous and 16-byte aligned.  beta and cu_seqlens stay as they are.
        """
        q, k, v, g, _, A_log, dt_bias, state = self[:8]
        if (
            addressable(q)
            and addressable(k)
            and addressable(v)
            and addressable(g)
            and (A_log is None or _fp32(A_log))
            and (dt_bias is None or _fp32(dt_bias))
            and (state is None or _aligned(state))
        ):
            return self
        q, k, v, g = (x if addressable(x) else _compact(x) for x in (q, k, v, g))
        if A_log is not None:
            A_log = A_log.to(torch.float32).contiguous()
        if dt_bias is not None:
            dt_bias = dt_bias.to(torch.float32).contiguous()
        if state is not None and not _aligned(state):
            state = _compact(state)
        return self._replace(q=q, k=k, v=v, g=g, A_log=A_log, dt_bias=dt_bias, initial_state=state)


def addressable(x: torch.Tensor) -> bool:
    """Whether TMA takes x [B, T, H, 128] where it lies: rows of 128 without gaps, a 16-byte aligned
    start, and every other stride a positive multiple of 16 bytes, also of a dimension of size 1.
    """
    b, t, h, d = x.stride()
    return (
        d == 1
        and b > 0 < t
        and h > 0
        and (b | t | h) * x.itemsize % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def _fp32(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_contiguous()


def _aligned(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def _compact(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy; also of a contiguous x, which may start at any address."""
    return x.clone(memory_format=torch.contiguous_format)
