"""Writes the card of the drafters: what each is, how good it is, and what it costs."""

from pathlib import Path

from tools.train_drafters.drafter import Drafter, num_params
from tools.train_drafters.expected import Expected
from tools.train_drafters.oracle import Acceptance
from tools.train_tiny.network import Llama

WHAT = {
    "eagle": "EAGLE-1: one Llama layer that predicts the next hidden state; the target's head",
    "eagle3": "EAGLE-3: one layer over three hidden streams; a head over the 512 commonest ids",
    "mtp": "three MTP modules in MiMo's names (NextN), one layer each; the target's head",
    "frozen_kv": "an assistant of Gemma 4: two layers of queries over the target's last KV",
    "dflash": "DFlash: two layers draft a block of 8 in one forward; the target's head",
    "small_lm": "a Llama of two layers and hidden size 64 with the same vocabulary",
}
CARD = """\
# Drafters of aserve tiny

Six drafters for speculative decoding with [the bundled model](../model/README.md), each in the
tensor names and config keys of published checkpoints of its kind. `python -m tools.train_drafters`
makes them.

| folder | what it is | `architectures` | parameters |
| --- | --- | --- | --- |
{drafters}

## Acceptance

Greedy, on {prompts} openings of stories (plain and chat) that are in no training text, at most
{max_tokens} ids each. The accept length is the mean number of ids that a verify emits: the accepted
drafts and one id of the target. The next column is the part of all verifies that accepted the
first, second, ... draft. A draft step reads so many parameters (the target reads {target:,} for a
token); DFlash drafts its whole block in one step.

| drafter | drafts | accept length | by position | parameters read by a draft step |
| --- | --- | --- | --- | --- |
{acceptances}

`expected_acceptance.json` has these figures, the prompts and the number of verifies of each prompt.
`tools/train_drafters/oracle.py` measured them in plain PyTorch, without a KV cache. An engine that
accepts less feeds something else to the drafter than the training did.

## What each drafter is fed

Position i of the target has id t_i and hidden state h_i; L ids are committed, and the bonus id is
t_L. Layer ids count from 0, and a stream "after layer i" is the residual stream, `hidden_states[i +
1]` of transformers.

* eagle: row i takes t_{{i+1}} and h_i after the final norm, or the output of the draft step before.
  Its rope position is i.
* eagle3: row i takes t_{{i+1}} and the streams after `eagle_aux_hidden_state_layer_ids`, or the
  output of the draft step before, before its norm. Its rope position is i.
* mtp: row i of module k takes t_{{i+k}} and h_i before the final norm, or the output of module
  k - 1 before its norm. Its rope position is i in every module.
* frozen_kv: the steps take the bonus id and then the drafts, embedded by the target and multiplied
  by the root of the target's hidden size, and h_{{L-1}} after the final norm and then their own
  projected output. All steps have rope position L - 1 and see the keys of the target's last layer.
* dflash: the context are the streams after `target_layer_ids` of positions 0 to L - 1, the block is
  the bonus id and seven `<|mask|>` at the positions from L on.
* small_lm takes ids alone.

The projections take these inputs in this order: embedding, hidden state (`fc` of eagle,
`pre_projection` of frozen_kv); hidden state, embedding (`input_proj` of mtp, as in MiMo). Tensors
that a folder lacks are the target's: the embedding of all but small_lm, and the head of eagle, mtp
and dflash. `embed_tokens` of frozen_kv is its own head.

## Training

```
python -m tools.train_drafters texts TEXTS
python -m tools.train_drafters train TEXTS {names} --checkpoints CHECKPOINTS
python -m tools.train_drafters measure
```

The texts are continuations by the bundled model of openings of its corpus: half of them greedy, a
quarter at temperature 0.8 and a quarter at 1.0. The labels are the target's own distributions over
the generated ids. The drafters that draft a chain are unrolled over their own outputs, as they are
when they draft (the training-time test of EAGLE-3). Matrices by Muon, the rest by AdamW; one thread
of torch.

{about}
"""


def write_card(
    expected: Expected, drafters: dict[str, Drafter], target: Llama, folder: Path, *, about: str
) -> None:
    text = CARD.format(
        drafters="\n".join(
            f"| {name} | {WHAT[name]} | `{architecture_of(drafter)}` | {num_params(drafter):,} |"
            for name, drafter in drafters.items()
        ),
        prompts=len(expected.prompts),
        max_tokens=expected.max_tokens,
        target=num_params(target),
        acceptances="\n".join(
            acceptance_row(name, acceptance, drafters[name], target)
            for name, acceptances in expected.by_drafter.items()
            for acceptance in acceptances
        ),
        names=" ".join(drafters),
        about=about,
    )
    (folder / "README.md").write_text(text.rstrip() + "\n", encoding="utf-8")


def architecture_of(drafter: Drafter) -> object:
    names = drafter.config()["architectures"]
    assert isinstance(names, list)
    return names[0]


def acceptance_row(name: str, acceptance: Acceptance, drafter: Drafter, target: Llama) -> str:
    read = drafter.num_read(head=target.model.embed_tokens.weight.numel())
    shares = " ".join(f"{share:.2f}" for share in acceptance.shares)
    return (
        f"| {name} | {acceptance.num_drafts} | {acceptance.mean_accept_len:.2f} | {shares} "
        f"| {read:,} |"
    )
