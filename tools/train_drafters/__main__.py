"""`python -m tools.train_drafters` trains the drafters of the bundled model, and measures them.

`texts` lets the bundled model write the training texts, `train` trains drafters on them, and
`measure` writes what they reach in plain PyTorch, and the card. Each goes on where it stopped.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import track

from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tools.train_drafters.card import write_card
from tools.train_drafters.expected import measured, shown, write_expected
from tools.train_drafters.prompts import story_prompts
from tools.train_drafters.registry import DRAFT_VOCAB_SIZE, DRAFTERS, export, load
from tools.train_drafters.texts import MAX_TOKENS, read_shards, write_shard
from tools.train_drafters.training import Course, Plan, Progress, commonest_ids, train
from tools.train_tiny.export import load_network
from tools.train_tiny.tokenizer import load_tokenizer

LOGGED_EVERY = 20


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed_options(arguments)
    torch.set_num_threads(options.threads)
    options.run(options)


def parsed_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_drafters", description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    commands = parser.add_subparsers(required=True)
    texts = commands.add_parser("texts", help="let the bundled model write the training texts")
    texts.set_defaults(run=run_texts)
    texts.add_argument("folder", type=Path, help="folder of the shards, which is made if needed")
    texts.add_argument("--shards", type=int, default=12, help="of 256 texts each (default: 12)")
    texts.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="new ids of a text")
    training = commands.add_parser("train", help="train drafters on the texts")
    training.set_defaults(run=run_train)
    training.add_argument("folder", type=Path, help="folder of the shards")
    training.add_argument(
        "names", nargs="+", choices=DRAFTERS, metavar="drafter", help=", ".join(DRAFTERS)
    )
    training.add_argument("--checkpoints", type=Path, required=True, help="folder to go on from")
    training.add_argument("--steps", type=int, default=600, help="batches (default: 600)")
    training.add_argument("--tokens", type=int, default=2048, help="ids of a batch")
    training.add_argument(
        "--output", type=Path, default=DRAFTERS_DIR, help="folder of the drafters"
    )
    measure = commands.add_parser("measure", help="write expected_acceptance.json and the card")
    measure.set_defaults(run=run_measure)
    measure.add_argument("--output", type=Path, default=DRAFTERS_DIR, help="folder of the drafters")
    measure.add_argument("--prompts", type=int, default=32, help="story prompts (default: 32)")
    measure.add_argument("--max-tokens", type=int, default=160, help="ids of a story")
    measure.add_argument("--about", default="", help="sentences for the card about the training")
    return parser.parse_args(arguments)


def run_texts(options: argparse.Namespace) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    target, tokenizer = load_network(MODEL_DIR), load_tokenizer(MODEL_DIR)
    for index in track(range(options.shards), "texts"):
        path = options.folder / f"{index:05}.safetensors"
        if not path.exists():
            write_shard(target, tokenizer, path, seed=options.seed, max_tokens=options.max_tokens)


def run_train(options: argparse.Namespace) -> None:
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    target = load_network(MODEL_DIR).requires_grad_(False)
    texts = read_shards(options.folder)
    draft_ids = commonest_ids(texts, DRAFT_VOCAB_SIZE)
    plan = Plan(steps=options.steps, tokens=options.tokens, seed=options.seed)
    torch.manual_seed(options.seed)
    courses = {
        name: Course(
            DRAFTERS[name](target, draft_ids), plan, options.checkpoints / f"{name}.safetensors"
        )
        for name in options.names
    }
    console = Console()
    console.print(f"{len(texts)} texts, {sum(len(text.ids) for text in texts)} ids")
    with Bar(console=console) as bar:
        task = bar.add_task("training", total=plan.steps)

        def report(progress: Progress) -> None:
            bar.update(task, completed=progress.step + 1)
            if progress.step % LOGGED_EVERY == 0:
                losses = "  ".join(f"{name} {loss:.3f}" for name, loss in progress.losses.items())
                console.print(f"step {progress.step}  {losses}")

        train(target, courses, texts, plan, report=report)
    for name, course in courses.items():
        export(course.drafter, options.output / name)


def run_measure(options: argparse.Namespace) -> None:
    target, tokenizer = load_network(MODEL_DIR), load_tokenizer(MODEL_DIR)
    names = [name for name in DRAFTERS if (options.output / name).exists()]
    drafters = {name: load(name, target, options.output) for name in names}
    prompts = story_prompts(tokenizer, count=options.prompts, seed=options.seed)
    expected = measured(target, drafters, prompts, max_tokens=options.max_tokens)
    write_expected(expected, options.output)
    write_card(expected, drafters, target, options.output, about=options.about)
    Console().print(shown(expected))


if __name__ == "__main__":
    main()
