"""promtool, the linter of Prometheus, reads /metrics of a server that works. The names of other
servers (`--metrics-compat`) have colons, which it does not like; everything else is in order.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

ACCEPTED = "metric names should not contain ':'"


def main(address: str, model: str) -> None:
    body = {"model": model, "prompt": "Once", "n": 2, "max_tokens": 200, "stream": True}
    data = json.dumps(body | {"ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"{address}/v1/completions", data=data, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        stream.readline()
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
            metrics: bytes = answer.read()
    assert b"\naserve_requests_in_flight 1.0\n" in metrics
    ran = subprocess.run(["promtool", "check", "metrics"], input=metrics, capture_output=True)
    complaints = (ran.stdout + ran.stderr).decode().splitlines()
    assert complaints, "the names of vLLM were asked for"
    for line in complaints:
        name, _, complaint = line.partition(" ")
        assert (name.partition(":")[0], complaint) == ("vllm", ACCEPTED), line


if __name__ == "__main__":
    main(*sys.argv[1:])
