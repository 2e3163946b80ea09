"""The recipes of the members that learn the corpus of the bundled model, and start from it."""

from tools.train_tiny.recipe import ALL_KINDS, ASKING, LONG, TWO_PERSONS, Rates, Recipe, Stage


def causal_recipe(*, steps: tuple[int, int, int, int], rates: Rates | None = None) -> Recipe:
    """`steps` of the four stages. The first mends what the start has changed."""
    first, long, asking, two_persons = steps
    return Recipe(
        stages=(
            Stage("all kinds", length=256, rows=8, steps=first, shares=ALL_KINDS),
            Stage("long", length=768, rows=3, steps=long, shares=LONG, opening=0.6),
            Stage("asking", length=512, rows=4, steps=asking, shares=ASKING, opening=0.25),
            Stage(
                "two persons",
                length=512,
                rows=4,
                steps=two_persons,
                shares=TWO_PERSONS,
                opening=0.4,
            ),
        ),
        rates=rates or Rates(warmup_steps=20, decay_part=0.5),
        tokenizer_documents=0,
        tokenizer_kinds=frozenset(),
    )


QUICK_SHARES = {"story": 1.0, "sums": 1.0}
CAUSAL_QUICK = Recipe(
    stages=(Stage("all kinds", length=64, rows=2, steps=2, shares=QUICK_SHARES),),
    rates=Rates(warmup_steps=2),
    tokenizer_documents=0,
    tokenizer_kinds=frozenset(),
)
