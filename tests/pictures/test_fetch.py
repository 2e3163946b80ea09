"""Pictures from named domains: what is fetched, and what a server must not be made to reach."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from aserve.actors.tokenizer import LONG_TEXT, TokenizerActor
from aserve.channel import Channel
from aserve.errors import ClientError, ConfigError
from aserve.http.tokenize_service import TokenizeService
from aserve.messages.base import array_i32
from aserve.messages.output import DetokenizerEvent, Refused
from aserve.messages.requests import (
    AdmitRequest,
    Cancel,
    ChatPrompt,
    EngineEvent,
    GenerateRequest,
    Prompt,
    SamplingParams,
    TextPrompt,
)
from aserve.picture import PictureSource
from aserve.pictures.fetch import MAX_REQUESTS, MediaFetcher, PublicResolver, is_public
from aserve.pictures.reader import MAX_PICTURES, PictureReader
from aserve.pictures.source import MAX_BYTES, MediaDomains, is_remote
from aserve.text.lengths import PromptLimits
from aserve.text.prompt import PromptEncoder
from aserve.text.template import ChatTemplate
from tests.actors.alone import alone, received
from tests.pictures.test_reader import SMALL, TOKEN, settings_of
from tests.text.vocabularies import byte_level_tokenizer

HOST = "pictures.test"
PNG = base64.b64decode(SMALL.partition(",")[2])
DOMAINS = MediaDomains.parse(f"{HOST}, other.test")


class FixedResolver(AbstractResolver):
    """Every name has these addresses. It counts how often it was asked."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.num_asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.num_asked += 1
        return [
            ResolveResult(hostname=host, host=a, port=port, family=family, proto=0, flags=0)
            for a in self.addresses
        ]

    async def close(self) -> None:
        pass


class PictureHost:
    """A server of pictures on this machine, under a name that only `resolver` knows."""

    def __init__(self) -> None:
        self.resolver = FixedResolver("127.0.0.1")
        self.asked: list[str] = []
        self.gate, self._changed = asyncio.Event(), asyncio.Event()
        self.num_open = self.most_open = 0
        self.port = 0

    def url(self, path: str, host: str = HOST) -> str:
        return f"http://{host}:{self.port}/{path}"

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.asked.append(request.path)
        assert "Cookie" not in request.headers
        match request.path[1:]:
            case "redirect":
                raise web.HTTPFound(self.url("png"))
            case "missing":
                raise web.HTTPNotFound()
            case "empty":
                return web.Response(body=b"", content_type="image/png")
            case "html":
                return web.Response(body=PNG, content_type="text/html")
            case "gzip":
                headers = {"Content-Encoding": "gzip", "Content-Type": "image/png"}
                return web.Response(body=PNG, headers=headers)
            case "announced":
                headers = {"Content-Length": str(MAX_BYTES + 1), "Content-Type": "image/png"}
                answer = web.StreamResponse(headers=headers)
                await answer.prepare(request)
                return answer
            case "endless":
                return await self._endless(request)
            case "slow":
                return await self._slow()
            case "cut":
                answer = web.StreamResponse(headers={"Content-Type": "image/png"})
                answer.content_length = 100
                await answer.prepare(request)
                assert request.transport is not None
                request.transport.abort()
                return answer
        answer = web.Response(body=PNG, content_type="image/png")
        answer.set_cookie("seen", "before")
        return answer

    async def changed(self) -> None:
        """Returns when another connection waits, or one is closed."""
        self._changed.clear()
        await self._changed.wait()

    def _count(self, change: int) -> None:
        self.num_open += change
        self.most_open = max(self.most_open, self.num_open)
        self._changed.set()

    async def _endless(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "image/png"})
        await answer.prepare(request)
        while True:
            await answer.write(bytes(1 << 20))

    async def _slow(self) -> web.Response:
        self._count(1)
        try:
            await self.gate.wait()
        finally:
            self._count(-1)
        return web.Response(body=PNG, content_type="image/png")


