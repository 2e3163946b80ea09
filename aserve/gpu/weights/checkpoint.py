"""Reads the safetensors files of a model directory: a single file, or several with an index. A
directory that was made of GGUF files has a table in place of the index (`gguf.py`).

Names, shapes and dtypes come from the files' headers; values are read one tensor at a time. Linear
layers in fp8 (`fp8.py`) and of 4 bits (`int4.py`) are read as float32, or as they are where the
reader asks for that, and so are experts in MXFP4 (`mxfp4.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from aserve.errors import ConfigError
from aserve.gpu.weights import fp8, int4, mxfp4
from aserve.gpu.weights.files import INDEX, SINGLE, WeightFile, listed, open_file, read_index
from aserve.gpu.weights.gguf import GgufSlice
from aserve.gpu.weights.quantized import Quantization, QuantizedWeight, StoredBits

CPU = torch.device("cpu")
# The parts of tensors of all experts, by the ends of their names.
JOINED_EXPERTS = {
    ".experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".experts.down_proj": ("down_proj",),
}
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Place(msgspec.Struct, frozen=True):
    """Says where a tensor of all experts has the matrix of one."""

    expert: int
    first: int  # its first row
    step: int = 1  # from each row to the next one
    is_transposed: bool = False  # the tensor is [experts, in, out]

    def rows(self, own: slice) -> slice:
        """Returns the rows of the tensor from the first to the last of `own`."""
        last = self.first + self.step * (own.stop - 1)
        return slice(self.first + self.step * own.start, last + 1)


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor as a file's header describes it."""

    file_name: str
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # the format's name for it: F32, BF16, I8, ...
    place: Place | None = None  # in a tensor of all experts


class _Fp8Parts(msgspec.Struct, frozen=True):
    """The stored tensors that belong to a weight in fp8, and the size of its blocks."""

    block: fp8.Block
    scales: StoredTensor
    input_scale: StoredTensor | None


Rename: TypeAlias = Callable[[str], str | None]


def as_stored(name: str) -> str:
    return name


