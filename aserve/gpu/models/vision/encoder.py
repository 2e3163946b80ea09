"""The vision transformers of Qwen-VL, Mistral Small 3 (Pixtral) and Gemma 3 (SigLIP). `VisionSpec`
says how they differ.

A picture is cut into patches. Each becomes one hidden state, all of a picture see each other (or
those of a window do), and a square of `merge_size` x `merge_size` hidden states becomes one token:

    h = patches W^T + b + positions
    h = h + attention(norm1(h));  h = h + mlp(norm2(h))       for each block
    y = merger(h)                                             of the states of each square

Patches come square by square, and so do all tensors here. Queries and keys may be rotated by RoPE
on two axes: half of the pairs use the row of the patch, the other half its column.

Source: modeling_qwen2_vl.py, modeling_qwen2_5_vl.py, modeling_qwen3_vl.py, modeling_pixtral.py and
modeling_siglip.py in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from aserve.gpu.layers.rope import RopeInputs, apply_rope
from aserve.gpu.weights.source import WeightSource, wide_dtype

CHANNELS = 3

Layer: TypeAlias = Callable[[Tensor], Tensor]


class MakeLayer(Protocol):
    def __call__(self, prefix: str, spec: VisionSpec, weights: WeightSource, /) -> Layer:
        """Builds the layer whose weights begin with `prefix`."""


class VisionRope(msgspec.Struct, frozen=True):
    """Rotary positions of patches. With frequencies `theta ** (-2 i / head_dim)`, rows use those of
    even `i`, and columns the same ones, or those of odd `i` if they have their own."""

    theta: float = 10_000.0
    has_column_frequencies: bool = False

    def table(self, grid: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
        """grid int64 [2, patches], rows and columns -> [patches, head_dim]: cosines, then sines, of
        the angles of rows and then of columns."""
        numbers = torch.arange(0, head_dim // 2, 2, device=grid.device)
        both = torch.stack((numbers, numbers + self.has_column_frequencies)).to(dtype)
        frequencies = self.theta ** (-both / (head_dim // 2))  # [2, head_dim / 4]
        angles = grid.to(dtype).unsqueeze(2) * frequencies.unsqueeze(1)
        joined = torch.cat((angles[0], angles[1]), dim=1)
        return torch.cat((joined.cos(), joined.sin()), dim=1)


class VisionSpec(msgspec.Struct, frozen=True):
    """`deep_layers` are the blocks whose hidden states are merged as well, by a merger each."""

    hidden_size: int
    num_heads: int
    num_layers: int
    mlp_size: int
    out_size: int
    patch_size: int
    merge_size: int
    activation: str
    norm: MakeLayer
    mlp: MakeLayer
    merger: MakeLayer
    deep_merger: MakeLayer | None = None
    frames: int = 0  # a still picture is that many equal frames; 0: patches have no such axis
    norm_eps: float = 1e-6
    rope: VisionRope | None = VisionRope()
    qkv: tuple[str, ...] = ("qkv",)  # names of the layers of queries, keys and values
    has_bias: bool = True  # in the linear layers of blocks
    has_patch_bias: bool = False
    has_first_norm: bool = False  # before the first block
    num_positions: int = 0  # of a learnt square of position embeddings; 0: none
    window: int = 0  # tokens on a side of an attention window; 0: no windows
    full_layers: tuple[int, ...] = ()  # blocks without windows, where there are windows
    deep_layers: tuple[int, ...] = ()
    sees_itself: bool = False  # the text model's tokens of a picture see each other

    @property
    def token_side(self) -> int:
        """Pixels on a side of the square that becomes one token."""
        return self.patch_size * self.merge_size


class VisionEncoder:
    __slots__ = (
        "blocks",
        "deep_mergers",
        "first_norm",
        "merger",
        "patch_bias",
        "patches",
        "positions",
        "spec",
    )

    def __init__(self, spec: VisionSpec, weights: WeightSource, prefix: str = "visual") -> None:
        self.spec = spec
        embed = f"{prefix}.patch_embed.proj"
        frames = (spec.frames,) if spec.frames else ()
        kernel = (CHANNELS, *frames, spec.patch_size, spec.patch_size)
        self.patches = weights.tensor(f"{embed}.weight", (spec.hidden_size, *kernel)).flatten(1)
        self.patch_bias = self.positions = self.first_norm = None
        if spec.has_patch_bias:
            self.patch_bias = weights.tensor(f"{embed}.bias", (spec.hidden_size,))
        if spec.num_positions:
            shape = (spec.num_positions, spec.hidden_size)
            self.positions = weights.tensor(f"{prefix}.pos_embed.weight", shape)
        if spec.has_first_norm:
            self.first_norm = spec.norm(f"{prefix}.first_norm", spec, weights)
        self.blocks = tuple(
            VisionBlock(f"{prefix}.blocks.{index}", spec, weights)
            for index in range(spec.num_layers)
        )
        self.merger = spec.merger(f"{prefix}.merger", spec, weights)
        make_deep = spec.deep_merger or spec.merger
        self.deep_mergers = {
            layer: make_deep(f"{prefix}.deepstack_merger_list.{index}", spec, weights)
            for index, layer in enumerate(spec.deep_layers)
        }

    def __call__(self, patches: Tensor, *, rows: int, columns: int) -> Tensor:
        """patches [patches, channels * frames * size * size] of a picture of `rows` x `columns`
        tokens -> [1 + deep layers, tokens, out]: the embeddings first."""
        spec = self.spec
        grid = patch_grid(rows, columns, spec.merge_size, device=patches.device)
        hidden = functional.linear(patches.to(self.patches.dtype), self.patches, self.patch_bias)
        if self.positions is not None:
            sides = (rows * spec.merge_size, columns * spec.merge_size)
            hidden = hidden + interpolated(self.positions, grid, sides).to(hidden.dtype)
        if self.first_norm is not None:
            hidden = self.first_norm(hidden)
        head_dim = spec.hidden_size // spec.num_heads
        cos_sin = hidden.new_empty(len(hidden), 0)
        if spec.rope is not None:
            cos_sin = spec.rope.table(grid, head_dim, wide_dtype(hidden.dtype))
        order = window_order(rows, columns, spec.window or max(rows, columns))
        squares = order.index.to(hidden.device)
        hidden, cos_sin = self._by_square(hidden, squares), self._by_square(cos_sin, squares)
        windows = [spec.merge_size**2 * size for size in order.sizes]
        deep = []
        for index, block in enumerate(self.blocks):
            is_full = not spec.window or index in spec.full_layers
            hidden = block(hidden, cos_sin, [len(hidden)] if is_full else windows)
            if index in self.deep_mergers:
                deep.append(self.deep_mergers[index](hidden))
        merged = torch.stack([self.merger(hidden), *deep])
        return merged.index_select(1, squares.argsort())

    def _by_square(self, values: Tensor, squares: Tensor) -> Tensor:
        """Puts the squares of patches into another order."""
        size = self.spec.merge_size**2
        by_square = values.view(len(squares), size, values.shape[1])
        return by_square.index_select(0, squares).flatten(0, 1)


class VisionBlock:
    """One layer: attention and an MLP, each behind a norm."""

    __slots__ = ("mlp", "norm1", "norm2", "num_heads", "out", "qkv")

    def __init__(self, prefix: str, spec: VisionSpec, weights: WeightSource) -> None:
        size, bias = spec.hidden_size, spec.has_bias
        self.num_heads = spec.num_heads
        self.norm1 = spec.norm(f"{prefix}.norm1", spec, weights)
        rows = {f"{prefix}.attn.{name}": 3 * size // len(spec.qkv) for name in spec.qkv}
        self.qkv = weights.linear(rows, in_features=size, bias=bias)
        self.out = weights.linear({f"{prefix}.attn.proj": size}, in_features=size, bias=bias)
        self.norm2 = spec.norm(f"{prefix}.norm2", spec, weights)
        self.mlp = spec.mlp(f"{prefix}.mlp", spec, weights)

    def __call__(self, hidden: Tensor, cos_sin: Tensor, windows: list[int]) -> Tensor:
        """hidden [patches, size]; patches of a window stand together and see each other."""
        hidden = hidden + self._attention(self.norm1(hidden), cos_sin, windows)
        return hidden + self.mlp(self.norm2(hidden))

    def _attention(self, x: Tensor, cos_sin: Tensor, windows: list[int]) -> Tensor:
        heads = self.qkv(x).unflatten(1, (3 * self.num_heads, -1))
        rotated, values = heads.split((2 * self.num_heads, self.num_heads), dim=1)
        if cos_sin.shape[1]:
            rotated = apply_rope(rotated.to(cos_sin.dtype), RopeInputs(cos_sin)).to(x.dtype)
        q, k = rotated.chunk(2, dim=1)
        parts = zip(*(part.split(windows) for part in (q, k, values)), strict=True)
        return self.out(torch.cat([_attend(*part) for part in parts]).flatten(1))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[patches, heads, head_dim] each -> the same shape; every patch sees every other."""
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)


