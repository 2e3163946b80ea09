"""Schemathesis against a server: `python schemathesis_client.py ADDRESS MODEL [CASES]`.

It makes requests from /openapi.json, right and wrong ones. Each must get an answer that the
document allows, and never one of 500; afterwards the engine holds nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

CASES = 3_000
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    "response_schema_conformance",
)
HELD = ("requests_in_flight", "sequences_running", "sequences_waiting")
FREE_S = 60.0


def main(address: str, _: str, cases: int = CASES) -> None:
    with urllib.request.urlopen(f"{address}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    num_operations = sum(map(len, paths.values()))
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{address}/openapi.json"),
        *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--mode", "all"),
        *("--max-examples", str(-(-cases // num_operations)), "--no-shrink", "--no-color"),
        *("--generation-database", "none", "--suppress-health-check", "all"),
        *("--continue-on-failure", "--warnings", "off", "--request-timeout", "60"),
        *("--exclude-path-regex", "^/(live|ui/.*|metrics|docs|favicon.ico)$"),
    ]
    subprocess.run(command, check=True)
    _wait_until_free(address)


def _wait_until_free(address: str) -> None:
    """Raises unless no request and no page is held soon. Pages of the prefix cache are not held."""
    deadline_s = time.monotonic() + FREE_S
    while True:
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        held = [
            line
            for line in lines
            if line.startswith(tuple(f"aserve_{name}" for name in HELD)) and float(line.split()[-1])
        ]
        if not held:
            return
        assert time.monotonic() < deadline_s, held
        time.sleep(0.5)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
