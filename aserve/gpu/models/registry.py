"""The model families by architecture. A new family is a file in families/ and a line here.

An architecture without a line runs in transformers' code, if it can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from aserve.errors import ConfigError
from aserve.gpu.models.base import CausalModel
from aserve.gpu.models.config.model import ModelConfig
from aserve.gpu.models.config.sentence import read_sentence_pooling
from aserve.gpu.models.decoder import Decoder
from aserve.gpu.models.decoder_spec import DecoderSpec
from aserve.gpu.models.families import (
    bamba,
    bert,
    deepseek,
    ernie4_5,
    exaone4,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granite_hybrid,
    lfm2,
    llada2,
    llama,
    longcat_flash,
    minimax_m2,
    mistral,
    mixtral,
    modernbert,
    nemotron_h,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    qwen_vl,
    sdar,
    seed_oss,
    smollm3,
)
from aserve.gpu.models.pooled_families import (
    EncoderFamily,
    PooledDecoderFamily,
    RewardHead,
    score_head,
)
from aserve.gpu.models.vision_language import VisionLanguageFamily
from aserve.gpu.weights.checkpoint import Rename, as_stored
from aserve.gpu.weights.source import WeightSource


class Family(Protocol):
    """The models of one architecture."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str:
        """Says what is special about the models, in `aserve models` and docs/models.md."""

    @property
    def defaults(self) -> Mapping[str, object]:
        """The values of the reference code for fields that config.json leaves out. A field that is
        null has no default."""

    def build(
        self, config: ModelConfig, weights: WeightSource, *, max_model_len: int
    ) -> CausalModel: ...


@dataclass(frozen=True, slots=True)
class DecoderFamily:
    """A family of the shared decoder, which differs from the others by its `DecoderSpec` alone."""

    name: str
    about: str
    spec: Callable[[ModelConfig], DecoderSpec]
    defaults: Mapping[str, object] = field(default_factory=dict)
    own_name: Rename = as_stored

    def build(self, config: ModelConfig, weights: WeightSource, *, max_model_len: int) -> Decoder:
        return Decoder(self.spec(config), weights, max_model_len=max_model_len)


