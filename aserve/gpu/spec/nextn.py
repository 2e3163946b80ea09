"""Loads the modules of multi-token prediction (DeepSeek NextN, MiMo, Qwen3-Next) as a drafter.

They may lie in a checkpoint of their own, or in the target's. A single module drafts recurrently,
from the target's hidden states after the final norm; several draft one token each, and read what
enters the final norm. An assistant without KV of its own has a loader of its own.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from aserve.errors import ConfigError
from aserve.gpu.device.ops import MakeFusedDraft
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.config.model import architecture_of, parse_config, read_fields
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.registry import FAMILIES, DecoderFamily
from aserve.gpu.models.vision_language import VisionLanguageFamily
from aserve.gpu.spec.base import AFTER_NORM, HiddenInputs
from aserve.gpu.spec.checkpoint import (
    DraftWeights,
    check_target_hidden,
    check_vocabulary,
    load_draft_model,
    read_draft_config,
)
from aserve.gpu.spec.frozen_kv import is_assistant
from aserve.gpu.spec.frozen_kv import load as load_assistant
from aserve.gpu.spec.fused import FusedDrafter
from aserve.gpu.spec.fused_modules import FusedModules
from aserve.gpu.spec.multi_layer import MultiLayer
from aserve.gpu.spec.nextn_model import Module, ModuleConfig, Modules, find_modules
from aserve.gpu.spec.recurrent_model import recurrent_drafter
from aserve.gpu.spec.request import DraftRequest, LoadedDrafter
from aserve.gpu.step.resolve import DeviceState
from aserve.gpu.weights.checkpoint import Checkpoint


def load(request: DraftRequest) -> LoadedDrafter:
    target = request.target
    model_dir = request.model_dir(bundled="mtp", default=request.target_dir)
    if is_assistant(read_fields(model_dir)):
        request.refuse_pictures()
        return load_assistant(request)
    layer = _family_layer(model_dir)
    decoder = read_draft_config(model_dir) if layer is None else layer.config
    check_vocabulary(model_dir, decoder.vocab_size, target)
    check_target_hidden(decoder.fields, "hidden_size", decoder.hidden_size, target)
    if decoder.fields.flag("use_sliding_window"):
        decoder.fields.refuse("use_sliding_window", expected="false: modules see all tokens")
    with Checkpoint(model_dir) as checkpoint:
        stored = find_modules(str(model_dir), checkpoint.tensors, has_layer=layer is not None)
    num_stored = len(stored.prefixes)
    is_single = num_stored == 1
    if not is_single:
        request.refuse_pictures()
    num_drafts = 1 if is_single else request.chain_len(default=num_stored)
    if num_drafts > num_stored:
        raise ConfigError(
            f"--speculative-num-steps {num_drafts}: {model_dir} has {num_stored} modules, which "
            "draft one token each",
            param="speculative_num_steps",
        )
    stored = stored.first(num_drafts)
    config = ModuleConfig(
        decoder,
        num_modules=len(stored.prefixes),
        hidden_first=decoder.fields.flag(
            "mtp_hidden_states_first", default=stored.names.hidden_first
        ),
        returns_normed=is_single,
        inputs=AFTER_NORM if is_single else HiddenInputs(before_norm=True),
        layer=layer,
    )
    build = partial(_build, config=config, target=target)
    model = load_draft_model(model_dir, request.plan, build, rename=stored.rename)
    if len(model.modules) == 1:
        return recurrent_drafter(model, model_dir, request)
    drafter = MultiLayer(model.modules, hidden_size=decoder.hidden_size, inputs=config.inputs)
    about = f"{num_drafts} tokens of {model_dir.name}, one of each module"
    return LoadedDrafter(drafter, model, about, fuse=partial(_fuse, model))


def _fuse(model: Modules, make: MakeFusedDraft, state: DeviceState) -> FusedDrafter | None:
    made = [make(module.decoder, state) for module in model.modules]
    models = [each for each in made if each is not None]
    return FusedModules(models, state) if len(models) == len(made) else None


def _family_layer(model_dir: Path) -> DecoderSpec | None:
    """Returns the spec of the model's family if its last layer has a mixer or an MLP of its own."""
    fields = read_fields(model_dir)
    family = FAMILIES.get(architecture_of(fields))
    if not isinstance(family, DecoderFamily | VisionLanguageFamily):
        return None
    make = family.spec if isinstance(family, DecoderFamily) else family.text
    spec = make(parse_config(fields, defaults=family.defaults))
    return spec if spec.mixers or spec.mlps else None


def _build(weights: DraftWeights, *, config: ModuleConfig, target: CausalModel) -> Modules:
    numbers = range(config.num_modules)
    modules = [Module(n, weights, config=config, target=target) for n in numbers]
    return Modules(modules, config)
