"""Tiers below the prefix cache: KV of full pages in host memory, and in files below that.

How it works:

- The scheduler hands pages down by SaveKv (cache/stored_pages.py, scheduling/loads.py): each page
  when it enters the prefix cache, or only when it is evicted. `KvTiers` asks the device for the
  copies at once, so that they are ordered before the next launch, and no page waits for the host.

- A page is known by its key, a digest of all tokens up to its end and of their namespace. So what
  an engine finds under a key is right wherever it was computed, as long as the model, its weights
  and the form of the KV are the same.

- Host memory holds a fixed number of pages, and the least recently used one gives way. The
  scheduler is told which pages are there, so it never asks in vain for long: a sequence whose
  prefix hit goes on in the tiers asks for these pages by LoadKv, and the rest is computed.

- Nothing is lost by a tier that fails: what does not come is computed.
"""