class BuildModel(Protocol):
    def __call__(
        self, config: ModelConfig, weights: WeightSource, /, *, max_model_len: int
    ) -> CausalModel: ...


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family with a model of its own around the shared decoder."""

    name: str
    about: str
    build_model: BuildModel
    defaults: Mapping[str, object] = field(default_factory=dict)

    def build(
        self, config: ModelConfig, weights: WeightSource, *, max_model_len: int
    ) -> CausalModel:
        return self.build_model(config, weights, max_model_len=max_model_len)


SCORES = "scores of labels from the last token: rewards, classes, relevance"
EMBEDS = "embeddings of the last token, or pooled as sentence-transformers say"

FAMILIES: Mapping[str, Family] = {
    "BambaForCausalLM": DecoderFamily(
        "Bamba",
        "Mamba-2 in most layers, and attention in the others",
        bamba.bamba,
        bamba.DEFAULTS,
        bamba.own_name,
    ),
    "BertForSequenceClassification": EncoderFamily(
        "BERT (classifier)",
        "scores of labels, of texts or of pairs of texts, as cross-encoders have them",
        bert.bert,
        bert.DEFAULTS,
        bert.bert_head,
    ),
    "BertModel": EncoderFamily(
        "BERT",
        "embeddings: every token sees the whole text; pooled as sentence-transformers say",
        bert.bert,
        bert.DEFAULTS,
    ),
    "DeepseekV2ForCausalLM": DecoderFamily(
        "DeepSeek-V2",
        "latent attention: one compressed vector per token and layer in the KV cache; experts",
        deepseek.deepseek_v2,
        deepseek.V2_DEFAULTS,
    ),
    "DeepseekV32ForCausalLM": DecoderFamily(
        "DeepSeek-V3.2",
        "as DeepSeek-V3; an indexer chooses the keys that a query attends to (sparse attention)",
        deepseek.deepseek_v32,
        deepseek.V32_DEFAULTS,
    ),
    "DeepseekV3ForCausalLM": DecoderFamily(
        "DeepSeek-V3, Kimi K2",
        "as DeepSeek-V2; corrected sigmoid scores choose the experts; its NextN layers draft",
        deepseek.deepseek_v3,
        deepseek.V3_DEFAULTS,
    ),
    "Dots1ForCausalLM": DecoderFamily(
        "dots.llm1",
        "as GLM-4.5, with whole heads rotated; windows in upper layers",
        glm4_moe.dots1,
        glm4_moe.DOTS1_DEFAULTS,
    ),
    "Ernie4_5ForCausalLM": DecoderFamily(
        "ERNIE 4.5",
        "as Llama; rope rotates neighbouring elements of a head",
        ernie4_5.ernie4_5,
        ernie4_5.DEFAULTS,
    ),
    "Ernie4_5_MoeForCausalLM": DecoderFamily(
        "ERNIE 4.5 MoE",
        "as ERNIE 4.5; experts chosen by corrected softmax scores, beside shared ones",
        ernie4_5.ernie4_5_moe,
        ernie4_5.MOE_DEFAULTS,
        ernie4_5.own_name,
    ),
    "Exaone4ForCausalLM": DecoderFamily(
        "EXAONE 4.0",
        "norms after the sublayers; a window and rotary positions in three of four layers",
        exaone4.exaone4,
        exaone4.DEFAULTS,
    ),
    "FalconH1ForCausalLM": DecoderFamily(
        "Falcon-H1",
        "Mamba-2 beside the attention of each layer, and factors on most inputs and outputs",
        falcon_h1.falcon_h1,
        falcon_h1.DEFAULTS,
        bamba.own_name,
    ),
    "GemmaForCausalLM": DecoderFamily(
        "Gemma",
        "as Llama, with norms scaled by 1 + w, and scaled embeddings",
        gemma.gemma,
        gemma.DEFAULTS,
    ),
    "Gemma2ForCausalLM": DecoderFamily(
        "Gemma 2",
        "soft caps, a window in every other layer, norms around sublayers, scaled by 1 + w",
        gemma2.gemma2,
        gemma2.DEFAULTS,
    ),
    "Gemma2ForSequenceClassification": PooledDecoderFamily(
        "Gemma 2 (classifier)",
        SCORES,
        gemma2.gemma2,
        gemma2.DEFAULTS,
        score_head,
    ),
    "Gemma3ForCausalLM": DecoderFamily(
        "Gemma 3 (text)",
        "five layers with a window to one without, a rope for each kind, norms of q and k",
        gemma3.gemma3,
        gemma3.DEFAULTS,
    ),
    "Gemma3ForConditionalGeneration": VisionLanguageFamily(
        "Gemma 3",
        "as Gemma 3 (text), and pictures by SigLIP, whose tokens see each other",
        gemma3.gemma3,
        gemma3.siglip,
        gemma3.TEXT_DEFAULTS,
        gemma3.own_name,
    ),
    "Glm4ForCausalLM": DecoderFamily(
        "GLM-4, GLM-Z1",
        "as GLM-4 (9B), with norms around the sublayers",
        glm4.glm4,
        glm4.DEFAULTS,
    ),
    "Glm4MoeForCausalLM": DecoderFamily(
        "GLM-4.5",
        "experts chosen by corrected sigmoid scores, shared experts, half of each head rotated",
        glm4_moe.glm4_moe,
        glm4_moe.DEFAULTS,
    ),
    "Glm4MoeLiteForCausalLM": DecoderFamily(
        "GLM-4.7-Flash",
        "as DeepSeek-V3, without groups of experts",
        deepseek.deepseek_v3,
        deepseek.GLM4_LITE_DEFAULTS,
    ),
    "GlmForCausalLM": DecoderFamily(
        "GLM-4 (9B)",
        "rope rotates neighbouring elements in half of each head; gate and up are joined",
        glm4.glm,
        glm4.DEFAULTS,
    ),
    "GlmMoeDsaForCausalLM": DecoderFamily(
        "GLM-5",
        "as DeepSeek-V3.2; rope rotates neighbouring elements of index heads, too",
        deepseek.deepseek_v32,
        deepseek.GLM5_DEFAULTS,
    ),
    "GptOssForCausalLM": DecoderFamily(
        "gpt-oss",
        "attention sinks, a window in every other layer, clamped experts, also in MXFP4",
        gpt_oss.gpt_oss,
        gpt_oss.DEFAULTS,
    ),
    "GraniteForCausalLM": DecoderFamily(
        "Granite",
        "scaled embeddings, attention, residuals and logits",
        granite.granite,
    ),
    "GraniteMoeForCausalLM": DecoderFamily(
        "Granite 3 MoE",
        "as Granite; experts chosen by their scores, and weighed by a softmax over the chosen",
        granite_hybrid.granite_moe,
        granite_hybrid.MOE_DEFAULTS,
        granite_hybrid.own_name,
    ),
    "GraniteMoeHybridForCausalLM": DecoderFamily(
        "Granite 4",
        "as Granite; Mamba-2 layers between those with attention; experts beside a shared MLP",
        granite_hybrid.granite_hybrid,
        granite_hybrid.DEFAULTS,
        granite_hybrid.own_name,
    ),
    "GraniteMoeSharedForCausalLM": DecoderFamily(
        "Granite 3 MoE (shared)",
        "as Granite 3 MoE, with an MLP beside the experts that all tokens share",
        granite_hybrid.granite_moe,
        {**granite_hybrid.MOE_DEFAULTS, "shared_intermediate_size": 1024},
        granite_hybrid.own_name,
    ),
    "LLaDA2MoeModelLM": DecoderFamily(
        "LLaDA2.0, LLaDA2.1",
        "diffusion: fills blocks of tokens in any order; experts as in DeepSeek-V3",
        llada2.llada2,
        llada2.DEFAULTS,
        llada2.own_name,
    ),
    "Lfm2ForCausalLM": DecoderFamily(
        "LFM2",
        "short convolutions with gates in most layers, and attention in the others",
        lfm2.lfm2,
        lfm2.DEFAULTS,
        lfm2.own_name,
    ),
    "Lfm2MoeForCausalLM": DecoderFamily(
        "LFM2-MoE",
        "as LFM2; experts chosen by corrected sigmoid scores in all layers but the first two",
        lfm2.lfm2_moe,
        lfm2.MOE_DEFAULTS,
        lfm2.own_name,
    ),
    "LlamaForCausalLM": DecoderFamily(
        "Llama 2, 3",
        "every rope type: default, linear, dynamic, yarn, llama3, longrope",
        llama.llama,
    ),
    "LlamaForSequenceClassification": PooledDecoderFamily(
        "Llama (classifier)",
        SCORES,
        llama.llama,
        {},
        score_head,
    ),
    "LlamaModel": PooledDecoderFamily(
        "Llama (embedding)",
        EMBEDS,
        llama.llama,
    ),
    "LlamaNgramForCausalLM": ModelFamily(
        "Llama with n-gram embeddings",
        "the embedding of LongCat-Flash-Lite: it depends on the ids before a token",
        llama.llama_with_ngrams,
    ),
    "LongcatFlashForCausalLM": ModelFamily(
        "LongCat-Flash",
        "latent attention twice per layer, beside a shortcut of experts, some of them identities",
        longcat_flash.longcat_flash,
        longcat_flash.DEFAULTS,
    ),
    "LongcatFlashNgramForCausalLM": ModelFamily(
        "LongCat-Flash-Lite",
        "as LongCat-Flash, with n-gram embeddings",
        longcat_flash.longcat_flash_lite,
        longcat_flash.DEFAULTS,
    ),
    "MiMoForCausalLM": DecoderFamily(
        "MiMo",
        "as Qwen2; its module of multi-token prediction drafts (NEXTN)",
        qwen2.qwen2,
        qwen2.DEFAULTS,
    ),
    "MiniMaxM2ForCausalLM": DecoderFamily(
        "MiniMax-M2",
        "experts chosen by corrected sigmoid scores in all layers, norms over all heads",
        minimax_m2.minimax_m2,
        minimax_m2.DEFAULTS,
    ),
    "Ministral3ForCausalLM": DecoderFamily(
        "Ministral 3",
        "as Llama, with yarn; queries are scaled by their positions",
        mistral.ministral3,
        mistral.MINISTRAL3_DEFAULTS,
    ),
    "MistralForCausalLM": DecoderFamily(
        "Mistral",
        "a sliding window in all layers",
        mistral.mistral,
        mistral.DEFAULTS,
    ),
    "Mistral3ForConditionalGeneration": VisionLanguageFamily(
        "Mistral Small 3",
        "as Mistral or Ministral 3, and pictures by the vision transformer of Pixtral",
        mistral.mistral3,
        mistral.pixtral,
        mistral.SMALL3_DEFAULTS,
        mistral.own_name,
    ),
    "MistralForSequenceClassification": PooledDecoderFamily(
        "Mistral (classifier)",
        SCORES,
        mistral.mistral,
        mistral.DEFAULTS,
        score_head,
    ),
    "MistralModel": PooledDecoderFamily(
        "Mistral (embedding)",
        EMBEDS,
        mistral.mistral,
        mistral.DEFAULTS,
    ),
    "MixtralForCausalLM": DecoderFamily(
        "Mixtral",
        "two of eight experts per token",
        mixtral.mixtral,
        mixtral.DEFAULTS,
    ),
    "ModernBertForSequenceClassification": EncoderFamily(
        "ModernBERT (classifier)",
        "as BERT (classifier), such as gte-reranker-modernbert",
        modernbert.modernbert,
        modernbert.DEFAULTS,
        modernbert.modernbert_head,
    ),
    "ModernBertModel": EncoderFamily(
        "ModernBERT",
        "as BERT, with rotary positions, and in most layers a window on both sides of a token",
        modernbert.modernbert,
        modernbert.DEFAULTS,
    ),
    "NemotronHForCausalLM": DecoderFamily(
        "Nemotron-H",
        "each layer is Mamba-2, attention, an MLP without a gate or experts as in DeepSeek-V3",
        nemotron_h.nemotron_h,
        nemotron_h.DEFAULTS,
        nemotron_h.own_name,
    ),
    "Olmo2ForCausalLM": DecoderFamily(
        "OLMo 2",
        "norms after the sublayers, one norm over all heads of queries and of keys",
        olmo2.olmo2,
        olmo2.DEFAULTS,
    ),
    "Olmo3ForCausalLM": DecoderFamily(
        "OLMo 3",
        "as OLMo 2; a window in three of four layers",
        olmo2.olmo3,
        olmo2.DEFAULTS_3,
    ),
    "OlmoeForCausalLM": DecoderFamily(
        "OLMoE",
        "experts chosen by softmax in all layers, norms over all heads",
        olmoe.olmoe,
        olmoe.DEFAULTS,
    ),
    "Phi3ForCausalLM": DecoderFamily(
        "Phi-3, Phi-4",
        "fused projections, partial rotary embeddings, longrope",
        phi3.phi3,
        phi3.DEFAULTS,
    ),
    "Qwen2ForCausalLM": DecoderFamily(
        "Qwen2, Qwen2.5",
        "biases on q, k and v; windows in upper layers",
        qwen2.qwen2,
        qwen2.DEFAULTS,
    ),
    "Qwen2ForSequenceClassification": PooledDecoderFamily(
        "Qwen2 (classifier)",
        SCORES,
        qwen2.qwen2,
        qwen2.DEFAULTS,
        score_head,
    ),
    "Qwen2ForRewardModel": PooledDecoderFamily(
        "Qwen2 (reward)",
        "one score of the whole chat, as Qwen2.5-Math-RM",
        qwen2.qwen2,
        qwen2.DEFAULTS,
        RewardHead,
    ),
    "Qwen2Model": PooledDecoderFamily(
        "Qwen2 (embedding)",
        EMBEDS,
        qwen2.qwen2,
        qwen2.DEFAULTS,
    ),
    "Qwen2MoeForCausalLM": DecoderFamily(
        "Qwen2-MoE",
        "experts chosen by softmax, beside a shared MLP behind a gate",
        qwen2_moe.qwen2_moe,
        qwen2_moe.DEFAULTS,
    ),
    "Qwen2VLForConditionalGeneration": VisionLanguageFamily(
        "Qwen2-VL",
        "pictures: a vision transformer, rotary positions of three axes",
        qwen_vl.qwen2_text,
        qwen_vl.qwen2_vision,
        qwen_vl.QWEN2_DEFAULTS,
    ),
    "Qwen2_5_VLForConditionalGeneration": VisionLanguageFamily(
        "Qwen2.5-VL",
        "as Qwen2-VL, with attention windows in the vision transformer",
        qwen_vl.qwen2_text,
        qwen_vl.qwen2_5_vision,
        qwen_vl.QWEN2_DEFAULTS,
    ),
    "Qwen3VLForConditionalGeneration": VisionLanguageFamily(
        "Qwen3-VL",
        "as Qwen2-VL, with more of the picture's features in the first layers (deepstack)",
        qwen_vl.qwen3_text,
        qwen_vl.qwen3_vision,
        qwen_vl.QWEN3_DEFAULTS,
    ),
    "Qwen3ForCausalLM": DecoderFamily(
        "Qwen3",
        "norms on queries and keys",
        qwen3.qwen3,
        qwen3.DEFAULTS,
    ),
    "Qwen3ForSequenceClassification": PooledDecoderFamily(
        "Qwen3 (classifier)",
        SCORES,
        qwen3.qwen3,
        qwen3.DEFAULTS,
        score_head,
    ),
    "Qwen3Model": PooledDecoderFamily(
        "Qwen3 (embedding)",
        EMBEDS,
        qwen3.qwen3,
        qwen3.DEFAULTS,
    ),
    "Qwen3MoeForCausalLM": DecoderFamily(
        "Qwen3-MoE",
        "experts in all layers but those that mlp_only_layers names",
        qwen3_moe.qwen3_moe,
        qwen3_moe.DEFAULTS,
    ),
    "Qwen3NextForCausalLM": DecoderFamily(
        "Qwen3-Next",
        "Gated DeltaNets (linear attention) in three of four layers, experts as in Qwen2-MoE",
        qwen3_next.qwen3_next,
        qwen3_next.NEXT_DEFAULTS,
    ),
    "Qwen3_5ForCausalLM": DecoderFamily(
        "Qwen3.5 (text)",
        "Gated DeltaNets (linear attention) in three of four layers",
        qwen3_next.qwen3_5,
        qwen3_next.DEFAULTS,
    ),
    "Qwen3_5ForConditionalGeneration": VisionLanguageFamily(
        "Qwen3.5",
        "as Qwen3.5 (text), and pictures as in Qwen3-VL, without deepstack",
        qwen_vl.qwen3_5_text,
        qwen_vl.qwen3_5_vision,
        qwen3_next.DEFAULTS,
    ),
    "Qwen3_5MoeForConditionalGeneration": VisionLanguageFamily(
        "Qwen3.5-MoE",
        "as Qwen3.5, with experts as in Qwen2-MoE",
        qwen_vl.qwen3_5_moe_text,
        qwen_vl.qwen3_5_vision,
        qwen3_next.MOE_DEFAULTS,
    ),
    "Qwen3_5MoeForCausalLM": DecoderFamily(
        "Qwen3.5-MoE (text)",
        "as Qwen3.5, with experts as in Qwen2-MoE",
        qwen3_next.qwen3_5_moe,
        qwen3_next.MOE_DEFAULTS,
    ),
    "RobertaForSequenceClassification": EncoderFamily(
        "RoBERTa (classifier)",
        "as BERT (classifier)",
        bert.roberta,
        bert.ROBERTA_DEFAULTS,
        bert.roberta_head,
    ),
    "RobertaModel": EncoderFamily(
        "RoBERTa",
        "as BERT",
        bert.roberta,
        bert.ROBERTA_DEFAULTS,
    ),
    "SeedOssForCausalLM": DecoderFamily(
        "Seed-OSS",
        "as Llama, with biases on q, k and v",
        seed_oss.seed_oss,
        seed_oss.DEFAULTS,
    ),
    "SmolLM3ForCausalLM": DecoderFamily(
        "SmolLM3",
        "as Llama, without rotary positions in every fourth layer",
        smollm3.smollm3,
        smollm3.DEFAULTS,
    ),
    "SolarOpenForCausalLM": DecoderFamily(
        "Solar Open",
        "as GLM-4.5, with whole heads rotated and experts in all layers",
        glm4_moe.glm4_moe,
        glm4_moe.SOLAR_DEFAULTS,
    ),
    "XLMRobertaForSequenceClassification": EncoderFamily(
        "XLM-RoBERTa (classifier)",
        "as BERT (classifier), such as bge-reranker",
        bert.roberta,
        bert.ROBERTA_DEFAULTS,
        bert.roberta_head,
    ),
    "XLMRobertaModel": EncoderFamily(
        "XLM-RoBERTa",
        "as BERT, such as multilingual-e5 and bge-m3",
        bert.roberta,
        bert.ROBERTA_DEFAULTS,
    ),
    "SDARForCausalLM": DecoderFamily(
        "SDAR",
        "diffusion: as Qwen3, with attention over whole blocks",
        sdar.sdar,
        sdar.DEFAULTS,
    ),
    "SDARMoeForCausalLM": DecoderFamily(
        "SDAR-MoE",
        "diffusion: as Qwen3-MoE, with attention over whole blocks",
        sdar.sdar_moe,
        sdar.MOE_DEFAULTS,
    ),
}


class Code(NamedTuple):
    """The code that runs a model, and the reason for the choice."""

    name: Literal["native", "transformers"]
    why: str


def choose_code(architecture: str, asked: str) -> Code:
    is_native = architecture in FAMILIES
    match asked:
        case "auto" if is_native:
            return Code("native", "auto")
        case "auto":
            return Code("transformers", f"auto: no native code for {architecture}")
        case "transformers":
            return Code("transformers", "as asked")
        case "native" if is_native:
            return Code("native", "as asked")
        case "native":
            supported = ", ".join(sorted(FAMILIES))
            raise ConfigError(
                f"there is no native code for {architecture}; there is for {supported}; "
                "the model implementation auto or transformers may run it"
            )
        case _:
            raise ConfigError(f"model_impl is {asked!r}; expected auto, native or transformers")


def pooled_family(family: Family, model_dir: Path) -> Family:
    """Returns the family that pools as the files of sentence-transformers say, if the directory has
    them. A model that could generate then embeds alone. A model with a head needs no files."""
    has_head = isinstance(family, EncoderFamily | PooledDecoderFamily) and family.make_head
    pooling = None if has_head else read_sentence_pooling(model_dir)
    match family:
        case _ if pooling is None:
            return family
        case DecoderFamily(name=name, about=about, spec=spec, defaults=defaults):
            return PooledDecoderFamily(name, about, spec, defaults, pooling=pooling)
        case EncoderFamily() | PooledDecoderFamily():
            return dataclasses.replace(family, pooling=pooling)
        case _:
            return family
