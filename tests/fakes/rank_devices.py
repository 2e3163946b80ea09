"""The fake devices of data-parallel ranks, which run the batches of a launch together."""

from __future__ import annotations

from aserve.messages.base import array_i32
from aserve.messages.results import SampleResult, StepFailed, StepResult
from aserve.messages.step import Launch, Resync, Sample, ScheduleBatch
from aserve.parallel.joined import joined
from tests.fakes.toy_device import FakeDevice


class RankDevices:
    """A rank without rows touches nothing of its device."""

    def __init__(self, devices: list[FakeDevice]) -> None:
        self.devices = devices
        self.num_idle = 0  # batches

    def run(
        self, command: Launch | Sample | Resync
    ) -> StepResult | SampleResult | StepFailed | None:
        match command:
            case Launch():
                parts = zip(self.devices, command.batches, strict=True)
                return joined([self._run_batch(*part) for part in parts])
            case Sample():
                ranks = {(row - 1) % len(self.devices) for row in array_i32(command.rows).tolist()}
                [rank] = ranks
                return self.devices[rank].run(command)
            case Resync():
                for device in self.devices:
                    device.run(command)
                return None

    def _run_batch(self, device: FakeDevice, batch: ScheduleBatch) -> StepResult | StepFailed:
        if batch.rows:
            result = device.run(batch)
            assert isinstance(result, StepResult | StepFailed)
            return result
        self.num_idle += 1
        assert batch.iteration == device.last_iteration + 1
        device.last_iteration = batch.iteration
        return StepResult(batch.iteration, b"", b"", b"")
