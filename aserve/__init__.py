"""A small LLM inference server; the embeddable API is `aserve.engine`."""
