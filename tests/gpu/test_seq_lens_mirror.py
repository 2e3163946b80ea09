"""A length that the host calls exact is the device's own (A7): checked in debug mode."""

import asyncio

import msgspec
import pytest

from aserve.messages.base import pack_i32
from aserve.messages.results import StepFailed, StepResult
from tests.fakes.hash_model import HashModel
from tests.gpu.batch_builder import BatchBuilder, greedy
from tests.gpu.drive import make_executor


@pytest.mark.parametrize("told", [1, 3])
async def test_an_exact_length_that_is_not_the_devices_own_fails_the_step(told: int) -> None:
    executor = make_executor(HashModel())
    executor.start(asyncio.get_running_loop())
    builder = BatchBuilder(executor.spec)
    executor.launch(builder.batch({2: [5, 6]}, sampling=[2]))
    wrong = msgspec.structs.replace(
        builder.batch({2: [-2]}, sampling=[2]), kv_lens=pack_i32([told])
    )
    outcome = await executor.launch(wrong)
    executor.close()
    assert isinstance(outcome, StepFailed)
    assert f"row 2 has 2 KV positions on the device; the host says exactly {told}" in (
        outcome.error.message
    )


async def test_a_new_tenants_length_is_what_the_host_says() -> None:
    executor = make_executor(HashModel())
    executor.start(asyncio.get_running_loop())
    builder = BatchBuilder(executor.spec)
    executor.launch(builder.batch({2: [5, 6]}, sampling=[2]))
    outcome = await executor.launch(builder.batch({2: [9]}, sampling=[2], inits=[greedy(2)]))
    executor.close()
    assert isinstance(outcome, StepResult)
