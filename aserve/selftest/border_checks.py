"""Checks of errors, of load and disconnects, and of the endpoints beside chat and completions."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import time
from typing import Any

from aserve.selftest.target import (
    QUESTION,
    Json,
    Missing,
    Reply,
    Target,
    expect,
    message_of,
    text_of,
)

NUM_CLIENTS = 16
NUM_LEFT = 16  # streams that their clients leave
LONG = "The fox went to the lake, and the dog went to the house. " * 60


def _refused(reply: Reply, *statuses: int) -> str:
    """A status of the given ones, with a body in OpenAI's form."""
    expect(reply.status in (statuses or (400, 422)), f"status {reply.status}: {reply.text[:150]}")
    body = reply.json
    error = body.get("error") if isinstance(body, dict) else None
    expect(isinstance(error, dict) and error.get("message"), reply.text[:150])
    return f"{reply.status}: {message_of(reply)[:80]}"


async def _refuses(server: Target, **body: Any) -> str:
    given = {"model": server.model, **server.chat_body(**body)}
    return _refused(await server.ask("POST", "/v1/chat/completions", given))


async def refuses_broken_json(server: Target) -> str:
    headers = {"Content-Type": "application/json"}
    path = "/v1/chat/completions"
    return _refused(await server.ask("POST", path, data=b'{"messages": [', headers=headers))


async def refuses_a_chat_without_messages(server: Target) -> str:
    return _refused(await server.ask("POST", "/v1/chat/completions", {"model": server.model}))


async def refuses_messages_of_a_wrong_type(server: Target) -> str:
    return await _refuses(server, messages="hello")


async def refuses_a_temperature_of_99(server: Target) -> str:
    return await _refuses(server, temperature=99)


async def refuses_negative_max_tokens(server: Target) -> str:
    return await _refuses(server, max_tokens=-1)


async def refuses_n_of_0(server: Target) -> str:
    return await _refuses(server, n=0)


async def refuses_a_top_p_of_2(server: Target) -> str:
    return await _refuses(server, top_p=2)


async def refuses_a_broken_schema(server: Target) -> str:
    schema = {"name": "x", "schema": {"type": "no such type"}}
    return await _refuses(server, response_format={"type": "json_schema", "json_schema": schema})


async def refuses_a_stream_with_a_status(server: Target) -> str:
    return await _refuses(server, stream=True, temperature=99)


async def refuses_an_unknown_model(server: Target) -> str:
    body = server.chat_body(model="no-such-model")
    return _refused(await server.ask("POST", "/v1/chat/completions", body), 400, 404)


async def refuses_a_prompt_beyond_the_context(server: Target) -> str:
    """The prompt has at least twice the context's tokens, where the list of models names it."""
    models = (await server.get("/v1/models")).json["data"]
    lens = [model.get("max_model_len") or 0 for model in models]
    words = "fox " * 2 * (max(lens, default=0) or 100_000)
    return await _refuses(server, messages=[{"role": "user", "content": words}])


async def refuses_deep_json(server: Target) -> str:
    body = b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    headers = {"Content-Type": "application/json"}
    reply = await server.ask("POST", "/v1/chat/completions", data=body, headers=headers)
    return _refused(reply, 400, 413, 422)


async def answers_unknown_paths_with_404(server: Target) -> str:
    return _refused(await server.ask("GET", "/v1/no-such-path"), 404)


async def answers_many_at_once(server: Target) -> str:
    alone = text_of(await server.chat())
    answers = await asyncio.gather(*(server.chat() for _ in range(NUM_CLIENTS)))
    texts = [text_of(answer) for answer in answers]
    expect(all(texts), texts)
    num_same = sum(text == alone for text in texts)
    return f"{NUM_CLIENTS} answers, {num_same} of them as alone"


