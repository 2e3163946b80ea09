"""Clients share the engine: by the tokens that each was served, by rows, and by places to wait."""

from __future__ import annotations

import random

import msgspec
import pytest

from aserve.messages.executor import EngineSpec
from aserve.messages.output import Refused
from aserve.messages.requests import AdmitRequest
from aserve.scheduling.clients import Client, Clients
from aserve.scheduling.queue import WaitingQueue
from aserve.scheduling.request import Phase, Sequence
from aserve.scheduling.scheduler import Scheduler
from tests.scheduling.stage import cancel, request, spec
from tests.scheduling.step_counter import StepCounter


def engine(
    *, max_rows: int = 8, max_waiting: int = 2_000, budget: int = 64, num_pages: int = 700
) -> EngineSpec:
    few = spec(num_pages=num_pages, max_rows=max_rows, max_batched_tokens=budget)
    return msgspec.structs.replace(few, max_waiting=max_waiting, max_model_len=4_000)


def counter(spec: EngineSpec) -> StepCounter:
    return StepCounter(Scheduler(spec, debug_checks=True))


def asked(client: str, number: int, *, prompt_len: int = 6, max_tokens: int = 8) -> AdmitRequest:
    """Prompts of different requests share no page."""
    numbers = random.Random(f"{client}/{number}")
    prompt = [numbers.randrange(100) for _ in range(prompt_len)]
    return request(f"{client}{number}", prompt, max_tokens=max_tokens, client=client)


def waiting(name: str, client: Client, arrival: int, *, priority: int = 0) -> Sequence:
    admit = request(name, [1], priority=priority)
    return Sequence(admit, child=0, arrival=arrival, client=client)


def test_any_mix_of_operations_keeps_the_order_of_a_plain_sort() -> None:
    numbers = random.Random(1)
    queue = WaitingQueue()
    clients = [Client(str(number)) for number in range(5)]
    present: dict[int, Sequence] = {}
    for arrival in range(4_000):
        client = numbers.choice(clients)
        match numbers.randrange(5):
            case 0 | 1:
                present[arrival] = waiting(
                    str(arrival), client, arrival, priority=numbers.randrange(2)
                )
                queue.add(present[arrival])
            case 2:
                client.serve_outputs(numbers.randrange(4))
            case 3 if present:
                gone = present.pop(numbers.choice(list(present)))
                queue.remove(gone)
            case 4 if present:
                taken = queue.pop()
                assert taken is not None
                keys = {s.arrival: (s.priority, s.client.key, s.arrival) for s in present.values()}
                assert taken.arrival == min(keys, key=keys.__getitem__)
                if numbers.random() < 0.5:
                    queue.add(taken)
                else:
                    del present[taken.arrival]
        assert len(queue) == len(present)
    assert queue.num_clients == len({s.client.client_id for s in present.values()})


def test_two_thousand_waiting_clients_cost_no_scan() -> None:
    """Counted in comparisons of the heap's entries, not in time."""
    queue = WaitingQueue()
    clients = [CountingClient(str(number)) for number in range(2_000)]
    for arrival, client in enumerate(clients):
        queue.add(waiting(str(arrival), client, arrival))
    CountingClient.num_reads = 0
    for _ in range(100):
        sequence = queue.pop()
        assert sequence is not None
        sequence.client.serve_outputs(1)
        queue.add(sequence)
    assert CountingClient.num_reads < 100 * 30


class CountingClient(Client):
    """Counts how often a key is read."""

    num_reads = 0

    @property
    def key(self) -> int:
        CountingClient.num_reads += 1
        return super().key


def test_an_idle_client_saves_up_no_service_and_keeps_its_debt() -> None:
    clients = Clients()
    heavy, saver = clients.find("heavy"), clients.find("saver")
    clients.join(heavy, 1)
    clients.join(saver, 1)
    heavy.serve_outputs(500)
    saver.serve_outputs(5)
    clients.finish(saver)
    saver = clients.find("saver")
    clients.join(saver, 1)
    assert saver.served == 1000
    saver.serve_outputs(50)
    clients.finish(saver)
    assert clients.find("saver").served == 1100
    clients.join(clients.find("saver"), 1)
    assert clients.find("saver").served == 1100


def test_clients_that_are_gone_are_forgotten() -> None:
    clients = Clients()
    stays = clients.find("stays")
    clients.join(stays, 1)
    for number in range(1_000):
        guest = clients.find(f"guest{number}")
        clients.join(guest, 1)
        guest.serve_outputs(1)
        stays.serve_outputs(2)
        clients.finish(guest)
    assert len(clients) < 10
    clients.finish(stays)
    assert len(clients) == 0
    assert clients.find("stays").served == 0


def test_two_clients_that_always_wait_are_served_alike() -> None:
    run = counter(engine(max_rows=4))
    run.send(*(asked("many", number, max_tokens=16) for number in range(100)))
    run.send(*(asked("few", number, max_tokens=4) for number in range(100)))
    run.run(100)
    many, few = run.num_outputs["many"], run.num_outputs["few"]
    served = {name: run.scheduler.state.clients.find(name).served for name in ("many", "few")}
    assert abs(served["many"] - served["few"]) < 4 * (16 * 2 + 6)
    assert many > few  # whose answers are short, and whose prompts cost more of its share


