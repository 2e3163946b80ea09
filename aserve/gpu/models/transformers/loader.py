"""Loads a causal model of any architecture that transformers implements.

Code comes from the installed transformers alone, never from a model directory. `probe` decides
whether the model can run here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aserve.errors import ConfigError
from aserve.gpu.models.base import LoadPlan
from aserve.gpu.models.config.model import read_fields
from aserve.gpu.models.transformers.attention import PAGED, register
from aserve.gpu.models.transformers.model import TransformersModel
from aserve.gpu.models.transformers.probe import NotSupported, probe
from aserve.gpu.models.transformers.weights import (
    draw_weights,
    fix_frequencies,
    prepare_linears,
    read_weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Exceptions of modelling code that is used in a way for which it was not written.
FAULTS = (
    *(TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError),
    *(RuntimeError, NotImplementedError, ImportError),
)
OWN_CODE = (
    "its code is in the model's directory (auto_map in config.json), and such code is never run. "
    "`aserve models` lists the architectures that need none. Take a version of the model in the "
    "format of transformers, whose name often ends with -hf, or another model"
)


@dataclass(frozen=True, slots=True)
class TransformersLoader:
    model_dir: Path
    kind: type[PreTrainedModel]
    config: PreTrainedConfig

    @property
    def stored_dtype(self) -> str | None:
        dtype = self.config.dtype
        return None if dtype is None else str(dtype).removeprefix("torch.")

    @property
    def stored_quantization(self) -> str | None:
        return None

    @property
    def num_weights(self) -> int:
        with _refusing(self.kind.__name__), torch.device("meta"):
            skeleton = self.kind._from_config(self.config, attn_implementation=PAGED)
        num_weights: int = sum(weight.numel() for weight in skeleton.parameters())
        return num_weights

    def own_name(self, name: str, /) -> str | None:
        return name

    def load(self, plan: LoadPlan) -> TransformersModel:
        if plan.target.shard.num_ranks > 1:
            raise ConfigError(
                f"the model in {self.model_dir} cannot be divided among "
                f"{plan.target.shard.num_ranks} devices, because it runs in transformers' code"
            )
        context_len = _context_len(self.model_dir, self.config, plan.max_model_len)
        size_bytes = self.num_weights * plan.dtype.itemsize
        plan.target.check_room(size_bytes, plan.dtype)
        with _refusing(self.kind.__name__):
            if plan.is_dummy:
                model = draw_weights(self.kind, self.config, plan)
            else:
                model = read_weights(
                    self.kind, self.config, plan, model_dir=self.model_dir, size_bytes=size_bytes
                )
            model.eval().requires_grad_(False)
            prepare_linears(model, plan.target, dtype=plan.dtype)
            torch.nn.Module.to(model, plan.target.device)
            fix_frequencies(model, context_len)
            probed = probe(model, max_model_len=context_len)
        return TransformersModel(probed, dtype=plan.dtype, max_model_len=context_len)


def make_transformers_loader(model_dir: Path, architecture: str) -> TransformersLoader:
    """Reads the configuration, and refuses models that their config or class rules out. The probe
    of the loaded model decides about the rest."""
    from transformers import AutoConfig, AutoModelForCausalLM, __version__

    register()
    has_own_code = bool(read_fields(model_dir).section("auto_map").names)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
    except (OSError, *FAULTS) as error:
        if has_own_code:
            raise _refusal(architecture, OWN_CODE) from None
        text = str(error).strip().splitlines()[0]
        raise ConfigError(f"transformers cannot read {model_dir}/config.json: {text}") from error
    if config.is_encoder_decoder:
        raise _refusal(architecture, "it is an encoder with a decoder")
    known: Any = AutoModelForCausalLM._model_mapping.get(type(config), ())
    kinds = known if isinstance(known, tuple) else (known,)
    kind = next((kind for kind in kinds if kind.__name__ == architecture), None)
    if kind is None:
        unknown = f"it is no causal model of transformers {__version__}"
        raise _refusal(architecture, OWN_CODE if has_own_code else unknown)
    if kind._is_stateful:
        raise _refusal(architecture, "it has recurrent layers, whose state is not in a KV cache")
    if not kind._supports_attention_backend:
        raise _refusal(architecture, "transformers cannot exchange its attention function")
    if getattr(config, "quantization_config", None) is not None:
        raise _refusal(architecture, "quantized checkpoints are unsupported")
    return TransformersLoader(model_dir, kind, config)


def _context_len(model_dir: Path, config: PreTrainedConfig, asked: int | None) -> int:
    text_config = config.get_text_config()
    trained_len: int | None = getattr(text_config, "max_position_embeddings", None)
    if trained_len is None:
        if asked is None:
            raise ConfigError(f"{model_dir} doesn't say how long a context is: set max_model_len")
        return asked
    longest = int(trained_len * _stretch(text_config))
    if asked is not None and asked > longest:
        raise ConfigError(
            f"max_model_len is {asked}, but this model has positions for 1 to {longest} tokens"
        )
    return trained_len if asked is None else asked


def _stretch(config: PreTrainedConfig) -> float:
    """Returns the factor by which rope scaling extends max_position_embeddings."""
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope["factor"]) if rope.get("rope_type") in ("linear", "dynamic") else 1.0


@contextmanager
def _refusing(architecture: str) -> Iterator[None]:
    """Turns an exception of the model's own code into a refusal of the architecture."""
    try:
        yield
    except NotSupported as reason:
        raise _refusal(architecture, f"it {reason}") from None
    except torch.OutOfMemoryError:
        raise  # a RuntimeError that says nothing about the architecture
    except FAULTS as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _refusal(architecture, f"it failed in a trial: {text}") from error


def _refusal(architecture: str, reason: str) -> ConfigError:
    return ConfigError(f"architecture {architecture} is not supported: {reason}")
