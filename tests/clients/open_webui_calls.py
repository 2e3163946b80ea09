"""The calls of Open WebUI's server to an OpenAI connection and to an Ollama connection, as its
routers `openai.py` and `ollama.py` make them. Open WebUI itself is not run.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

SAID = "27 plus 15 is 42."
QUESTION = {"role": "user", "content": "What is 27 plus 15?"}
# Its headers with ENABLE_FORWARD_USER_INFO_HEADERS.
HEADERS = {
    "Authorization": "Bearer none",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "A%20User",
    "X-OpenWebUI-User-Id": "6f1c",
    "X-OpenWebUI-User-Email": "user%40example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "b7d2",
}


def main(address: str, model: str) -> None:
    def call(path: str, body: dict[str, Any] | None = None) -> list[str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address + path, data=data, headers=HEADERS)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [line.decode().strip() for line in answer if line.strip()]

    def read(path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads("\n".join(call(path, body)))

    assert [each["id"] for each in read("/v1/models")["data"]] == [model]
    chat = {"model": model, "messages": [QUESTION], "temperature": 0}
    asked = {"stream_options": {"include_usage": True}, "params": {}, "files": None, "user": {}}
    lines = call("/v1/chat/completions", {**chat, "stream": True, **asked})
    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[0] != ":"]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == SAID
    assert "42" in "".join(delta.get("reasoning_content") or "" for delta in deltas)
    assert events[-1]["usage"]["completion_tokens"] > 0
    title = read("/v1/chat/completions", {**chat, "stream": False, "max_completion_tokens": 1000})
    assert title["choices"][0]["message"]["content"] == SAID

    assert read("/api/version")["version"]
    (tag,) = read("/api/tags")["models"]
    assert tag["model"] == tag["name"] == f"{model}:latest"
    assert isinstance(read("/api/ps")["models"], list)
    assert "completion" in read("/api/show", {"model": tag["model"]})["capabilities"]
    options = {"temperature": 0, "num_ctx": 1024, "num_predict": 128}
    body = {"model": tag["model"], "messages": [QUESTION], "options": options, "keep_alive": "5m"}
    parts = [json.loads(line) for line in call("/api/chat", {**body, "stream": True})]
    assert "".join(part["message"]["content"] for part in parts) == SAID
    assert parts[-1]["done"]
    assert parts[-1]["eval_count"] > 0
    vectors = read("/api/embed", {"model": tag["model"], "input": ["one", "two"], "truncate": True})
    assert [len(vector) for vector in vectors["embeddings"]] == [128, 128]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
