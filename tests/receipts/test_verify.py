"""Receipts of a server with the bundled model: their tokens are computed again, and every change of
one is seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession

from aserve.cli import main
from aserve.config import Facts, Raw, resolve
from aserve.http.answer_schemas import ANSWERS, described
from aserve.load import load
from aserve.receipts.record import Receipt, read_receipt
from aserve.receipts.verify import (
    DIFFERENT,
    SAME,
    UNUSABLE,
    Recomputation,
    options_of_receipt,
    verdict_of,
)
from aserve.server import connect_http
from aserve.tiny import MODEL_DIR
from tests.fakes.lora_adapters import Recipe, write_adapter
from tests.fakes.packed_channel import PackedFrontend
from tests.parity.real_model import options

HELLO = [{"role": "user", "content": "Tell me of a fox."}]
SUM = [{"role": "user", "content": "What is 27 plus 15?"}]
SEEDED: dict[str, Any] = {"seed": 7, "temperature": 0.9, "max_tokens": 24}
FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 20, "min_p": 0.01}
PENALTIES = {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Once upon a time", "max_tokens": 70, "temperature": 0},
    "two of two": {"prompt": ["A fox", "A lake"], **SEEDED, "n": 2},
    "filters, best of 3": {"prompt": "A fox", **SEEDED, **FILTERS, "best_of": 3},
    "penalties": {"prompt": "A fox", **SEEDED, **PENALTIES, "ignore_eos": True, "max_tokens": 50},
    "bias": {"prompt": "A fox", **SEEDED, "logit_bias": {"40": 5, "300": -9}},
    "bans": {"prompt": "A", **SEEDED, "bad_words": [" the"], "min_tokens": 20, "stop": [" zebra"]},
    "grammar": {"prompt": "My number: ", **SEEDED, "guided_regex": "[0-9]{3}-[a-z]{9}"},
    "chat": {"messages": HELLO, **SEEDED},
    "stream": {"messages": HELLO, **SEEDED, "stream": True, "n": 2},
    "reasoning": {"messages": SUM, "temperature": 0, "max_tokens": 40, "thinking_token_budget": 5},
    "adapter": {"prompt": "A fox", **SEEDED, "model": "adapter"},
}


async def receipt_of(client: ClientSession, ask: dict[str, Any]) -> Receipt:
    path = "/v1/chat/completions" if "messages" in ask else "/v1/completions"
    async with client.post(path, json=ask | {"receipt": True}) as answer:
        assert answer.status == 200, await answer.text()
        if not ask.get("stream"):
            data = await answer.read()
            msgspec.json.decode(data, type=described(ANSWERS[f"POST {path}"]))
            return read_receipt(data)
        lines = [line async for line in answer.content if b'"receipt"' in line]
    [line] = lines
    return read_receipt(line.removeprefix(b"data: "))


async def all_receipts(adapter: Path) -> dict[str, Receipt]:
    resolved = options(port=0, lora_modules=f"adapter={adapter}", grammar_workers=1)
    frontend = PackedFrontend(resolved)
    server = connect_http(frontend)
    address = await server.start()
    try:
        await frontend.start(await asyncio.to_thread(load, resolved))
        async with ClientSession(address) as client:
            return {name: await receipt_of(client, ask) for name, ask in ASKS.items()}
    finally:
        await server.stop()
        await frontend.close()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "adapter"
    write_adapter(folder, Recipe(1))
    return folder


@pytest.fixture(scope="module")
def receipts(adapter: Path) -> dict[str, Receipt]:
    return asyncio.run(all_receipts(adapter))


def codes(changed: dict[str, Receipt], adapter: Path | None = None) -> dict[str, int]:
    """The verdicts of receipts with the same settings, by one model."""
    first = next(iter(changed.values()))
    given = options_of_receipt(first, {})
    resolved = resolve(Raw(command_line=given), Facts(default_model=str(MODEL_DIR)))

    async def run() -> dict[str, int]:
        async with Recomputation(resolved, MODEL_DIR, adapter) as again:
            return {
                name: verdict_of(receipt, await again.outcomes(receipt)).code
                for name, receipt in changed.items()
            }

    return asyncio.run(run())


def with_output(receipt: Receipt, change: Callable[[list[int]], list[int]]) -> Receipt:
    first, *others = receipt.outputs
    changed = msgspec.structs.replace(first, token_ids=change(first.token_ids))
    return msgspec.structs.replace(receipt, outputs=[changed, *others])


def with_sampling(receipt: Receipt, **fields: Any) -> Receipt:
    sampling = msgspec.structs.replace(receipt.sampling, **fields)
    return msgspec.structs.replace(receipt, sampling=sampling)


def test_every_kind_of_receipt_is_computed_again(
    receipts: dict[str, Receipt], adapter: Path
) -> None:
    plain = {name: receipt for name, receipt in receipts.items() if name != "adapter"}
    assert codes(plain) == dict.fromkeys(plain, SAME)
    tuned = {"adapter": receipts["adapter"]}
    assert codes(tuned, adapter) == {"adapter": SAME}
    assert [len(receipts[name].outputs) for name in ("two of two", "stream", "chat")] == [4, 2, 1]
    assert min(len(each.token_ids) for each in receipts["two of two"].outputs) > 5


def test_each_change_that_is_sealed_again_gives_other_tokens(receipts: dict[str, Receipt]) -> None:
    two, penalised = receipts["two of two"], receipts["penalties"]
    greedy, filtered = receipts["greedy"], receipts["filters, best of 3"]
    constrained = receipts["grammar"]
    swapped = [msgspec.structs.replace(each, child=1 - each.child) for each in two.outputs]
    changed = {
        "a token": with_output(greedy, lambda ids: [*ids[:40], ids[40] + 1, *ids[41:]]),
        "a token less": with_output(greedy, lambda ids: ids[1:]),
        "the last token": with_output(greedy, lambda ids: [*ids[:-1], 99]),
        "seed": with_sampling(two, seed=8),
        "children": msgspec.structs.replace(two, outputs=swapped),
        "prompts": msgspec.structs.replace(two, prompts=two.prompts[::-1]),
        "temperature": with_sampling(two, temperature=0.2),
        "greedy": with_sampling(two, temperature=0.0),
        "top_k": with_sampling(filtered, top_k=1),
        "penalty": with_sampling(penalised, repetition_penalty=9.0),
        "bias": with_sampling(receipts["bias"], logit_bias=((41, 100.0),)),
        "no grammar": with_sampling(constrained, grammar=None),
        "against the grammar": with_output(constrained, lambda ids: [ids[-1], *ids[1:]]),
        "no adapter": msgspec.structs.replace(
            receipts["adapter"],
            model=msgspec.structs.replace(receipts["adapter"].model, adapter=None),
        ),
    }
    assert codes(changed) == dict.fromkeys(changed, DIFFERENT)


def test_a_change_of_any_field_is_named_without_loading_the_model(
    receipts: dict[str, Receipt], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    receipt = receipts["two of two"]
    changes: dict[str, Any] = {
        "version": 2,
        "id": "other",
        "created": 0,
        "model": msgspec.structs.replace(receipt.model, name="other"),
        "settings": receipt.settings | {"dtype": "bfloat16"},
        "machine": msgspec.structs.replace(receipt.machine, torch="0"),
        "sampling": msgspec.structs.replace(receipt.sampling, seed=8),
        "prompts": receipt.prompts[::-1],
        "outputs": receipt.outputs[1:],
    }
    assert changes.keys() | {"hashes"} == set(receipt.__struct_fields__)
    path = tmp_path / "receipt.json"
    for name, value in changes.items():
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(receipt, **{name: value})))
        assert main(["verify", str(path)]) == UNUSABLE
        assert capfd.readouterr().out.endswith(f"do not fit its {name}\n")


def test_a_receipt_sets_no_option_but_those_of_the_arithmetic(
    receipts: dict[str, Receipt],
) -> None:
    settings = receipts["greedy"].settings | {"record": "/etc/passwd", "model": "somebody/else"}
    receipt = msgspec.structs.replace(receipts["greedy"], settings=settings).sealed()
    given = options_of_receipt(receipt, {"model": "mine"})
    assert "record" not in given
    assert (given["model"], given["dtype"]) == ("mine", "float64")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-9], "neither a receipt"),
        (lambda data: data.replace(b'"weights":"', b'"weights":"\xff'), "neither a receipt"),
        (lambda data: b"{}", "neither a receipt"),
        (lambda data: data.replace(b'"weights":"', b'"weights":"0'), "altered"),
    ],
)
def test_what_cannot_be_verified_is_told_in_one_line(
    change: Callable[[bytes], bytes],
    words: str,
    receipts: dict[str, Receipt],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "receipt.json"
    path.write_bytes(change(msgspec.json.encode(receipts["greedy"])))
    assert main(["verify", str(path)]) == UNUSABLE
    shown = capfd.readouterr()
    assert words in shown.out + shown.err


def test_another_model_a_missing_adapter_and_an_unknown_token_are_told_apart(
    receipts: dict[str, Receipt], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = receipts["greedy"].model
    digest = msgspec.structs.replace(model.digest, weights="0" * 64)
    other = msgspec.structs.replace(model, digest=digest)
    for receipt, words in (
        (msgspec.structs.replace(receipts["greedy"], model=other).sealed(), "another model"),
        (receipts["adapter"], "--adapter"),
        (with_output(receipts["greedy"], lambda ids: [ids[0], 9_999]).sealed(), "9999"),
    ):
        path = tmp_path / "receipt.json"
        path.write_bytes(msgspec.json.encode(receipt))
        assert main(["verify", str(path)]) == UNUSABLE
        shown = capfd.readouterr()
        assert words in shown.out + shown.err
