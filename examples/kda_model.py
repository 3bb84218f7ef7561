"""The layers of language_model.py: KDA and MLP branches on a residual stream, weights in fp32."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import kda_cute

DIM = kda_cute.HEAD_DIM
LOWER_BOUND = -5.0


class KDALayer(nn.Module):
    """[B, T, W] to [B, T, W] through `heads` KDA heads of 128."""

    def __init__(self, width: int, heads: int, backend: str):
        super().__init__()
        self.heads, self.backend = heads, backend
        inner = heads * DIM
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.conv = nn.Conv1d(3 * inner, 3 * inner, 4, groups=3 * inner, bias=False)
        self.g = low_rank(width, inner)
        self.beta = nn.Linear(width, heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        # Decays exp(-rate) per token, rates from 1 / 1000 to 1: states that live for 1 to 1000 tokens.
        rate = torch.exp(torch.empty(inner).uniform_(math.log(1e-3), 0))
        self.dt_bias = nn.Parameter(torch.logit(rate / -LOWER_BOUND))
        self.output_gate = low_rank(width, inner)
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        x_past = F.pad(self.qkv(x).transpose(1, 2), (3, 0))  # three tokens before the first
        qkv = F.silu(self.conv(x_past)).transpose(1, 2).bfloat16().contiguous()
        # Views of the fused projection, which the op reads where they lie.
        q, k, v = (t.unflatten(-1, (-1, DIM)) for t in qkv.chunk(3, dim=-1))
        o, _ = kda_cute.chunk_kda(
            q,
            k,
            v,
            self.g(x).unflatten(-1, (-1, DIM)).bfloat16(),
            self.beta(x).bfloat16(),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=LOWER_BOUND,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            backend=self.backend,
        )
        return self.out(self.norm(o.float()).flatten(-2) * self.output_gate(x).sigmoid())


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class LanguageModel(nn.Module):
    """Bytes [B, T] to logits of the next byte [B, T, 256] fp32."""

    def __init__(self, layers: int, heads: int, backend: str):
        super().__init__()
        width = heads * DIM
        self.embedding = nn.Embedding(256, width)
        branches = []
        for _ in range(layers):
            branches += [KDALayer(width, heads, backend), MLP(width)]
        self.branches = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width, eps=1e-6), branch) for branch in branches
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for branch in self.branches:
            x = x + branch(x)
        return self.head(self.norm(x)).float()


def low_rank(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, DIM, bias=False), nn.Linear(DIM, inner, bias=False))
