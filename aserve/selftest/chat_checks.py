"""Checks of chat completions and of completions: answers, streams, usage, stops, sampling."""

from __future__ import annotations

import math

from aserve.selftest.target import QUESTION, Target, expect, streamed_text, text_of


async def answers_a_chat(server: Target) -> str:
    answer = await server.chat()
    [choice] = answer["choices"]
    expect(answer["object"] == "chat.completion", answer)
    expect(choice["message"]["role"] == "assistant" and choice["index"] == 0, choice)
    expect(choice["finish_reason"] in ("stop", "length"), choice["finish_reason"])
    expect(isinstance(answer["id"], str) and isinstance(answer["created"], int), answer)
    return f"{len(text_of(answer))} characters"


async def counts_tokens(server: Target) -> str:
    usage = (await server.chat(max_tokens=5))["usage"]
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    expect(total == usage["total_tokens"] and usage["prompt_tokens"] > 0, usage)
    expect(0 < usage["completion_tokens"] <= 5, usage)
    return f"{usage['prompt_tokens']} + {usage['completion_tokens']}"


async def stops_at_max_tokens(server: Target) -> str:
    answer = await server.chat(max_tokens=2)
    expect(answer["choices"][0]["finish_reason"] == "length", answer["choices"][0])
    expect(answer["usage"]["completion_tokens"] == 2, answer["usage"])
    return "2 tokens, length"


async def knows_max_completion_tokens(server: Target) -> str:
    answer = await server.chat(max_tokens=None, max_completion_tokens=3)
    expect(answer["usage"]["completion_tokens"] <= 3, answer["usage"])
    return str(answer["usage"]["completion_tokens"])


async def reads_content_parts(server: Target) -> str:
    parts = [{"type": "text", "text": QUESTION[0]["content"]}]
    answer = await server.chat(messages=[{"role": "user", "content": parts}])
    expect(text_of(answer) == text_of(await server.chat()), text_of(answer))
    return "the answer to the same text"


async def reads_a_conversation(server: Target) -> str:
    more = [{"role": "assistant", "content": "Once there was a fox."}]
    messages = [*QUESTION, *more, {"role": "user", "content": "Go on."}]
    long = (await server.chat(messages=messages))["usage"]["prompt_tokens"]
    short = (await server.chat())["usage"]["prompt_tokens"]
    expect(long > short, f"{long} prompt tokens, {short} for the first message alone")
    return f"{long} prompt tokens"


async def streams_the_same_text(server: Target) -> str:
    reply = await server.post("/v1/chat/completions", server.chat_body(stream=True))
    whole = text_of(await server.chat())
    events = reply.events
    expect(streamed_text(events) == whole, f"{streamed_text(events)!r} is not {whole!r}")
    expect(all(event["object"] == "chat.completion.chunk" for event in events), events[0])
    expect(reply.text.rstrip().endswith("data: [DONE]"), reply.text[-60:])
    return f"{len(events)} events"


