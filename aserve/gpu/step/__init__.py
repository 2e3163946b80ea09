"""One step on the device, in five forms, each made from the one before and never changed:

1. `ScheduleBatch` (messages/step.py): the scheduler's decision, a message of bytes.
2. `StepPlan` (plan.py): the same as numpy arrays, with the tokens that need logits. A step of the
   same rows as the last one shares most of its plan (repeated.py).
3. `DeviceArrays` (transfer/staging.py): the plan's arrays on the device, from one copy.
4. `DeviceBatch` (forward_batch.py): rows, ids and lengths with placeholders and bounds resolved.
5. `ForwardBatch` (forward_batch.py): the inputs of one forward: positions, KV slots, lengths.

A decode mode gets plan, arrays and forward batch together as a `DeviceStep` (resolve.py).

A result has three: `Sampled` (tokens and logprobs on the device, sampling/sampler.py), `Packed`
(one int32 array on the device, results.py), and the message, `StepResult` or `SampleResult`.
"""
