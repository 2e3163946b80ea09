"""Hugging Face's client, which speaks the API of TGI: `python hugging_face_client.py ADDRESS`."""

from __future__ import annotations

import sys

from huggingface_hub import InferenceClient


def main(address: str, _: str) -> None:
    client = InferenceClient(model=address)
    asked = {"prompt": "Count: 5 6 7 8", "max_new_tokens": 6}
    text = client.text_generation(**asked)
    detailed = client.text_generation(**asked, details=True, decoder_input_details=True)
    assert detailed.generated_text == text, (detailed, text)
    assert detailed.details.generated_tokens == len(detailed.details.tokens) == 6, detailed
    assert detailed.details.finish_reason == "length", detailed
    streamed = [*client.text_generation(**asked, stream=True, details=True)]
    assert "".join(each.token.text for each in streamed) == text, streamed
    assert streamed[-1].generated_text == text, streamed


if __name__ == "__main__":
    main(*sys.argv[1:])
