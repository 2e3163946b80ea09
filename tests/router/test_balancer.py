"""Which replica a request goes to, by policy, load, failures and what was cached; without I/O."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from aserve.config import RouterOptions
from aserve.router.balancer import MAX_RETRY_CREDIT, Balancer
from aserve.router.owners import id_in_path, ids_in
from aserve.router.policies import Demand
from aserve.router.prefixes import BLOCK_BYTES, PrefixIndex, block_digests
from aserve.router.request_facts import facts_of
from aserve.router.upstream import load_in

NAMES = ("a", "b", "c")
PLAIN = Demand()


def ready(policy: str = "cache_aware", **options: object) -> Balancer:
    balancer = Balancer(RouterOptions(policy=policy, **options), NAMES)  # type: ignore[arg-type]  # a table of options
    for name in NAMES:
        balancer.probed(name, load=None)
    return balancer


def sent(balancer: Balancer, demand: Demand = PLAIN) -> str:
    name = balancer.pick(demand)
    assert name is not None
    balancer.start(name, demand)
    return name


def prompt_of(letter: str, num_blocks: int) -> Demand:
    return Demand(block_digests(letter.encode() * BLOCK_BYTES * num_blocks))


@pytest.mark.parametrize("policy", ["least_load", "round_robin", "cache_aware"])
def test_requests_without_a_prefix_are_spread_evenly(policy: str) -> None:
    balancer = ready(policy)
    assert set(Counter(sent(balancer) for _ in range(30)).values()) == {10}


def test_load_that_a_replica_reports_beyond_our_requests_counts() -> None:
    balancer = ready("least_load")
    assert [sent(balancer) for _ in range(3)].count("a") == 1
    balancer.probed("a", load=5)
    balancer.probed("b", load=5)
    assert [sent(balancer) for _ in range(4)] == ["c"] * 4


def test_the_longest_cached_prefix_wins_until_loads_differ_too_much() -> None:
    balancer = ready(balance_abs_threshold=4, balance_rel_threshold=1.5)
    owner = sent(balancer, prompt_of("x", 8))
    chosen = [sent(balancer, prompt_of("x", 10)) for _ in range(8)]
    assert chosen[:4] == [owner] * 4
    assert owner not in chosen[4:6]
    known, matched = {owner: 8}, 0
    for name in chosen:
        matched += known.get(name, 0)
        known[name] = 10
    assert (balancer.hits.num_matched, balancer.hits.num_blocks) == (matched, 88)


@pytest.mark.parametrize(("shared", "is_kept"), [(2, False), (3, False), (4, True)])
def test_a_match_counts_only_above_the_cache_threshold(shared: int, is_kept: bool) -> None:
    balancer = ready(cache_threshold=0.3)
    first = sent(balancer, prompt_of("x", shared))
    mixed = b"x" * BLOCK_BYTES * shared + b"y" * BLOCK_BYTES * (10 - shared)
    assert (balancer.pick(Demand(block_digests(mixed))) == first) == is_kept


def test_routers_that_do_not_know_each_other_send_a_prefix_to_one_replica() -> None:
    """A replica that leaves moves its own prefixes alone."""
    first, second, fewer = ready(), ready(), Balancer(RouterOptions(), "ab")
    for name in "ab":
        fewer.probed(name, load=0)
    prompts = [Demand(block_digests(f"{number:<300}".encode() * 2)) for number in range(60)]
    homes = [first.pick(prompt) for prompt in prompts]
    assert [second.pick(prompt) for prompt in prompts] == homes
    assert min(Counter(homes).values()) > 10
    moved = [
        home for home, prompt in zip(homes, prompts, strict=True) if fewer.pick(prompt) != home
    ]
    assert set(moved) == {"c"}


def test_a_replica_that_others_have_filled_keeps_a_share_and_our_own_load_counts_whole() -> None:
    """All routers hear of it. If each of them left it out, it would have nothing to do."""
    first, second = ready(), ready()
    prompts = [Demand(block_digests(f"{number:<300}".encode() * 2)) for number in range(90)]
    own = [prompt for prompt in prompts if first.pick(prompt) == "a"]
    first.probed("a", load=8)
    kept = sum(first.pick(prompt) == "a" for prompt in own)
    assert 0.3 < kept / len(own) < 0.8, "of 8, its share is 1.25 times the mean, and 1"
    for _ in range(8):
        second.start("a", PLAIN)
    assert not any(second.pick(prompt) == "a" for prompt in own)
    for router in (first, second):
        assert {router.pick(prompt) for prompt in own} - {"a"} == {"b", "c"}


def test_equal_matches_are_asked_in_the_order_of_homes() -> None:
    """So routers that have sent a prefix to the same replicas, in any order, agree on one."""
    routers = ready(), ready()
    prompt = prompt_of("x", 8)
    for router, names in zip(routers, ("abc", "cba"), strict=True):
        for name in names:
            router.start(name, prompt)
            router.end(name)
    router = routers[0]
    router.probed("a", load=3)
    router.probed("b", load=1)
    assert len({each.pick(prompt) for each in (*routers, ready())}) == 1


def test_a_session_stays_and_a_leaving_replica_moves_only_its_own() -> None:
    balancer = ready("session")
    before = {key: balancer.pick(Demand(session=key)) for key in map(str, range(60))}
    assert set(before.values()) == set(NAMES)
    balancer.drain("b")
    for key, name in before.items():
        now = balancer.pick(Demand(session=key))
        assert now != "b" if name == "b" else now == name


def test_a_breaker_opens_after_failures_in_a_row_and_closes_with_a_probe() -> None:
    balancer = ready("round_robin", max_failures=3)
    for _ in range(5):
        balancer.failed("a")
        balancer.failed("a")
        balancer.succeeded("a")
    assert "a" in {balancer.pick(Demand()) for _ in NAMES}
    for _ in range(3):
        balancer.failed("a")
    balancer.succeeded("a")
    assert {balancer.pick(Demand()) for _ in NAMES} == {"b", "c"}
    balancer.failed("b", is_down=True)
    assert balancer.pick(Demand()) == "c"
    assert balancer.pick(Demand(), excluded=["c"]) is None
    balancer.probed("a", load=None)
    assert {balancer.pick(Demand()) for _ in NAMES} == {"a", "c"}


def test_a_removed_replica_leaves_with_its_last_request() -> None:
    balancer = ready("round_robin")
    balancer.start("a", Demand())
    balancer.remove("a")
    assert "a" not in {balancer.pick(Demand()) for _ in range(6)}
    assert balancer.pick(Demand(owner="a")) == "a"
    balancer.end("a")
    assert balancer.find("a") is None
    assert balancer.pick(Demand(owner="a")) is None
    assert balancer.add("a")
    assert balancer.pick(Demand(), excluded=["b", "c"]) is None  # until it was probed


def test_retries_are_bounded_per_request_and_in_all() -> None:
    balancer = ready(max_retries=2)
    assert [balancer.may_retry(tried) for tried in (1, 2, 3)] == [True, True, False]
    allowed = sum(balancer.may_retry(1) for _ in range(1000))
    assert allowed == MAX_RETRY_CREDIT - 2
    for _ in range(50):
        balancer.start("a", Demand())
    assert sum(balancer.may_retry(1) for _ in range(100)) == pytest.approx(10, abs=1)


def test_the_index_agrees_with_a_plain_list_of_prompts_and_stays_bounded() -> None:
    rng = random.Random(7)
    index = PrefixIndex(10_000)
    prompts: list[bytes] = []
    for _ in range(300):
        prompt = bytes(rng.choice(b"ab") for _ in range(rng.randrange(6)))
        blocks = block_digests(b"".join(bytes([each]) * BLOCK_BYTES for each in prompt))
        known = max((common(prompt, other) for other in prompts), default=0)
        assert index.match_len("a", blocks) == known
        index.add("a", blocks)
        prompts.append(prompt)
    small = PrefixIndex(4)
    long = block_digests(b"z" * BLOCK_BYTES * 9)
    small.add("a", long)
    assert (small.num_blocks("a"), small.match_len("a", long)) == (4, 4)
    small.forget("a")
    assert small.match_len("a", long) == 0


def common(left: bytes, right: bytes) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def test_the_next_turn_of_a_conversation_matches_the_turn_before() -> None:
    turn = b'{"messages":[{"role":"user","content":"%s"}' % (b"x" * 2000)
    first = facts_of(b'{"max_tokens":5,' + turn[1:] + b"]}")
    second = facts_of(turn + b',{"role":"assistant","content":"y"}],"max_tokens":9}')
    digests = block_digests(first.prompt)
    assert len(digests) == 7
    assert block_digests(second.prompt)[:7] == digests


@pytest.mark.parametrize(
    ("body", "session", "ids"),
    [
        (b'{"prompt":"a","user":"u"}', "u", ()),
        (b'{"prompt":"a","user":"u","prompt_cache_key":"k"}', "k", ()),
        (b'{"input":"a","previous_response_id":"resp_1"}', "", ("resp_1",)),
        (b'{"input":"a","conversation":{"id":"conv_1"}}', "", ("conv_1",)),
        (b'{"rid":["a","b"],"id":5,"user":7}', "7", ()),
        (b"[1,2]", "", ()),
        (b'{"prompt":', "", ()),
        (b"\xff\xfe", "", ()),
        (b'{"user":' + b"[" * 100_000, "", ()),
    ],
)
def test_facts_are_read_from_a_body(body: bytes, session: str, ids: tuple[str, ...]) -> None:
    facts = facts_of(body)
    assert (facts.session, facts.ids) == (session, ids)


@pytest.mark.parametrize("body", [b"{}", b"\xff", b'{"a":' + b"[" * 100_000])
def test_a_load_that_cannot_be_read_is_unknown(body: bytes) -> None:
    assert load_in(b'{"server_load":3}') == 3
    assert load_in(body) is None


def test_ids_are_read_from_paths_and_answers() -> None:
    assert id_in_path("/v1/responses/resp_12345/cancel") == "resp_12345"
    assert id_in_path("/v1/chat/completions") == ""
    assert ids_in(b'data: {"type":"x","response":{"id": "resp_12345"}}') == ["resp_12345"]
