"""What keeps the compiler from keeping values in registers."""

from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def again(word, *, loc=None, ip=None):
    """The word, as if new: what is made of it is made again, and not kept."""
    out = llvm.inline_asm(
        Int32.mlir_type,
        [Int32(word).ir_value(loc=loc, ip=ip)],
        "mov.b32 $0, $1;",
        "=r,r",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return Int32(out)