@asynccontextmanager
async def hosted(timeout_s: float = 10) -> AsyncIterator[tuple[PictureHost, MediaFetcher]]:
    host = PictureHost()
    runner = web.ServerRunner(
        web.Server(host.answer, handler_cancellation=True), shutdown_timeout=0.1
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host.port = runner.addresses[0][1]
    reader = PictureReader(settings_of(), DOMAINS)
    fetcher = MediaFetcher(reader, resolver=host.resolver, timeout_s=timeout_s)
    try:
        yield host, fetcher
    finally:
        await fetcher.close()
        host.gate.set()
        await runner.cleanup()


def prompt_of(*urls: str) -> ChatPrompt:
    sources = (PictureSource(url, f"messages[{i}]", "image_url") for i, url in enumerate(urls))
    return ChatPrompt(b"[]", pictures=tuple(sources))


async def fetched(fetcher: MediaFetcher, *urls: str) -> list[PictureSource]:
    async with fetcher.fetched(prompt_of(*urls)) as prompt:
        assert isinstance(prompt, ChatPrompt)
        return list(prompt.pictures)


async def test_pictures_of_named_domains_are_fetched_in_their_order() -> None:
    async with hosted() as (host, fetcher):
        named = await fetched(fetcher, host.url("a.png"), SMALL, host.url("b", "OTHER.test"))
    assert [p.data for p in named] == [PNG, b"", PNG]
    assert [p.param for p in named] == ["messages[0]", "messages[1]", "messages[2]"]
    assert (named[1].url, sorted(host.asked)) == (SMALL, ["/a.png", "/b"])
    assert not any(map(is_remote, named))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("redirect", r"its host redirects \(302\)"),
        ("missing", "answered with status 404"),
        ("empty", "its file is empty"),
        ("html", "its content type is 'text/html'; expected image"),
        ("gzip", "its content encoding is 'gzip'"),
        ("announced", f"more than {MAX_BYTES} bytes"),
        ("endless", f"more than {MAX_BYTES} bytes"),
        ("slow", r"not fetched within 0\.2 seconds"),
        ("cut", r"could not be fetched from 'pictures\.test'"),
    ],
)
async def test_answers_that_are_no_picture_or_too_much_are_refused(path: str, message: str) -> None:
    timeout_s = 0.2 if path == "slow" else 30
    async with hosted(timeout_s) as (host, fetcher):
        with pytest.raises(ClientError, match=message) as caught:
            await fetched(fetcher, host.url("png"), host.url(path))
        assert (caught.value.info().status, caught.value.info().code) == (400, "invalid_image")
        assert host.asked.count("/png") == 1, "a redirect is not followed"
        assert await fetched(fetcher, host.url("png")), "the next one finds its slot free"


async def test_the_pictures_of_a_request_have_a_bound_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aserve.pictures.fetch.MAX_REQUEST_BYTES", 2 * len(PNG))
    async with hosted() as (host, fetcher):
        assert len(await fetched(fetcher, *[host.url("png")] * 2)) == 2
        with pytest.raises(ClientError, match="the pictures of the request have more than"):
            await fetched(fetcher, *[host.url("png")] * 3)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:{port}/png", "is not a domain that this server fetches from"),
        ("http://[::ffff:127.0.0.1]:{port}/png", "is not a domain"),
        ("http://2130706433:{port}/png", "is not a domain"),
        ("http://0x7f.1:{port}/png", "is not a domain"),
        ("http://localhost:{port}/png", "is not a domain"),
        ("http://evilpictures.test:{port}/png", "is not a domain"),
        ("http://a.pictures.test:{port}/png", "is not a domain"),
        ("http://pictures.test.evil.example:{port}/png", "is not a domain"),
        (
            "http://evil.example\\@pictures.test:{port}/png",
            "is not a domain|is not a URL|has a user",
        ),
        ("http://evil.example#@pictures.test:{port}/png", "is not a domain"),
        ("http://pictures.test@evil.example:{port}/png", "has a user or a password"),
        ("http://user:word@pictures.test:{port}/png", "has a user or a password"),
        ("http://pictures.test:99999/png", "its URL is not a URL"),
        ("http://[::1/png", "its URL is not a URL"),
        ("file:///etc/passwd", "must begin with data:, http"),
        ("gopher://pictures.test:{port}/png", "must begin with data:, http"),
        ("//pictures.test:{port}/png", "must begin with data:, http"),
        ("png", "must begin with data:, http"),
    ],
)
async def test_urls_of_other_hosts_are_refused_before_anything_is_asked(
    url: str, message: str
) -> None:
    async with hosted() as (host, fetcher):
        with pytest.raises(ClientError, match=message):
            await fetched(fetcher, url.format(port=host.port))
        assert (host.resolver.num_asked, host.asked) == (0, [])


PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
    *("100.64.0.1", "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "fd00:ec2::254", "64:ff9b:1::1", "no address"),
]


@pytest.mark.parametrize("address", PRIVATE)
async def test_a_named_domain_with_a_private_address_is_not_connected_to(address: str) -> None:
    assert not is_public(address)
    async with hosted() as (host, _):
        host.resolver.addresses = (address,)
        guarded = MediaFetcher(
            PictureReader(settings_of(), DOMAINS), resolver=PublicResolver(host.resolver)
        )
        with pytest.raises(ClientError, match=r"its host 'pictures\.test' has no public address"):
            await fetched(guarded, host.url("png"))
        await guarded.close()
        assert host.asked == []


async def test_public_addresses_of_a_name_are_kept_and_its_others_are_not() -> None:
    public = ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
    resolver = PublicResolver(FixedResolver(*PRIVATE[:3], *public, *PRIVATE[-3:]))
    assert [found["host"] for found in await resolver.resolve(HOST)] == public