async def ends_a_stream_once(server: Target) -> str:
    choices = [choice for event in await server.chat_events() for choice in event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    expect(len(reasons) == 1 and choices[-1].get("finish_reason"), reasons)
    expect(choices[0]["delta"].get("role") == "assistant", choices[0])
    return str(reasons[0])


async def streams_usage(server: Target) -> str:
    events = await server.chat_events(stream_options={"include_usage": True})
    whole = (await server.chat())["usage"]
    last = events[-1]
    expect(last["choices"] == [] and last.get("usage"), last)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        expect(last["usage"][name] == whole[name], f"{name}: {last['usage'][name]}, {whole[name]}")
    return f"{whole['total_tokens']} tokens"


async def gives_several_choices(server: Target) -> str:
    answer = await server.chat(n=3, temperature=1, max_tokens=8)
    indices = [choice["index"] for choice in answer["choices"]]
    expect(indices == [0, 1, 2], indices)
    return "3 choices"


async def _stop_of(server: Target) -> tuple[str, str]:
    """A text and a stop string from its middle."""
    text = text_of(await server.chat())
    middle = text[len(text) // 2 :][:4]
    expect(len(middle) == 4, f"the model's answer is too short for this check: {text!r}")
    return text, middle


async def stops_before_a_stop_string(server: Target) -> str:
    text, stop = await _stop_of(server)
    [choice] = (await server.chat(stop=[stop, "never seen"]))["choices"]
    kept = choice["message"].get("content") or ""
    expect(kept == text.partition(stop)[0], f"{kept!r} of {text!r} with stop {stop!r}")
    expect(choice["finish_reason"] == "stop", choice["finish_reason"])
    return repr(stop)


async def never_streams_a_stop_string(server: Target) -> str:
    text, stop = await _stop_of(server)
    streamed = streamed_text(await server.chat_events(stop=stop))
    expect(streamed == text.partition(stop)[0], f"{streamed!r} of {text!r} with stop {stop!r}")
    return repr(stop)


async def is_greedy_at_temperature_0(server: Target) -> str:
    texts = {text_of(await server.chat()) for _ in range(3)}
    expect(len(texts) == 1, texts)
    return "3 equal answers"


async def repeats_a_seed(server: Target) -> str:
    texts = [text_of(await server.chat(seed=11, temperature=1)) for _ in range(3)]
    expect(len(set(texts)) == 1, texts)
    return "3 equal answers"


async def samples_with_other_seeds(server: Target) -> str:
    texts = {text_of(await server.chat(seed=seed, temperature=1.5)) for seed in range(4)}
    expect(len(texts) > 1, texts)
    return f"{len(texts)} answers of 4 seeds"


async def takes_a_tiny_top_p_for_greedy(server: Target) -> str:
    greedy = text_of(await server.chat())
    found = text_of(await server.chat(temperature=1, top_p=1e-6, seed=3))
    expect(found == greedy, f"{found!r} is not {greedy!r}")
    return "the greedy answer"


async def takes_top_k_1_for_greedy(server: Target) -> str:
    greedy = text_of(await server.chat())
    found = text_of(await server.chat(temperature=1, top_k=1, seed=3))
    expect(found == greedy, f"{found!r} is not {greedy!r}")
    return "the greedy answer"


async def applies_a_logit_bias(server: Target) -> str:
    texts = [
        (await server.complete(logit_bias={str(token): 100}, max_tokens=4))["choices"][0]["text"]
        for token in (300, 301)
    ]
    expect(texts[0] != texts[1], f"{texts} with a bias of 100 for two tokens")
    return str(texts)


async def applies_penalties(server: Target) -> str:
    body = {"max_tokens": 60}
    plain = text_of(await server.chat(**body))
    punished = text_of(await server.chat(**body, frequency_penalty=2, presence_penalty=2))
    expect(plain != punished, "the same text as without penalties")
    return "another text"


async def gives_logprobs(server: Target) -> str:
    answer = await server.chat(logprobs=True, top_logprobs=3)
    entries = answer["choices"][0]["logprobs"]["content"]
    expect(abs(len(entries) - answer["usage"]["completion_tokens"]) <= 1, len(entries))
    for entry in entries:
        top = [each["logprob"] for each in entry["top_logprobs"]]
        expect(len(top) == 3 and top == sorted(top, reverse=True), entry)
        expect(entry["logprob"] <= 1e-6 and math.isfinite(entry["logprob"]), entry)
        expect(abs(entry["logprob"] - top[0]) < 1e-3, f"not the greedy token: {entry}")
    return f"{len(entries)} tokens"


async def spells_the_text_in_logprobs(server: Target) -> str:
    answer = await server.chat(logprobs=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"] or ()) for entry in entries).decode(errors="replace")
    text = text_of(answer)
    expect(text.strip() and text.strip() in spelled, f"{spelled!r} does not have {text!r}")
    return "bytes of the text"


async def completes_a_text(server: Target) -> str:
    answer = await server.complete()
    [choice] = answer["choices"]
    expect(answer["object"] == "text_completion" and isinstance(choice["text"], str), answer)
    expect(choice["finish_reason"] in ("stop", "length"), choice)
    return repr(choice["text"][:24])


async def completes_a_list_of_texts(server: Target) -> str:
    both = (await server.complete(prompt=["Once upon a time", "The dog"]))["choices"]
    one = (await server.complete(prompt="The dog"))["choices"][0]["text"]
    expect([choice["index"] for choice in both] == [0, 1], both)
    expect(both[1]["text"] == one, f"{both[1]['text']!r} is not {one!r}")
    return "2 choices in order"


async def completes_token_ids(server: Target) -> str:
    answer = await server.complete(prompt=[300, 301, 302])
    expect(answer["usage"]["prompt_tokens"] == 3, answer["usage"])
    return "3 prompt tokens"


async def echoes_a_prompt(server: Target) -> str:
    prompt = "A fox 🦊 and a café"
    text = (await server.complete(prompt=prompt, echo=True, max_tokens=2))["choices"][0]["text"]
    expect(text.lstrip().startswith(prompt), text)
    return repr(text[:30])


async def streams_a_completion(server: Target) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    events = (await server.post("/v1/completions", body | {"stream": True})).events
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    whole = (await server.complete())["choices"][0]["text"]
    expect(text == whole, f"{text!r} is not {whole!r}")
    return f"{len(events)} events"


async def gives_logprobs_of_a_completion(server: Target) -> str:
    logprobs = (await server.complete(logprobs=2))["choices"][0]["logprobs"]
    sizes = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs")}
    expect(len(sizes) == 1, logprobs)
    expect(all(value <= 1e-6 for value in logprobs["token_logprobs"]), logprobs)
    return f"{len(logprobs['tokens'])} tokens"
