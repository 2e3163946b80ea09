"""The body of POST /generate, which two APIs claim: SGLang's has `text` or `input_ids`, and that of
Text Generation Inference (TGI) has `inputs`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from aserve.http.openai.schema import TokenId, null_value

Single: TypeAlias = int | bool | str


class SglangSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's sampling parameters. As there, an unknown one is an error."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    logit_bias: dict[TokenId, float] | None = None
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None


class TgiGrammar(msgspec.Struct):
    """A constraint: `value` is a JSON schema (an object or its text), or a regular expression."""

    type: str
    value: dict[str, Any] | str


class TgiParameters(msgspec.Struct, kw_only=True):
    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: TgiGrammar | None = None
    adapter_id: str | None = None


class TgiBody(msgspec.Struct, kw_only=True):
    inputs: str
    parameters: TgiParameters | None = None
    model: str | None = None


class TgiStreamBody(TgiBody, kw_only=True):
    stream: bool | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """The fields of both APIs. A list in the place of one value has an item for each prompt."""

    model: str | None = None
    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: SglangSampling | list[SglangSampling] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[TokenId | list[TokenId]] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    deadline_ms: float | None = None
    max_queue_ms: float | None = None
    extra_key: str | None = None
    input_embeds: msgspec.Raw = msgspec.field(default_factory=null_value)
    image_data: msgspec.Raw = msgspec.field(default_factory=null_value)
    audio_data: msgspec.Raw = msgspec.field(default_factory=null_value)
    video_data: msgspec.Raw = msgspec.field(default_factory=null_value)
    lora_path: str | list[str | None] | None = None
    custom_logit_processor: str | list[str | None] | None = None
    return_hidden_states: bool | list[bool] | None = None
    inputs: str | None = None
    parameters: TgiParameters | None = None
