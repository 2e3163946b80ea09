"""An engine's process without a model; its argument says what it is like."""

from __future__ import annotations

import asyncio
import os
import sys

from aserve.engine_core import LocalExecutor
from aserve.errors import ConfigError, StepError
from aserve.messages.step import ScheduleBatch
from aserve.processes.engine import main
from aserve.processes.link import Start
from aserve.progress import OnStage
from tests.fakes.executor import FakeExecutor, FakeTicket

LOST_STEP = 5


class Mortal(FakeExecutor):
    """Its thread ends in one of its first steps."""

    def launch(self, *batches: ScheduleBatch) -> FakeTicket:
        if batches[0].iteration == LOST_STEP:
            self.die(RuntimeError("the device is gone"))
        return super().launch(*batches)


class Stillborn(FakeExecutor):
    async def warm_up(self) -> None:
        raise StepError("the first step failed")


class Sleeper(FakeExecutor):
    async def warm_up(self) -> None:
        await asyncio.Event().wait()


KINDS = {"good": FakeExecutor, "mortal": Mortal, "stillborn": Stillborn, "sleeper": Sleeper}


def load(start: Start, on_stage: OnStage) -> LocalExecutor:
    on_stage("weights", 3, 4)
    kind = sys.argv[1]
    if kind == "wrong":
        raise ConfigError(f"{start.model_dir} is no model")
    if kind == "crash":
        os._exit(7)
    return KINDS[kind]()


if __name__ == "__main__":
    sys.exit(main(load))