def test_fetching_uses_the_guarded_resolver_and_no_proxy_unless_a_test_says_otherwise() -> None:
    async def session() -> tuple[Any, Any]:
        fetcher = MediaFetcher(PictureReader(settings_of(), DOMAINS))
        opened = fetcher._opened()
        connector: Any = opened.connector
        await fetcher.close()
        return connector._resolver, opened

    resolver, opened = asyncio.run(session())
    assert isinstance(resolver, PublicResolver)
    assert not opened.trust_env


@pytest.mark.parametrize(
    "given", ["127.0.0.1", "::1", "http://a.org", "a.org:80", "a.org/x", "a b", "*"]
)
def test_an_option_that_names_no_host_ends_the_start(given: str) -> None:
    with pytest.raises(ConfigError, match="--allow-media-domains names"):
        MediaDomains.parse(f"good.org,{given}")


def test_domains_are_read_without_case_and_none_is_the_default() -> None:
    names = MediaDomains.parse(" A.org ,b.org,xn--bcher-kva.example").names
    assert names == ("a.org", "b.org", "bücher.example")
    assert MediaDomains.parse(None).names == ()


class Bench:
    """The tokenizer actor and the service of /tokenize, whose pictures come from a host."""

    def __init__(self, fetcher: MediaFetcher) -> None:
        tokenizer = byte_level_tokenizer()
        self.encoder = PromptEncoder(
            tokenizer,
            template=ChatTemplate(tokenizer.decode([TOKEN], skip_special=False)),
            limits=PromptLimits(max_model_len=5000, vocab_size=tokenizer.vocab_size),
            pictures=fetcher._reader,
        )
        self.text: Channel[DetokenizerEvent] = Channel()
        self.engine: Channel[EngineEvent] = Channel()
        self.actor = TokenizerActor(
            self.encoder, detokenizer=self.text, engine=self.engine, media=fetcher
        )
        self.service = TokenizeService()
        self.service.open(self.encoder, fetcher)

    def send(self, name: str, prompt: Prompt, *, timeout_s: float | None = None) -> None:
        sampling = SamplingParams(seed=1)
        self.actor.inbox.send(GenerateRequest(name, prompt, sampling, timeout_s=timeout_s))

    async def admitted(self) -> AdmitRequest:
        (event,) = await received(self.engine)
        assert isinstance(event, AdmitRequest)
        return event

    async def refused(self) -> tuple[str, str]:
        (event,) = await received(self.text)
        assert isinstance(event, Refused)
        return event.request_id, event.error.code


@asynccontextmanager
async def served(timeout_s: float = 10) -> AsyncIterator[tuple[PictureHost, Bench]]:
    async with hosted(timeout_s) as (host, fetcher):
        bench = Bench(fetcher)
        async with alone(bench.actor):
            yield host, bench
        bench.service.close()


async def test_a_fetched_picture_is_that_of_a_data_url_in_requests_and_in_counts() -> None:
    async with served() as (host, bench):
        answers = []
        for url in (SMALL, host.url("png")):
            bench.send("r", prompt_of(url))
            request = await bench.admitted()
            count = await bench.service.count(prompt_of(url))
            answers.append((request.pictures, request.prompt_ids, count))
        assert answers[0] == answers[1]
        assert answers[0][2] == len(array_i32(answers[0][1])) > 1


async def test_a_slow_host_delays_nobody_else_and_ends_with_its_request() -> None:
    """A cancel or a timeout closes the connection. More requests wait than fetch at once."""
    async with served() as (host, bench):
        for number in range(MAX_REQUESTS + 2):
            bench.send(f"r{number}", prompt_of(host.url("slow")))
        bench.send("long", TextPrompt("hello " * LONG_TEXT))
        assert (await bench.admitted()).request_id == "long"
        await received(bench.text)
        bench.send("late", prompt_of(host.url("slow")), timeout_s=0.01)
        assert await bench.refused() == ("late", "deadline_exceeded")
        while host.num_open < MAX_REQUESTS:
            await host.changed()
        for number in range(MAX_REQUESTS + 1):
            bench.actor.inbox.send(Cancel(f"r{number}", None, 0, "cancelled"))
            assert await bench.refused() == (f"r{number}", "request_cancelled")
        while host.num_open != 1:
            await host.changed()
        host.gate.set()
        assert (await bench.admitted()).request_id == f"r{MAX_REQUESTS + 1}"
        assert host.most_open == MAX_REQUESTS


async def test_what_cannot_be_fetched_ends_its_request_alone() -> None:
    async with served() as (host, bench):
        bench.send("bad", prompt_of(host.url("missing")))
        assert await bench.refused() == ("bad", "invalid_image")
        with pytest.raises(ClientError, match="status 404"):
            await bench.service.count(prompt_of(host.url("missing")))
        host.asked.clear()
        with pytest.raises(ClientError, match="at most 16 are allowed"):
            await bench.service.count(prompt_of(*[host.url("png")] * (MAX_PICTURES + 1)))
        assert host.asked == []
        bench.send("good", prompt_of(host.url("png")))
        assert (await bench.admitted()).request_id == "good"
