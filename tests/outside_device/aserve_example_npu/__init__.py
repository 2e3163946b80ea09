"""A device outside of aserve's tree, as a vendor would ship it: `--device example-npu`.

It computes on the CPU, and stands for an NPU whose graphs hold no lengths: its attention operator
needs them on the host, and a replay reads those that are handed over beside it.
"""
