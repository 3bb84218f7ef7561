"""Input distributions that KDA numerics are judged on; combine them with "+": "weak+states".

| name | what it is |
|---|---|
| typical | unit normal inputs, safe gate |
| weak, nodecay | gates near 0: -5 sigmoid(-8.5), -5 sigmoid(-12) |
| strong | gates near the bound, -80 in a chunk |
| mixed | every other key channel strong, the rest weak |
| burst | a tenth of the (token, channel) pairs strong, the rest weak |
| beta0, beta1, betam200 | logits near -10, near 8, exactly -200 (b is 0 in fp32) |
| repk, simk | all keys of a head equal; keys within 0.3 of each other |
| big, tiny | v and do 1000 times larger; do 1e-6 times smaller |
| states | initial state and gradient of the final state, unit normal (otherwise 0) |
| ub_typ, ub_strong, ub_burst, ub_row, ub_mixed | softplus gate, beyond -80 in a chunk |
"""

from typing import NamedTuple

import torch

HEAD_DIM = 128


class Problem(NamedTuple):
    """Inputs of one run: q, k, v, do, g_raw [T, H, 128] and beta [T, H] (logits) bf16; A_log [H],
    dt_bias [H, 128], initial_state and dfinal_state [N, H, V, K] fp32; cu_seqlens [N+1] int32 or
    None for one sequence.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    g_raw: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    initial_state: torch.Tensor
    dfinal_state: torch.Tensor
    cu_seqlens: torch.Tensor | None
    lengths: tuple[int, ...]
    gate: str
    lower_bound: float
    scale: float

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The positional arguments of the references: q, k, v, g, beta."""
        return self.q, self.k, self.v, self.g_raw, self.beta

    def options(self) -> dict:
        """The keyword arguments that the references share."""
        names = ("initial_state", "A_log", "dt_bias", "cu_seqlens", "gate", "lower_bound", "scale")
        return {name: getattr(self, name) for name in names}


def make_problem(
    regime: str,
    H: int = 2,
    T: int = 512,
    seed: int = 0,
    lengths: list[int] | tuple[int, ...] | None = None,
    device: torch.device | str = "cpu",
) -> Problem:
    """Draw a problem of T tokens, or of sequences of the given lengths.

    Values don't depend on the device. ValueError for a name that is not in the table above.
    """
    n_seqs = 1 if lengths is None else len(lengths)
    T = T if lengths is None else sum(lengths)
    D = HEAD_DIM
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng)

    def uniform(*shape):
        return torch.rand(*shape, generator=rng)

    def alternating(even, odd):
        return torch.tensor([even, odd]).repeat(D // 2).expand(H, D).clone()

    q, k, v, do, noise = (normal(T, H, D) for _ in range(5))
    beta, A_log, dt_bias = normal(T, H), uniform(H), uniform(H, D)
    g_raw, plain = noise, (torch.zeros(H), torch.zeros(H, D))
    initial_state, dfinal_state = torch.zeros(2, n_seqs, H, D, D)
    gate = "safe"
    noise = 0.3 * noise
    for name in regime.split("+"):
        if name == "typical":
            continue
        elif name in ("weak", "nodecay", "strong"):
            centre = {"weak": -8.5, "nodecay": -12.0, "strong": 8.0}[name]
            (A_log, dt_bias), g_raw = plain, centre + noise
        elif name == "mixed":
            A_log, dt_bias, g_raw = plain[0], alternating(8.5, -8.5), noise
        elif name == "burst":
            hit = uniform(T, H, D) < 0.1
            (A_log, dt_bias), g_raw = plain, torch.where(hit, 8.0, -8.5) + noise
        elif name in ("beta0", "beta1"):
            beta = {"beta0": -10.0, "beta1": 8.0}[name] + 0.3 * beta
        elif name == "betam200":
            beta = torch.full_like(beta, -200.0)
        elif name == "repk":
            k = k[:1].expand(T, H, D).clone()
        elif name == "simk":
            k = k[:1] + 0.3 * k
        elif name == "big":
            v, do = 1e3 * v, 1e3 * do
        elif name == "tiny":
            do = 1e-6 * do
        elif name == "states":
            initial_state, dfinal_state = normal(2, n_seqs, H, D, D)
        elif name == "ub_typ":
            gate, A_log = "softplus", torch.log(1 + 15 * uniform(H))
        elif name == "ub_strong":
            gate, (A_log, dt_bias), g_raw = "softplus", plain, 50.0 + noise
        elif name in ("ub_burst", "ub_row"):
            hit = uniform(T, H, D if name == "ub_burst" else 1) < 0.1
            gate, (A_log, dt_bias), g_raw = "softplus", plain, torch.where(hit, 50.0, -7.0) + noise
        elif name == "ub_mixed":
            gate, A_log, dt_bias, g_raw = "softplus", plain[0], alternating(50.0, -7.0), noise
        else:
            raise ValueError(f"regime: unknown name {name!r} in {regime!r}")

    cu_seqlens = None
    if lengths is not None:
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    bf16 = (x.to(device, torch.bfloat16) for x in (q, k, v, do, g_raw, beta))
    fp32 = (x.to(device) for x in (A_log, dt_bias, initial_state, dfinal_state))
    lengths = (T,) if lengths is None else tuple(lengths)
    return Problem(*bf16, *fp32, cu_seqlens, lengths, gate, -5.0, D**-0.5)
