"""The records of the answers of the endpoints, for the description of the API.

Long answers are encoded in pieces (long_json.py), so some fields of their records have a type that
says nothing of the items. `FIELDS` has the types of these.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from aserve.batches.records import BatchObject, FileObject
from aserve.http.abort import AbortedAnswer
from aserve.http.anthropic.messages import MessageObject, TokenCount
from aserve.http.control.parsing import ParsedCalls, SeparatedText
from aserve.http.control.render import Rendered, TemplateAnswer
from aserve.http.long_json import JsonEach, JsonList
from aserve.http.openai.chat_records import ChatAnswer, MessageChoice
from aserve.http.openai.completion_logprobs import Logprobs
from aserve.http.openai.completions import CompletionAnswer, CompletionChoice
from aserve.http.openai.embeddings import Embedding, EmbeddingAnswer
from aserve.http.openai.models import ModelBody, ModelList
from aserve.http.openai.prompt_logprobs import PromptLogprobs
from aserve.http.openai.tokens import TextAnswer, TokensAnswer
from aserve.http.probes import HealthBody
from aserve.http.responses.compact import CompactedResponse
from aserve.http.responses.records import (
    ConversationObject,
    DeletedConversation,
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
)
from aserve.http.running import RunningList, RunningRequest
from aserve.http.scoring.classification import ClassifyAnswer, PooledData, PoolingAnswer
from aserve.http.scoring.similarity import RerankAnswer

Record = type[msgspec.Struct]

ANSWERS: Mapping[str, Record] = {
    "POST /v1/completions": CompletionAnswer,
    "POST /v1/chat/completions": ChatAnswer,
    "POST /v1/embeddings": EmbeddingAnswer,
    "POST /rerank": RerankAnswer,
    "POST /v1/rerank": RerankAnswer,
    "POST /v2/rerank": RerankAnswer,
    "POST /classify": ClassifyAnswer,
    "POST /v1/classify": ClassifyAnswer,
    "POST /pooling": PoolingAnswer,
    "POST /v1/pooling": PoolingAnswer,
    "POST /tokenize": TokensAnswer,
    "POST /v1/tokenize": TokensAnswer,
    "POST /detokenize": TextAnswer,
    "POST /v1/detokenize": TextAnswer,
    "GET /v1/models": ModelList,
    "GET /v1/models/{name}": ModelBody,
    "GET /health": HealthBody,
    "GET /readyz": HealthBody,
    "GET /ping": HealthBody,
    "GET /health_generate": HealthBody,
    "POST /v1/responses": ResponseObject,
    "POST /v1/responses/input_tokens": InputTokens,
    "GET /v1/responses/{id}": ResponseObject,
    "DELETE /v1/responses/{id}": DeletedResponse,
    "POST /v1/responses/{id}/cancel": ResponseObject,
    "GET /v1/responses/{id}/input_items": ItemList,
    "POST /v1/responses/compact": CompactedResponse,
    "POST /v1/conversations": ConversationObject,
    "GET /v1/conversations/{id}": ConversationObject,
    "POST /v1/conversations/{id}": ConversationObject,
    "DELETE /v1/conversations/{id}": DeletedConversation,
    "GET /v1/conversations/{id}/items": ItemList,
    "POST /v1/conversations/{id}/items": ItemList,
    "DELETE /v1/conversations/{id}/items/{item}": ConversationObject,
    "POST /v1/messages": MessageObject,
    "POST /v1/messages/count_tokens": TokenCount,
    "POST /v1/batches": BatchObject,
    "GET /v1/batches/{id}": BatchObject,
    "POST /v1/batches/{id}/cancel": BatchObject,
    "POST /v1/files": FileObject,
    "GET /v1/files/{id}": FileObject,
    "POST /abort_request": AbortedAnswer,
    "POST /abort_requests": AbortedAnswer,
    "GET /v1/requests": RunningList,
    "GET /v1/requests/{id}": RunningRequest,
    "POST /v1/requests/{id}": RunningRequest,
    "POST /render": Rendered,
    "POST /v1/chat/completions/render": Rendered,
    "POST /apply-template": TemplateAnswer,
    "POST /parse_function_call": ParsedCalls,
    "POST /separate_reasoning": SeparatedText,
}
LONG = (JsonList, JsonEach)
SCORES = list[PromptLogprobs | None] | UnsetType
FIELDS: Mapping[tuple[Record, str], Any] = {
    (ChatAnswer, "choices"): list[MessageChoice],
    (ChatAnswer, "prompt_logprobs"): SCORES,
    (CompletionAnswer, "choices"): list[CompletionChoice],
    (CompletionChoice, "logprobs"): Logprobs | None,
    (CompletionChoice, "prompt_logprobs"): SCORES,
    (EmbeddingAnswer, "data"): list[Embedding],
    (PoolingAnswer, "data"): list[PooledData],
    (ItemList, "data"): list[dict[str, Any]],  # messages of both kinds have the same tag
    (CompactedResponse, "output"): list[dict[str, Any]],
}


def schemas_of_answers(ref_template: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the schema of each answer of ANSWERS, and the components that they refer to."""
    records = list(dict.fromkeys(ANSWERS.values()))
    schemas, components = msgspec.json.schema_components(
        map(described, records), ref_template=ref_template
    )
    schema_of = dict(zip(records, schemas, strict=True))
    return {place: schema_of[record] for place, record in ANSWERS.items()}, components


@functools.cache
def described(record: Record) -> Record:
    """Returns the record with the types of FIELDS, and with defaults only for fields that an answer
    may leave out.
    """
    config = record.__struct_config__
    fields: list[tuple[str, Any, Any]] = []
    for name, kind in get_type_hints(record, include_extras=True).items():
        if name in record.__struct_fields__:
            plain = _plain(FIELDS.get((record, name), kind))
            is_optional = UnsetType in get_args(plain) or config.omit_defaults
            fields.append((name, plain, UNSET if is_optional else msgspec.NODEFAULT))
    return msgspec.defstruct(
        record.__name__,
        fields,
        module=record.__module__,
        tag_field=config.tag_field,
        tag=config.tag,
        kw_only=True,
        namespace={"__doc__": record.__doc__},
    )


def _plain(kind: Any) -> Any:
    """Replaces the records within a type by their descriptions."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return described(kind)
    origin, parts = get_origin(kind), tuple(map(_plain, get_args(kind)))
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, (part for part in parts if part not in LONG))
    return origin[parts] if origin in (list, dict, tuple) else kind
