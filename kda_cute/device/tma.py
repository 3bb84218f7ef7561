"""Tensor copies (TMA) between global memory and shared-memory tiles."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


class Tma(NamedTuple):
    """A tensor copy: its atom and the coordinate tensor of global memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def make_load(tensor, tile, shape=None) -> Tma:
    """Copies into a tile; the tensor's first two modes are the tile's.  Call in the host function."""
    return _make(cpasync.CopyBulkTensorTileG2SOp(), tensor, tile, shape)


def make_store(tensor, tile, shape=None) -> Tma:
    """Copies out of a tile, likewise."""
    return _make(cpasync.CopyBulkTensorTileS2GOp(), tensor, tile, shape)


def _make(op, tensor, tile, shape) -> Tma:
    return Tma(*cpasync.make_tiled_tma_atom(op, tensor, tile.cute_layout(), shape or tile.shape))


def permuted(tensor, modes):
    """The same elements with the modes in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


def load(tma: Tma, block, tile, bar):
    """Copy a [rows, cols] block of tma.tensor to a tile's view; completes on bar.  Every lane of the
    warp calls it: the copy elects its own.
    """
    tile, block = _partition(tma, block, tile)
    cute.copy(tma.atom, block, tile, tma_bar_ptr=bar)


def store(tma: Tma, tile, block):
    """Copy a tile's view to a block of tma.tensor; the caller commits the bulk group."""
    tile, block = _partition(tma, block, tile)
    cute.copy(tma.atom, tile, block)


def prefetch(tma: Tma, block, tile):
    """Ask L2 for the block that `load` would copy to a tile's view."""
    _, block = _partition(tma, block, tile)
    cute.prefetch(tma.atom, block)


def prefetch_line(pointer):
    """Ask L2 for a thread's line of 128 bytes of global memory."""
    cute.arch.prefetch(pointer.llvm_ptr, cache_level="L2")


def _partition(tma, block, tile):
    return cpasync.tma_partition(
        tma.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(tile, 0, 2),
        cute.group_modes(block, 0, 2),
    )