async def frees_what_clients_leave(server: Target) -> str:
    """Abandoned streams of long answers must not delay the next client."""
    began_s = time.monotonic()
    await server.chat(max_tokens=8)
    alone_s = time.monotonic() - began_s
    await asyncio.gather(*(_leave(server) for _ in range(NUM_LEFT)))
    began_s = time.monotonic()
    await server.chat(max_tokens=8)
    after_s = time.monotonic() - began_s
    seen = f"{after_s:.2f} s after {NUM_LEFT} abandoned streams, {alone_s:.2f} s before"
    expect(after_s < 3 * alone_s + 1, seen)
    return seen


async def _leave(server: Target) -> None:
    body = server.chat_body(max_tokens=1000, stream=True, ignore_eos=True)
    async with server.opened("/v1/chat/completions", body) as answer:
        if answer.status in (400, 422):
            raise Missing("ignore_eos is refused, so no stream is long enough")
        await answer.content.readline()


async def answers_a_long_prompt(server: Target) -> str:
    usage = (await server.chat(messages=[{"role": "user", "content": LONG}], max_tokens=4))["usage"]
    expect(usage["prompt_tokens"] > 500, usage)
    return f"{usage['prompt_tokens']} prompt tokens"


async def finds_a_prompt_in_its_cache(server: Target) -> str:
    messages = [{"role": "user", "content": "Again: " + LONG}]
    await server.chat(messages=messages, max_tokens=1)
    usage = (await server.chat(messages=messages, max_tokens=1))["usage"]
    details = usage.get("prompt_tokens_details") or {}
    if "cached_tokens" not in details:
        raise Missing("usage has no cached_tokens")
    expect(details["cached_tokens"] > 200, usage)
    return f"{details['cached_tokens']} of {usage['prompt_tokens']} tokens"


async def lists_models(server: Target) -> str:
    listed = (await server.get("/v1/models")).json
    expect(listed["object"] == "list" and listed["data"], listed)
    expect(server.model in [model["id"] for model in listed["data"]], listed)
    return server.model


async def shows_one_model(server: Target) -> str:
    model = (await server.get(f"/v1/models/{server.model}")).json
    expect(model["id"] == server.model and model["object"] == "model", model)
    return str(model["id"])


async def tells_its_health(server: Target) -> str:
    return (await server.get("/health")).text[:40] or "200"


async def has_metrics(server: Target) -> str:
    text = (await server.get("/metrics")).text
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    expect(len(names) > 3, text[:100])
    return f"{len(names)} metrics"


async def describes_its_api(server: Target) -> str:
    paths = (await server.get("/openapi.json")).json["paths"]
    schema = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    expect(schema["application/json"].get("schema"), "the answer of a chat has no schema")
    return f"{len(paths)} paths"


async def tokenizes_and_back(server: Target) -> str:
    text = "A fox, naïve 한국어 🦊"
    body = {"prompt": text, "add_special_tokens": False}
    tokens = (await server.post("/tokenize", body)).json["tokens"]
    back = (await server.post("/detokenize", {"tokens": tokens})).json["prompt"]
    expect(back == text, f"{back!r} is not {text!r}")
    return f"{len(tokens)} tokens"


async def embeds_texts(server: Target) -> str:
    texts = ["a fox", "a dog", "a fox"]
    answer = (await server.post("/v1/embeddings", {"input": texts})).json
    vectors = [each["embedding"] for each in answer["data"]]
    expect([each["index"] for each in answer["data"]] == [0, 1, 2], answer["usage"])
    distance = max(abs(a - b) for a, b in zip(vectors[0], vectors[2], strict=True))
    expect(distance < 1e-3 and vectors[0] != vectors[1], distance)
    return f"{len(vectors[0])} dimensions"


async def embeds_in_base64(server: Target) -> str:
    body: Json = {"input": "a fox"}
    floats = (await server.post("/v1/embeddings", body)).json["data"][0]["embedding"]
    body |= {"encoding_format": "base64"}
    encoded = (await server.post("/v1/embeddings", body)).json["data"][0]["embedding"]
    expect(isinstance(encoded, str), "a list of floats")
    data = base64.b64decode(encoded)
    values = struct.unpack(f"<{len(data) // 4}f", data)
    expect(len(values) == len(floats), f"{len(values)} values, {len(floats)} floats")
    return f"{len(values)} values"


