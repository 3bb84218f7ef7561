"""Sequence lengths on the host, and the map between packed tokens and chunk tiles.

Packed tokens are [T, H, ...], sequences one after another. Reading a cu_seqlens that lives on a
device copies it to the host, which waits for the device: only the torch stages (reference, prepare)
do that; kernels read cu_seqlens on the device.
"""

from itertools import accumulate
from typing import NamedTuple

import torch


def sequence_lengths(cu_seqlens: torch.Tensor | None, num_seqs: int | None, T: int) -> list[int]:
    """Lengths of the sequences packed into T tokens.

    cu_seqlens: [N+1] int32 or int64, from 0 to T and never decreasing; None: num_seqs equal ones,
    and one where that is None too. TypeError or ValueError names the argument that does not fit.
    """
    if cu_seqlens is None:
        n = 1 if num_seqs is None else num_seqs
        if n < 0 or (n == 0 and T > 0) or (n > 0 and T % n):
            raise ValueError(f"num_seqs: {T} tokens cannot be cut into {n} equal sequences")
        return [T // n] * n if n else []
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: int32 or int64 expected, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens: shape [N+1] expected, got {list(cu_seqlens.shape)}")
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    if bounds[0] != 0 or bounds[-1] != T or any(n < 0 for n in lengths):
        raise ValueError(
            f"cu_seqlens: must rise from 0 to {T} tokens, got {bounds[0]}..{bounds[-1]}"
            f"{' with a decrease' if any(n < 0 for n in lengths) else ''}"
        )
    if num_seqs is not None and num_seqs != len(lengths):
        raise ValueError(
            f"num_seqs: {num_seqs} given, but cu_seqlens holds {len(lengths)} sequences"
        )
    return lengths


def tile_offsets(lengths: list[int], chunk: int) -> list[int]:
    """First tile of each sequence, and the number of tiles as last entry: [N+1] ints."""
    return [0, *accumulate(-(-n // chunk) for n in lengths)]


def total_tiles(lengths: list[int], chunk: int) -> int:
    """Number of tiles that the sequences take together."""
    return tile_offsets(lengths, chunk)[-1]


class TileMap(NamedTuple):
    """Which token each tile row holds.

    lengths [N] and offsets [N+1] are lists on the host, first_tile [N] is offsets[:-1] on the
    device. token [tiles, chunk] int64 is a legal token index everywhere, valid [tiles, chunk] bool
    tells which rows count; slot [T] int64 is the row, tile * chunk + row, of each token.
    """

    lengths: list[int]
    offsets: list[int]
    first_tile: torch.Tensor
    token: torch.Tensor
    valid: torch.Tensor
    slot: torch.Tensor


def tile_map(lengths: list[int], chunk: int, device: torch.device | str = "cpu") -> TileMap:
    """Build the TileMap of sequences of these lengths; nothing in it depends on the data."""
    offsets = tile_offsets(lengths, chunk)
    T, tiles = sum(lengths), offsets[-1]
    length = torch.tensor(lengths, dtype=torch.int64)
    first_tile = torch.tensor(offsets[:-1], dtype=torch.int64)
    first_token = length.cumsum(0) - length
    seq_of_tile = torch.repeat_interleave(torch.arange(len(lengths)), (length + chunk - 1) // chunk)
    row = torch.arange(chunk) + chunk * (torch.arange(tiles) - first_tile[seq_of_tile])[:, None]
    valid = row < length[seq_of_tile][:, None]
    token = (first_token[seq_of_tile][:, None] + row).clamp_(max=max(T - 1, 0))
    slot = torch.nonzero(valid.flatten()).flatten()
    return TileMap(lengths, offsets, *(x.to(device) for x in (first_tile, token, valid, slot)))


def to_tiles(x: torch.Tensor, tiles: TileMap, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Packed [T, H, ...] to [H, tiles, chunk, ...]; rows past a sequence's end become 0."""
    out = x.transpose(0, 1)[:, tiles.token.flatten()].unflatten(1, tuple(tiles.token.shape))
    valid = tiles.valid.view(*tiles.valid.shape, *([1] * (x.ndim - 2)))
    return torch.where(valid, out.to(dtype or x.dtype), 0.0)


def from_tiles(x: torch.Tensor, tiles: TileMap) -> torch.Tensor:
    """[H, tiles, chunk, ...] to packed [T, H, ...]; rows past a sequence's end are dropped."""
    return x.flatten(1, 2)[:, tiles.slot].transpose(0, 1)
