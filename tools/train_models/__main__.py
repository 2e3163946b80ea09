"""`python -m tools.train_models` trains the small models that other architectures are shown with.

`train` trains a member, or goes on from its checkpoint, and writes its folder; `measure` measures
the saved weights and writes the card; `folder` makes a folder that has a member and the tokenizer.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from aserve.tiny import MODEL_DIR
from tools.train_models.card import write_card
from tools.train_models.folder import MODELS_DIR, complete_folder, load_member, save_member
from tools.train_models.member import Figure
from tools.train_models.registry import MEMBERS
from tools.train_tiny.card import Facts
from tools.train_tiny.tokenizer import load_tokenizer
from tools.train_tiny.train import CPU_FACTS, PRECISIONS, TrainingProgress, fastest_precision
from tools.train_tiny.training import Run, train


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed_options(arguments)
    options.run(options)


def parsed_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.train_models", description=__doc__)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="train a member")
    training.set_defaults(run=run_train)
    training.add_argument("--checkpoint", type=Path, help="file to continue from and to update")
    measure = commands.add_parser("measure", help="write the card of a trained member")
    measure.set_defaults(run=run_measure)
    measure.add_argument("--minutes", type=float, default=0.0, help="CPU minutes of the training")
    measure.add_argument("--remarks", default="", help="sentences for the card")
    for command in (training, measure):
        command.add_argument("name", choices=MEMBERS, help=", ".join(MEMBERS))
        command.add_argument("--output", type=Path, default=MODELS_DIR, help="folder of the models")
        command.add_argument("--quick", action="store_true", help="a few steps, and no card")
        command.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument(
            "--precision",
            choices=PRECISIONS,
            default=fastest_precision(CPU_FACTS.read_text()),
            help="dtype of the matmuls; default: bfloat16 if the CPU has instructions for it",
        )
    folder = commands.add_parser("folder", help="link a member and the tokenizer into a folder")
    folder.set_defaults(run=lambda given: complete_folder(MODELS_DIR / given.name, given.folder))
    folder.add_argument("name", choices=MEMBERS)
    folder.add_argument("folder", type=Path)
    return parser.parse_args(arguments)


def run_train(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    member, tokenizer, console = MEMBERS[options.name](), load_tokenizer(MODEL_DIR), Console()
    recipe = member.quick if options.quick else member.recipe
    network = member.build()
    console.print(
        f"{options.name}: {num_params(network):,} parameters, {recipe.num_tokens / 1e6:.2f} M "
        f"tokens, {options.precision}"
    )
    run = Run(
        recipe=recipe,
        batches=lambda stage: member.batches(stage, tokenizer, options.seed),
        loss=lambda batch: member.loss(network, batch),
        precision=PRECISIONS[options.precision],
        checkpoint=options.checkpoint,
    )
    started = time.process_time()
    with TrainingProgress(console, recipe) as progress:
        train(network, run, report=progress.show)
    minutes = (time.process_time() - started) / 60
    save_member(member, network, options.output / options.name)
    console.print(f"written to {options.output / options.name} after {minutes:.1f} CPU minutes")


def run_measure(options: argparse.Namespace) -> None:
    """Measures the saved weights in float32. A quick run gets no card."""
    torch.set_num_threads(options.threads)
    member, folder = MEMBERS[options.name](), options.output / options.name
    network, tokenizer = load_member(member, folder), load_tokenizer(MODEL_DIR)
    figures = member.figures(network, tokenizer, is_quick=options.quick)
    Console().print(figure_table(figures))
    if options.quick:
        return
    facts = Facts(
        num_parameters=num_params(network),
        num_tokens=member.recipe.num_tokens,
        cpu_minutes=options.minutes,
        threads=options.threads,
        precision=options.precision,
        seed=options.seed,
        torch=torch.__version__,
    )
    write_card(options.name, member, facts, figures, folder, remarks=options.remarks)


def num_params(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


def figure_table(figures: list[Figure]) -> Table:
    table = Table("figure", "value", "required")
    for row in figures:
        table.add_row(row.name, row.value, row.required)
    return table


if __name__ == "__main__":
    main()
