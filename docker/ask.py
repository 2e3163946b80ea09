"""Asks a server that starts, for docker/check.sh: `ask.py URL STARTED MAX_START_S`."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import OpenAI

GIVE_UP_S = 120.0
QUESTION = {"model": "aserve-tiny", "prompt": "27+15=", "max_tokens": 2, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def main(url: str, started_s: float, max_start_s: float) -> int:
    answer = first_answer(url, started_s)
    took_s = time.time() - started_s
    say(f"first answer: {answer!r}, {took_s:.1f} s after the start")

    from openai import OpenAI  # its import would be part of the time

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    say(f"streamed: {streamed(client)!r}")
    say(f"structured: {structured(client)!r}")
    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(lambda _: completed(client), range(32)))
    say(f"32 requests at once: {answers}")
    return 0 if answers == {answer} and took_s <= max_start_s else 1


def first_answer(url: str, started_s: float) -> str:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(QUESTION).encode(),
        headers={"Content-Type": "application/json"},
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=GIVE_UP_S) as answer:
                text: str = json.load(answer)["choices"][0]["text"]
                return text
        except OSError:
            if time.time() - started_s > GIVE_UP_S:
                raise
            time.sleep(0.02)


def completed(client: OpenAI) -> str:
    done = client.completions.create(
        model="aserve-tiny", prompt="27+15=", max_tokens=2, temperature=0
    )
    return done.choices[0].text


def streamed(client: OpenAI) -> str:
    chunks = client.chat.completions.create(
        model="aserve-tiny",
        messages=[{"role": "user", "content": "What is 27 plus 15?"}],
        temperature=0,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def structured(client: OpenAI) -> str:
    done = client.chat.completions.create(
        model="aserve-tiny",
        messages=[{"role": "user", "content": "Return JSON for Sam."}],
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA},
        },
    )
    return done.choices[0].message.content or ""


def say(line: str) -> None:
    sys.stdout.write(f"          {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
