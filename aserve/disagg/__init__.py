"""Prefill apart from decode: an engine computes prompts, and sends their KV to engines that decode.

How it works:

- An engine with `--disaggregation-mode decode` serves requests. When it admits one, it takes the
  row and the pages of the whole prompt, and asks a prefill engine for the KV behind its own prefix
  hit (ReceiveKv, `decode.py`). The last token of the prompt is computed here, and the first output
  is sampled here. So penalties, grammars, logprobs, n > 1 and drafts need nothing from the other
  side.

- An engine with `--disaggregation-mode prefill` computes the prompt like any other request, with
  its own prefix cache, and sends the KV of a chunk layer by layer while the step computes it
  (StreamKv, `prefill.py`), and what is left of it when the step is done (SendKv). It serves other
  requests as well.

- Each transfer has a connection of its own (`wire.py`), so that its end, its failure and its
  cancellation are those of the connection, and a slow peer delays only its own request. KV travels
  as the bytes of each token's rows, so the two sides may differ in page size. The bytes go over the
  connection, or through memory that both sides map (`transports.py`, `arena.py`).

- Nothing is lost: a transfer that fails is tried with the next prefill engine, from the token where
  it stopped, and at last the prompt is computed on the decode side.
"""