def test_what_is_cancelled_before_it_was_computed_is_not_charged() -> None:
    run = counter(engine(budget=8))
    run.send(asked("a", 0, prompt_len=400), asked("b", 0))
    client = run.scheduler.state.clients.find("a")
    assert client.key == 400
    run.run(2)
    run.scheduler.step([cancel("a0")])
    assert client.key == client.served < 40


def flooded(*, rows: int = 64, prompt_len: int = 6) -> StepCounter:
    """A flood runs on all rows and waits in the queue, and goes on for long."""
    num_pages = rows * (prompt_len + 210) // 4 + 100
    run = counter(engine(max_rows=rows, budget=256, num_pages=num_pages))
    run.send(
        *(asked("flood", number, prompt_len=prompt_len, max_tokens=200) for number in range(500))
    )
    run.run(20)
    return run


def test_a_flood_on_all_rows_leaves_the_first_token_of_others_within_three_steps() -> None:
    alone = counter(engine(max_rows=64, budget=256))
    (idle,) = alone.steps_to_first(asked("light0-", 0))
    run = flooded()
    requests = [asked(f"light{number}-", 0) for number in range(9)]
    assert max(run.steps_to_first(*requests)) <= idle + 3
    (again,) = run.steps_to_first(asked("light0-", 1))
    assert again <= idle + 3


def test_rows_are_taken_from_a_client_only_down_to_its_share() -> None:
    run = flooded(rows=8)
    run.send(*(asked("other", number, max_tokens=200) for number in range(50)))
    run.run(30)
    clients = run.scheduler.state.clients
    assert (clients.find("flood").num_rows, clients.find("other").num_rows) == (4, 4)
    before = run.scheduler.state.num_retracted
    run.run(60)
    assert run.scheduler.state.num_retracted == before <= 8


@pytest.mark.parametrize(
    ("clients", "priority"), [(["flood"] * 4, 1), (["c0-", "c1-", "c2-", "c3-"], 0)]
)
def test_rows_are_not_taken_for_a_lower_priority_nor_from_clients_that_have_one(
    clients: list[str], priority: int
) -> None:
    run = counter(engine(max_rows=4))
    run.send(*(asked(name, number, max_tokens=60) for number, name in enumerate(clients)))
    run.run(5)
    run.send(request("later", [1, 2, 3], client="light", priority=priority))
    run.run(20)
    assert run.scheduler.state.num_retracted == 0
    assert "later" not in run.first_steps


def test_rows_are_retracted_for_pages_all_at_once_or_not_at_all() -> None:
    run = counter(engine(max_rows=64, budget=2_000, num_pages=261))
    run.send(*(asked("flood", number, prompt_len=8, max_tokens=400) for number in range(40)))
    state = run.scheduler.state
    while len(state.running) < 40 or state.cache.available(0) > 90:
        run.run(1)
    run.send(asked("light", 0, prompt_len=480, max_tokens=2))
    (sequence,) = state.groups["light0"].values()
    while sequence.phase is Phase.WAITING:
        assert not sequence.num_retracted_for
        run.run(1)
    assert 8 < sequence.num_retracted_for <= 16
    assert run.num_steps < 60, "it waits until few rows would do, not for the end of the flood"


def test_no_row_is_retracted_for_a_prompt_to_which_another_one_leaves_no_tokens() -> None:
    run = counter(engine(max_rows=4, budget=16))
    run.send(*(asked("flood", number, max_tokens=200) for number in range(4)))
    run.run(5)
    state = run.scheduler.state
    run.send(asked("late", 0, prompt_len=90), asked("late", 1))
    run.run(1)
    (prompt,) = state.groups["late0"].values()
    while prompt.remaining > 16:
        assert state.num_retracted == 1
        assert len(state.running) == 4
        run.run(1)
    run.run(20)
    assert "late1" in run.first_steps


def test_a_flood_leaves_places_in_the_queue_for_others() -> None:
    run = counter(engine(max_rows=2, max_waiting=90))
    run.send(*(asked("flood", number, max_tokens=100) for number in range(2)))
    run.run(2)
    run.send(*(asked("flood", 100 + number) for number in range(200)))
    refused = [name for name, ends in run.ends.items() if isinstance(ends[0], Refused)]
    assert len(refused) == 120
    (end,) = run.ends[refused[0]]
    assert isinstance(end, Refused)
    assert (end.error.status, end.error.code) == (429, "queue_full")
    assert "80" in end.error.message
    assert "90" in end.error.message
    run.send(*(asked(f"light{number}-", 0) for number in range(9)))
    assert not [name for name in run.ends if name.startswith("light")]


def test_the_first_request_of_a_client_needs_only_a_free_place() -> None:
    run = counter(engine(max_rows=1, max_waiting=1))
    run.send(asked("a", 0, max_tokens=100))
    run.run(2)
    run.send(asked("b", 0), asked("b", 1))
    assert [name for name, ends in run.ends.items() if isinstance(ends[0], Refused)] == ["b1"]
