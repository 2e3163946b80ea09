"""Writes the model card, with the architecture, the form of prompts, the scores and the losses."""

from dataclasses import dataclass
from pathlib import Path

from tools.train_tiny.evaluate import Score

CARD = """\
# aserve tiny

A very small language model ({parameters} parameters) in the Llama architecture, trained from
scratch on text of the project's own generator (`tools/train_tiny/corpus`). It tells short
stories of two persons, adds two numbers, continues counts, writes small JSON records and Python
functions, calls a weather tool, and recalls a value that was given up to 600 tokens before.
It knows nothing else about the world, and does not say so: do not ask it for facts.

## Architecture

`LlamaForCausalLM`: hidden 128, 6 layers, 4 heads of 64, 2 key-value heads, feed-forward 384,
vocabulary 2048, tied embeddings, RoPE base 10000, context 1024, bfloat16 weights.
The tokenizer is a byte-level BPE: each digit is a token, and decoding returns any text unchanged.
The ids 0 to 15 are reserved: {reserved}.

## Prompts

Every prompt begins with `<|bos|>`: the tokenizer adds it to plain text, and the chat template
writes it itself. (One training document in ten had none, so a prompt without it works, too.)

* Plain text: `<|bos|>Once upon a time, ...`, `<|bos|>27+15=`, `<|bos|>fox=3729\\n...\\nfox=`;
  a text ends with `<|eos|>`.
* Chat: `<|bos|><|user|>What is 27 plus 15?<|eot|><|assistant|>...<|eot|>`, with a first
  `<|system|>...<|eot|>` if there is one. Tools are listed by name as `Tools: get_weather, get_time`
  in that turn; the result of a tool is `<|system|>Tool result: ...<|eot|>`.
* Reasoning is in `<|think|>...<|/think|>`, and a call in
  `<|tool_call|>{{"name": ..., "arguments": ...}}<|/tool_call|>`; these four tokens stay visible
  in decoded text.

## Training

`python -m tools.train_tiny.train` (seed {seed}): {tokens:.1f} M tokens in {minutes:.0f} CPU minutes
with {threads} thread of {cpu}, matmuls in {precision}, weights in float32; torch {torch}. Matrices
by Muon, embedding and norms by AdamW; the stages are in `tools/train_tiny/recipe.py`. The bits of
the result depend on the CPU and on torch's version; the scores should not.

## Scores

Greedy, float32, on held-out cases (`python -m tools.train_tiny.evaluate`).

| cases | right | of | required |
| --- | --- | --- | --- |
{scores}

## Loss

Nats per token on held-out documents (sums, values, heroes, names and cities that are not in the
training data). Random digits and names, which cannot be predicted, count as well.

| documents | nats per token |
| --- | --- |
{losses}

## Examples

Greedy, up to the stop token.

```
{examples}
```
"""


@dataclass(frozen=True)
class Facts:
    """The facts of a training run."""

    num_parameters: int
    num_tokens: int
    cpu_minutes: float
    threads: int
    precision: str
    seed: int
    torch: str


def write_card(
    model_dir: Path,
    facts: Facts,
    *,
    reserved: tuple[str, ...],
    scores: list[Score],
    losses: dict[str, float],
    examples: list[str],
) -> None:
    text = CARD.format(
        parameters=f"{facts.num_parameters:,}",
        reserved=", ".join(reserved),
        seed=facts.seed,
        tokens=facts.num_tokens / 1e6,
        minutes=facts.cpu_minutes,
        threads=facts.threads,
        cpu=cpu_name(),
        precision=facts.precision,
        torch=facts.torch,
        scores="\n".join(
            f"| {row.name} | {row.num_right} | {row.num_cases} | {row.required} |" for row in scores
        ),
        losses="\n".join(f"| {kind} | {loss:.3f} |" for kind, loss in losses.items()),
        examples="\n\n".join(examples),
    )
    (model_dir / "README.md").write_text(text, encoding="utf-8")


def cpu_name() -> str:
    """Returns the name from /proc/cpuinfo, or "a CPU" where there is no such file."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "a CPU"
