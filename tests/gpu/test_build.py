"""What an engine is sized to."""

import errno
import logging
from pathlib import Path

import pytest
import torch

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, assemble, build_executor
from aserve.gpu.cudagraph.warmup import names_the_option
from aserve.gpu.decode.autoregressive import Autoregressive
from aserve.gpu.device.cpu.device import CpuDevice
from aserve.gpu.device.cpu.weights import SMALL_MIXED_PREFILL_TOKENS
from aserve.gpu.weights.source import Target
from aserve.messages.executor import EngineSpec
from aserve.tiny import MODEL_DIR
from tests.fakes.hash_model import HashModel
from tests.gpu.weights.checkpoints import write_checkpoint
from tests.gpu.weights.published import FORMATS, SIZES, quantized


def spec_of(*, max_model_len: int | None = None, num_pages: int | None = None) -> EngineSpec:
    given = BuildOptions(Path(), max_rows=2, max_model_len=max_model_len, num_pages=num_pages)
    return assemble(HashModel(max_model_len=4096), Autoregressive(), CpuDevice(), given).spec


def test_a_context_without_memory_is_shortened_unless_someone_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aserve.gpu.device.cpu.device.MAX_KV_BYTES", 1 << 19)
    with caplog.at_level(logging.WARNING):
        spec = spec_of()
    num_tokens = (spec.groups[0].num_pages - 1) * spec.page_size
    assert 0 < spec.max_model_len == num_tokens < 4096
    assert f"the context is {num_tokens} tokens instead of the model's 4096" in caplog.text
    with pytest.raises(ConfigError, match="max_model_len 4096"):
        spec_of(max_model_len=4096)
    assert spec_of(num_pages=8).max_model_len == 4096


def test_memory_for_weights_is_that_of_the_format_in_which_the_device_keeps_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model of 4 bits that fits would be refused, if it were counted in the model's dtype."""
    asked: list[int] = []

    def refuse(_target: Target, size_bytes: int, _dtype: torch.dtype) -> None:
        asked.append(size_bytes)
        raise ConfigError("as the test wants it")

    monkeypatch.setattr(Target, "check_room", refuse)
    form = FORMATS["awq"]
    stored, meant = quantized(form)
    own = write_checkpoint(tmp_path, stored, quantization_config=form.config, **SIZES)
    with pytest.raises(ConfigError, match="as the test wants it"):
        build_executor(BuildOptions(own, num_pages=8, max_rows=2, dtype="float32"))
    (size,) = asked
    others = sum(each.nbytes for name, each in meant.items() if "proj" not in name)
    layers = sum(each.numel() for name, each in meant.items() if "proj" in name)
    assert others < size < others + layers


@pytest.mark.parametrize("given", [None, 7])
def test_prompts_beside_decodes_are_bounded_as_asked_or_as_suits_the_model(
    given: int | None,
) -> None:
    options = BuildOptions(MODEL_DIR, num_pages=8, max_mixed_prefill_tokens=given)
    expected = given or SMALL_MIXED_PREFILL_TOKENS
    assert build_executor(options).spec.max_mixed_prefill_tokens == expected


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("Storage size calculation overflowed with sizes=[9]"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
        OverflowError("memory mapped size is too large"),
    ],
    ids=["torch", "overflow", "mmap", "python", "size"],
)
def test_memory_of_the_host_that_is_missing_names_the_option_to_lower(error: Exception) -> None:
    complaint = "lower --x, or take a smaller model: "
    with pytest.raises(ConfigError, match=complaint), names_the_option("lower --x"):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.EIO, "broken")])
def test_other_errors_are_not_called_a_lack_of_memory(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error.args[-1])), names_the_option("lower --x"):
        raise error
