"""What a kernel promises of its compiled code: `schedule.budget(config)` of every kernel states it,
and `kda_cute.report` holds the compiler's result against it.
"""

from typing import NamedTuple

from ..layouts.plan import SMEM_PER_SM, SMEM_RESERVED_PER_CTA, Plan

REGISTERS_PER_SM = 65_536
REGISTERS_PER_THREAD = 255
REGISTER_UNIT = 8  # registers per thread are given in multiples of it
SMEM_UNIT = 128  # bytes
WARPGROUP = 128  # threads

# Full opcodes of tensor-core instructions.
MMA_BF16 = "HMMA.16816.F32.BF16"
MMA_TF32 = "HMMA.1688.F32.TF32"


def wgmma_bf16(n: int) -> str:
    """Opcode of a warpgroup's m64 k16 instruction, n columns wide."""
    return f"HGMMA.64x{n}x16.F32.BF16"


class MmaRow(NamedTuple):
    """Tensor-core instructions of one product in a chunk: issuers x static x trips.

    issuers: warps that run the code (warpgroups for wgmma; units of work where a warp takes
    several).  static: instructions in the code.  trips: of its loop.
    """

    product: str
    opcode: str
    issuers: int
    static: int
    trips: int = 1


class Role(NamedTuple):
    """Registers per thread that a role asks for after the launch, in each of its warpgroups."""

    registers: int
    warpgroups: int = 1


class Budget(NamedTuple):
    """Of one config: threads of a CTA, CTAs that share an SM, the plan of shared memory, the
    account of tensor-core instructions, how many of them a chunk's mathematics takes by opcode, the
    most FFMA in the code, and the roles that change their registers.
    """

    threads: int
    ctas: int
    plan: Plan
    mma: list[MmaRow]
    implied: dict[str, int]
    ffma: int
    roles: tuple[Role, ...] = ()

    @property
    def registers(self) -> int:
        """The most per thread at launch with which `ctas` fit an SM."""
        most = REGISTERS_PER_SM // (self.threads * self.ctas) // REGISTER_UNIT * REGISTER_UNIT
        return min(most, REGISTERS_PER_THREAD)

    @property
    def shared(self) -> int:
        """The most bytes of shared memory with which `ctas` fit an SM."""
        return (SMEM_PER_SM // self.ctas - SMEM_RESERVED_PER_CTA) // SMEM_UNIT * SMEM_UNIT

    @property
    def in_code(self) -> dict[str, int]:
        """Tensor-core instructions in the code, by the account."""
        return self._sums(lambda row: row.static)

    @property
    def per_chunk(self) -> dict[str, int]:
        """Tensor-core instructions of a CTA's chunk, by the account."""
        return self._sums(lambda row: row.issuers * row.static * row.trips)

    @property
    def pool(self) -> int:
        """Registers per thread, summed over the warpgroups, that the roles ask for together."""
        return sum(role.warpgroups * role.registers for role in self.roles)

    def _sums(self, count) -> dict[str, int]:
        sums: dict[str, int] = {}
        for row in self.mma:
            sums[row.opcode] = sums.get(row.opcode, 0) + count(row)
        return sums