def patch_grid(rows: int, columns: int, merge: int, *, device: torch.device) -> Tensor:
    """int64 [2, patches]: the row and the column of each patch, square by square."""
    sides = (torch.arange(rows * merge), torch.arange(columns * merge))
    grid = torch.stack(torch.meshgrid(*sides, indexing="ij"))
    squares = grid.view(2, rows, merge, columns, merge).transpose(2, 3)
    return squares.flatten(1).to(device)


class WindowOrder(msgspec.Struct, frozen=True):
    index: Tensor  # int64 [tokens]: the tokens of the first window, then those of the next, ...
    sizes: list[int]  # tokens of each window


def window_order(rows: int, columns: int, side: int) -> WindowOrder:
    """Windows of `side` x `side` tokens, of which the last in a row or column may be smaller."""
    row, column = np.indices((rows, columns))
    num_across = -(-columns // side)
    window = (row // side * num_across + column // side).reshape(-1)
    index = torch.from_numpy(window.argsort(kind="stable"))
    return WindowOrder(index, [int(size) for size in np.bincount(window)])


def interpolated(table: Tensor, grid: Tensor, sides: tuple[int, int]) -> Tensor:
    """table [n * n, size]: a square of embeddings -> [patches, size], bilinear in a grid of
    `sides` whose corners are those of the square."""
    side = int(table.shape[0] ** 0.5)
    values = table.to(wide_dtype(table.dtype))
    total = values.new_zeros(grid.shape[1], table.shape[1])
    places = [
        at.to(values.dtype) * (side - 1) / max(size - 1, 1)
        for at, size in zip(grid, sides, strict=True)
    ]
    floors = [place.floor().long() for place in places]
    for corner in range(4):
        steps = (corner // 2, corner % 2)
        taps = [floor + step for floor, step in zip(floors, steps, strict=True)]
        near = [1 - (place - tap).abs() for place, tap in zip(places, taps, strict=True)]
        row, column = (tap.clamp(max=side - 1) for tap in taps)
        total += values[row * side + column] * (near[0] * near[1]).unsqueeze(1)
    return total


def cut_patches(pixels: Tensor, spec: VisionSpec, *, rows: int, columns: int) -> Tensor:
    """pixels [rows * side, columns * side, channels] -> [patches, values of a patch]."""
    merge, size = spec.merge_size, spec.patch_size
    squares = pixels.view(rows, merge, size, columns, merge, size, CHANNELS)
    # [rows, columns, merge, merge, channels, size, size]
    patches = squares.permute(0, 3, 1, 4, 6, 2, 5)
    framed = patches.unsqueeze(5).expand(*patches.shape[:5], max(1, spec.frames), size, size)
    return framed.reshape(rows * columns * merge * merge, -1)