RESPONSE: Json = {"input": QUESTION[0]["content"], "max_output_tokens": 24, "temperature": 0}


def _output_text(response: Json) -> str:
    parts = [part for item in response["output"] for part in item.get("content") or []]
    return "".join(part.get("text", "") for part in parts if part["type"] == "output_text")


async def creates_a_response(server: Target) -> str:
    response = (await server.post("/v1/responses", RESPONSE)).json
    expect(response["object"] == "response", response)
    expect(response["status"] in ("completed", "incomplete"), response["status"])
    usage = response["usage"]
    total = usage["input_tokens"] + usage["output_tokens"]
    expect(total == usage["total_tokens"], usage)
    return f"{response['status']}, {usage['output_tokens']} tokens"


async def streams_a_response(server: Target) -> str:
    events = (await server.post("/v1/responses", RESPONSE | {"stream": True})).events
    kinds = [event["type"] for event in events]
    expect(kinds[0] == "response.created", kinds[:2])
    expect(kinds[-1] in ("response.completed", "response.incomplete"), kinds[-2:])
    numbers = [event["sequence_number"] for event in events]
    expect(numbers == sorted(set(numbers)), numbers)
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    whole = _output_text(events[-1]["response"])
    expect("".join(deltas) == whole, f"{''.join(deltas)!r} is not {whole!r}")
    return f"{len(events)} events"


async def goes_on_from_a_response(server: Target) -> str:
    first = (await server.post("/v1/responses", RESPONSE | {"store": True})).json
    body = RESPONSE | {"input": "Go on.", "previous_response_id": first["id"]}
    second = (await server.post("/v1/responses", body)).json
    tokens = [each["usage"]["input_tokens"] for each in (first, second)]
    expect(tokens[1] > tokens[0], tokens)
    return f"{tokens[0]}, then {tokens[1]} input tokens"


async def answers_over_a_websocket(server: Target) -> str:
    body = {"type": "response.create", "model": server.model, **RESPONSE}
    async with server.websocket("/v1/responses") as socket:
        await socket.send_str(json.dumps(body))
        kinds: list[str] = []
        while not kinds or kinds[-1] not in ("response.completed", "response.incomplete"):
            kinds.append(json.loads(await socket.receive_str(timeout=60))["type"])
            expect("error" not in kinds and "response.failed" not in kinds, kinds)
    return f"{len(kinds)} messages"


MESSAGE: Json = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}


async def answers_messages(server: Target) -> str:
    answer = (await server.post("/v1/messages", MESSAGE)).json
    expect(answer["type"] == "message" and answer["role"] == "assistant", answer)
    expect(answer["usage"]["output_tokens"] > 0, answer["usage"])
    return str(answer["stop_reason"])


async def streams_messages(server: Target) -> str:
    events = (await server.post("/v1/messages", MESSAGE | {"stream": True})).events
    kinds = [event["type"] for event in events]
    expect(kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds)
    return f"{len(kinds)} events"


async def keeps_files(server: Target) -> str:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    body = line | {"body": {"model": server.model, **server.chat_body()}}
    made = _multipart(json.dumps(body).encode() + b"\n")
    reply = await server.ask("POST", "/v1/files", data=made[1], headers=made[0])
    if reply.status in (404, 405, 501):
        raise Missing(f"status {reply.status}")
    expect(reply.status == 200, reply.text[:200])
    content = await server.get(f"/v1/files/{reply.json['id']}/content")
    expect(content.text.strip() == json.dumps(body), content.text[:100])
    return str(reply.json["id"])


def _multipart(data: bytes) -> tuple[dict[str, str], bytes]:
    """The headers and the body of an upload for a batch."""
    mark = b"--selftest"
    purpose = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'Content-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
    body = b"\r\n".join((mark, purpose + mark, file + data, mark + b"--", b""))
    return {"Content-Type": "multipart/form-data; boundary=selftest"}, body