class Checkpoint:
    """Opened checkpoint files, which are read straight to `device`. It is a context manager.

    `rename` maps the names in the files to those by which the tensors are known here; None leaves a
    tensor out. The tensors of the files `updates` take the place of those of the directory, and of
    those of earlier ones. `quantization` says how weights are quantized, if not in MXFP4.
    """

    __slots__ = (
        *("_coded", "_device", "_files", "_fp8", "_method", "_mxfp4", "_rename", "_scales"),
        *("_stack", "_updates"),
        *("directory", "tensors"),
    )

    def __init__(
        self,
        directory: Path,
        device: torch.device = CPU,
        *,
        rename: Rename = as_stored,
        updates: Sequence[Path] = (),
        quantization: Quantization | None = None,
    ) -> None:
        self._fp8 = quantization if isinstance(quantization, fp8.Fp8) else None
        self._method: int4.Method | None = None
        match quantization:
            case "awq" | "gptq" | "gptq_v2" | "compressed-tensors":
                self._method = quantization
        self._coded: dict[str, Mapping[str, StoredTensor]] = {}  # parts, by their weights' names
        self._scales: dict[str, _Fp8Parts] = {}  # by the names of their weights
        self._mxfp4: dict[str, StoredTensor] = {}  # scales, by the names of their weights
        self.directory = directory
        self._device = device
        self._updates = updates
        self._rename = rename
        self.tensors: dict[str, StoredTensor] = {}
        self._files: dict[str, WeightFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Checkpoint:
        index = read_index(self.directory)
        with ExitStack() as stack:
            for file_name in sorted({*index.values()}) or [SINGLE]:
                self._files[file_name] = stack.enter_context(
                    open_file(self.directory / file_name, self._device)
                )
                self._note_tensors(file_name)
            self._check_index(index)
            for path in self._updates:
                self._files[str(path)] = stack.enter_context(open_file(path, self._device))
                self._note_update(path)
            self._take_fp8()
            self._take_mxfp4()
            self._take_coded()
            self._take_joined_experts()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def paths(self) -> list[Path]:
        return [self.directory / file_name for file_name in self._files]

    def read(self, name: str) -> Tensor:
        """Returns the tensor in the checkpoint's dtype. On the CPU it may share memory with the
        file: copy it before the checkpoint closes.
        """
        return self.read_part(name, fp8.whole(self.tensors[name].shape))

    def read_part(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Reads the elements tensor[part] alone."""
        if name in self._coded:
            weight, places = self._read_coded(name)
            return weight.widened()[:, places][part]
        if name in self._mxfp4:
            rows, columns = part
            return self._read_mxfp4(name, rows).widened()[:, columns]
        stored = self._read_stored(name, part)
        return self._fp8_scales(name).widened(stored, part) if name in self._scales else stored

    def stored_bits(self, name: str) -> StoredBits | None:
        """Returns the bits of a weight that a device may keep as it is stored; None for others."""
        if name in self._coded:
            assert self._method is not None
            scales = self._coded[name][int4.NAMES[self._method].scales].shape
            size = math.prod(self.tensors[name].shape)
            return StoredBits(int4.BITS, size // math.prod(scales))
        if name in self._scales:
            return StoredBits(8)
        if name in self._mxfp4:
            return StoredBits(int4.BITS, mxfp4.GROUP)
        blocks = self._blocks(name)
        return None if blocks is None else blocks.bits

    def _blocks(self, name: str) -> GgufSlice | None:
        """Returns a tensor of a GGUF file."""
        stored = self.tensors.get(name)
        found = None if stored is None else self._files[stored.file_name].get_slice(stored.name)
        return found if isinstance(found, GgufSlice) else None

    def read_quantized(self, name: str, part: tuple[slice, ...]) -> QuantizedWeight | None:
        """Returns these elements of a weight in fp8 or 4 bits as they are stored. None for any
        other weight, where they cut a block or group, and if inputs are not in the order of their
        groups."""
        if name in self._scales:
            return self._fp8_scales(name).weight(self._read_stored(name, part), part)
        if (blocks := self._blocks(name)) is not None:
            with self._explained(name):
                return blocks.coded(part)
        if name in self._mxfp4:
            rows, columns = part
            return self._read_mxfp4(name, rows).part((slice(None), columns))
        if name not in self._coded:
            return None
        weight, places = self._read_coded(name)
        in_order = torch.arange(len(places), device=places.device)
        return weight.part(part) if torch.equal(places, in_order) else None

    def _read_stored(self, name: str, part: tuple[slice, ...]) -> Tensor:
        stored = self.tensors[name]
        with self._explained(name) as file:
            if (place := stored.place) is not None:
                whole, own, columns = file.get_slice(stored.name), place.rows(part[0]), part[1]
                if place.is_transposed:
                    return whole[place.expert, columns, own].T[:: place.step]
                return whole[place.expert, own, columns][:: place.step]
            is_whole = part == fp8.whole(stored.shape)
            return file.get_tensor(stored.name) if is_whole else file.get_slice(stored.name)[part]

    def _read_mxfp4(self, name: str, rows: slice) -> mxfp4.Mxfp4Weight:
        place = self.tensors[name].place
        assert place is not None
        with self._explained(name):
            blocks, scales = (
                self._files[each.file_name].get_slice(each.name)[place.expert, place.rows(rows)]
                for each in (self.tensors[name], self._mxfp4[name])
            )
        return mxfp4.Mxfp4Weight(blocks[:: place.step], scales[:: place.step])

    def _read_coded(self, name: str) -> tuple[int4.CodedWeight, Tensor]:
        assert self._method is not None
        parts = self._coded[name]

        def read(suffix: str) -> Tensor | None:
            return self._values(parts[suffix]) if suffix in parts else None

        try:
            with self._explained(name):
                return int4.read_coded(self._method, read)
        except ConfigError as error:
            raise ConfigError(f"{self.directory}: {name}: {error}") from error

    def _fp8_scales(self, name: str) -> fp8.Fp8Scales:
        parts = self._scales[name]
        with self._explained(name):
            input_scale = None if parts.input_scale is None else self._values(parts.input_scale)
            rows, columns = self.tensors[name].shape
            return fp8.Fp8Scales(
                (rows, columns), parts.block, self._values(parts.scales), input_scale
            )

    def _values(self, stored: StoredTensor) -> Tensor:
        return self._files[stored.file_name].get_tensor(stored.name)

    @contextmanager
    def _explained(self, name: str) -> Iterator[WeightFile]:
        """Returns the file of a tensor; an error while it is read names the file and the tensor."""
        stored = self.tensors[name]
        try:
            yield self._files[stored.file_name]
        except (SafetensorError, OSError) as error:
            path = self.directory / stored.file_name
            raise ConfigError(f"{path}: {name} cannot be read: {error}") from error

    def _note_tensors(self, file_name: str, *, replaces: bool = False) -> None:
        file = self._files[file_name]
        for stored_name in file.keys():  # noqa: SIM118  (not a mapping)
            name = self._rename(stored_name)
            if name is None:
                continue
            if name in self.tensors and not replaces:
                first = self.tensors[name].file_name
                raise ConfigError(
                    f"{self.directory}: tensor {name} is in two files, {first} and {file_name}"
                )
            part = file.get_slice(stored_name)
            shape, dtype = tuple(part.get_shape()), part.get_dtype()
            self.tensors[name] = StoredTensor(file_name, stored_name, shape, dtype)

    def _note_update(self, path: Path) -> None:
        """WHY: a file with the weights of a drafter alone would be an update without an effect."""
        names = self._files[str(path)].keys()
        if all(self._rename(name) is None for name in names):
            found = listed(names) or "it is empty"
            raise ConfigError(
                f"{path} has no tensor that an update can change: {found}. "
                "Weights of the model can be updated; those of a drafter (also of modules of "
                "multi-token prediction) change when the server is started with a new checkpoint"
            )
        self._note_tensors(str(path), replaces=True)

    def _take_fp8(self) -> None:
        """Removes the scales of fp8 weights from the tensors, and names the dtype that is read."""
        if self._fp8 is None:
            return
        weights = [name for name, stored in self.tensors.items() if stored.dtype == fp8.NAME]
        for weight in weights:
            found = [self.tensors.pop(f"{weight}{suffix}", None) for suffix in fp8.SCALES]
            scales = next((each for each in found if each is not None), None)
            layer = weight.removesuffix(fp8.WEIGHT)
            input_scale = self.tensors.pop(f"{layer}{fp8.INPUT_SCALE}", None)
            if scales is None:
                continue
            stored = self.tensors[weight]
            try:
                block = fp8.block_of(stored.shape, scales.shape, self._fp8.block)
            except ConfigError as error:
                raise ConfigError(f"{self.directory}: {scales.name} {error}") from error
            self._scales[weight] = _Fp8Parts(block, scales, input_scale)
            self.tensors[weight] = msgspec.structs.replace(stored, dtype="F32")
        for name in [name for name in self.tensors if name.endswith(fp8.SCALES[0])]:
            self.tensors.pop(name)  # of a weight that is not in fp8, or not read

    def _take_mxfp4(self) -> None:
        """Puts the matrices of each expert in the place of each pair of blocks and scales."""
        found = [name for name in self.tensors if name.endswith(mxfp4.BLOCKS)]
        for name, own in ((name.removesuffix(mxfp4.BLOCKS), self.tensors[name]) for name in found):
            scales = self.tensors.get(f"{name}{mxfp4.SCALES}")
            shape = None if scales is None else mxfp4.stack_shape(own.shape, scales.shape)
            if not name.endswith((*JOINED_EXPERTS,)):
                shape = None
            if scales is None or shape is None or {own.dtype, scales.dtype} != {"U8"}:
                raise ConfigError(
                    f"{self.directory}: {name}{mxfp4.BLOCKS} is no MXFP4 of experts: it has the "
                    f"shape {own.shape}, and its scales {None if scales is None else scales.shape}"
                )
            for suffix in (mxfp4.BLOCKS, mxfp4.SCALES):
                self.tensors.pop(f"{name}{suffix}")
            stack = msgspec.structs.replace(own, shape=shape, dtype="BF16")
            for matrix, placed in _matrices_of(name, stack, in_turns=True):
                self._mxfp4[matrix] = scales
                self.tensors[matrix] = placed

    def _take_coded(self) -> None:
        """Puts one weight in the place of the tensors of each layer of 4 bits."""
        if self._method is None:
            return
        names = int4.NAMES[self._method]
        suffixes = (names.values, names.zeros, names.scales, names.group_of, int4.IGNORED)
        layers = [name for name in self.tensors if name.endswith(names.values)]
        for layer in (name.removesuffix(names.values) for name in layers):
            found = {suffix: self.tensors.pop(f"{layer}{suffix}", None) for suffix in suffixes}
            parts = {suffix: part for suffix, part in found.items() if part is not None}
            own, scales = parts[names.values], parts.get(names.scales)
            shape = None
            if scales is not None and own.dtype == "I32":
                shape = int4.whole_shape(self._method, own.shape, scales.shape)
            if shape is None:
                raise ConfigError(
                    f"{self.directory}: {layer}{names.values} is no weight of 4 bits of "
                    f"{self._method}: it is {own.dtype} of {own.shape}, and its scales are "
                    f"{None if scales is None else scales.shape}"
                )
            weight = f"{layer}.weight"
            self._coded[weight] = parts
            self.tensors[weight] = msgspec.structs.replace(own, shape=shape, dtype="F32")

    def _take_joined_experts(self) -> None:
        """Puts a matrix for each expert in the place of the tensors of all of them. Those that
        transformers' module of Qwen3.5-MoE has are gate_up_proj [experts, 2 size, hidden], the
        gates first, and down_proj [experts, hidden, size]. Those of gpt-oss, which have biases, are
        transposed, with gates and ups in turns."""
        found = {
            name: own for name, own in self.tensors.items() if name.endswith((*JOINED_EXPERTS,))
        }
        for name, own in found.items():
            if len(own.shape) != 3:
                continue
            del self.tensors[name]
            is_transposed = f"{name}_bias" in self.tensors
            if is_transposed:
                count, num_in, num_rows = own.shape
                own = msgspec.structs.replace(own, shape=(count, num_rows, num_in))
            for matrix, placed in _matrices_of(
                name, own, in_turns=is_transposed, is_transposed=is_transposed
            ):
                self.tensors.setdefault(matrix, placed)

    def _check_index(self, index: Mapping[str, str]) -> None:
        lost = [name for name, file in index.items() if not self._is_in(name, file)]
        if lost:
            path = self.directory / INDEX
            raise ConfigError(f"{path} names tensors that are not in their files: {listed(lost)}")

    def _is_in(self, stored_name: str, file_name: str) -> bool:
        name = self._rename(stored_name)
        if name is None:
            return True
        return name in self.tensors and self.tensors[name].file_name == file_name


def _matrices_of(
    name: str, own: StoredTensor, *, in_turns: bool, is_transposed: bool = False
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields the matrices of a tensor of all experts by their names. `own` has the shape [experts,
    out, in]; the rows of its parts are one after the other, or in turns."""
    prefix, _, joined = name.rpartition(".")
    parts = JOINED_EXPERTS[f".experts.{joined}"]
    count, num_rows, num_in = own.shape
    size = num_rows // len(parts)
    for expert, (number, part) in product(range(count), enumerate(parts)):
        first, step = (number, len(parts)) if in_turns else (number * size, 1)
        place = Place(expert, first, step, is_transposed)
        placed = msgspec.structs.replace(own, shape=(size, num_in), place=place)
        yield f"{prefix}.{expert}.{part}.weight", placed
