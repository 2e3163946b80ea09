"""The records of linear layers that the compiled steps of the CPU read: addresses of weights, and
sizes. The kernels are aserve_kernels.cpu.product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aserve.gpu.device.cpu.kernel_linear import QuantLinear, TiledLinear
from aserve.gpu.layers.linear import LinearOp
from aserve.gpu.lora.tables import LoraLinear
from aserve.gpu.parallel.shared import SharedCollectives
from aserve.gpu.parallel.source import SummedLinear
from aserve_kernels.cpu.decoder_layers import Records
from aserve_kernels.cpu.gemm import tiles_product
from aserve_kernels.cpu.product import NO_PRODUCT
from aserve_kernels.cpu.quant_linear import codes_product

NO_FACTORS = np.empty(0, np.float32)
Product: TypeAlias = tuple[float, ...]  # the fields of PRODUCT
Values: TypeAlias = Mapping[str, float | Product]


def product_of(dtype: torch.dtype, product: LinearOp | None) -> Product:
    """Returns the fields of PRODUCT of a layer that is packed, with inputs of this dtype."""
    if product is None:
        return NO_PRODUCT
    packed = packed_of(product)
    sizes = (packed.num_in, packed.num_out)
    if isinstance(packed, TiledLinear):
        arrays: tuple[npt.NDArray[Any], ...] = (packed.packed, packed.bias, NO_FACTORS)
        called = tiles_product(dtype, packed.stored)
        return called.address, *map(_address, arrays), *sizes, 0, 0, 0.0
    weight = packed.weight
    arrays = (weight.codes, weight.bias, weight.factors)
    numbers = (*sizes, weight.group, weight.per_group, float(weight.unit))
    return codes_product(dtype, weight.kind).address, *map(_address, arrays), *numbers


def packed_of(product: LinearOp) -> TiledLinear | QuantLinear:
    """Returns this rank's part of a layer that is packed, without its adapters."""
    product = _plain(product)
    assert isinstance(product, TiledLinear | QuantLinear)
    return product


def are_packed(products: Iterable[LinearOp]) -> bool:
    return all(map(is_packed, products))


def is_packed(product: LinearOp) -> bool:
    """Whether the kernels can read the layer's weight: its inputs are whole groups."""
    plain = _plain(product)
    return isinstance(plain, TiledLinear) or (
        isinstance(plain, QuantLinear) and not plain.weight.num_in % plain.weight.group
    )


def own_part(product: LinearOp) -> LinearOp:
    """Returns this rank's part of a sum that the kernels can form; its bias is added to the sum."""
    if not isinstance(product, SummedLinear) or product.bias is not None:
        return product
    return product.part if isinstance(product.ranks, SharedCollectives) else product


def filled(record: Records, values: Values) -> Records:
    """Returns the record, all of whose fields it has set."""
    assert record.dtype.names is not None
    assert set(values) == set(record.dtype.names)
    for name, value in values.items():
        record[name] = value
    return record


def _plain(product: LinearOp) -> LinearOp:
    product = own_part(product)
    return product.base if isinstance(product, LoraLinear) else product


def _address(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data
