"""N-gram embeddings: the bundled model with the embedding of LongCat-Flash-Lite.

With the base vocabulary V, n-grams of up to N ids and S tables for each length, table idx = (n - 2)
* S + s, for n = 2 to N and s = 0 to S - 1, has M = ratio * V + 2 * idx + 1 rows, and

    row_i = sum_{j<n} t_{i-j} * V^j  mod M
    x_i = mean of word_emb(t_i) and all table_idx[row_i] P_idx

The sum ends at the beginning of the text and before an EOS: what stood before counts as id 0.
"""

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from aserve.tiny import MODEL_DIR
from tools.train_models.language import loss_figures
from tools.train_models.member import Figure, Member, published_config
from tools.train_models.recipes import CAUSAL_QUICK, causal_recipe
from tools.train_tiny.export import load_network
from tools.train_tiny.network import Decoder, Shape
from tools.train_tiny.packing import Batch, Packer
from tools.train_tiny.recipe import ALL_KINDS, Rates, Stage
from tools.train_tiny.tokenizer import EOS, load_tokenizer
from tools.train_tiny.training import next_token_loss

MAX_N = 3  # emb_neighbor_num
NUM_SPLITS = 2  # emb_split_num
VOCAB_RATIO = 2  # ngram_vocab_size_ratio
NUM_TABLES = (MAX_N - 1) * NUM_SPLITS
SAMPLE = Stage("sample", length=512, rows=4, steps=60, shares=ALL_KINDS)


class NgramLlama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = NgramDecoder(shape)

    def forward(self, ids: Tensor) -> Tensor:
        return self.with_ngrams(ids, ids)

    def with_ngrams(self, ids: Tensor, ngram_ids: Tensor) -> Tensor:
        """Returns logits [rows, length, vocab] of ids whose n-grams are those of `ngram_ids`."""
        total = self.model.embed_tokens(ids) + self.model.ngram_embeddings(ngram_ids)
        hidden = self.model.decoded(total / (1 + NUM_TABLES))
        return functional.linear(hidden, self.model.embed_tokens.weight)


class NgramDecoder(Decoder):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.ngram_embeddings = NgramEmbeddings(shape)


class NgramEmbeddings(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.vocab_size = shape.vocab_size
        width = shape.hidden_size // NUM_TABLES
        self.embedders = nn.ModuleList(
            nn.Embedding(num_rows(shape.vocab_size, index), width) for index in range(NUM_TABLES)
        )
        self.post_projs = nn.ModuleList(
            nn.Linear(width, shape.hidden_size, bias=False) for _ in range(NUM_TABLES)
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the sum over all tables, [rows, length, hidden]."""
        found = ngram_rows(ids, self.vocab_size).unbind(-1)
        tables = zip(self.embedders, self.post_projs, found, strict=True)
        return torch.stack([project(table(rows)) for table, project, rows in tables]).sum(dim=0)


def num_rows(vocab_size: int, index: int) -> int:
    return VOCAB_RATIO * vocab_size + 2 * index + 1


def ngram_rows(ids: Tensor, vocab_size: int) -> Tensor:
    """Returns the row in each table, int64 [rows, length, tables], of ids [rows, length]."""
    before = ids_before(ids)
    tables: list[Tensor] = []
    for n in range(2, MAX_N + 1):
        for split in range(NUM_SPLITS):
            modulus = num_rows(vocab_size, (n - 2) * NUM_SPLITS + split)
            terms = [before[j] * pow(vocab_size, j, modulus) for j in range(n)]
            tables.append(torch.stack(terms).sum(dim=0) % modulus)
    return torch.stack(tables, dim=-1)


def ids_before(ids: Tensor) -> list[Tensor]:
    """Returns for j = 0 to N - 1 the ids j places before, and 0 where the text begins after it."""
    before = [ids]
    is_end = ids == EOS
    for _ in range(1, MAX_N):
        # The text of position i reaches j places back if neither those between nor that one ended.
        shifted = functional.pad(before[-1][:, :-1], (1, 0))
        ended = functional.pad(is_end[:, :-1], (1, 0), value=True)
        before.append(shifted.masked_fill(ended, 0))
    return before


class NgramEmb(Member):
    about = (
        "The bundled model with the n-gram embedding of LongCat-Flash-Lite: four tables of pairs "
        "and triples of ids beside the table of single ids. No published checkpoint has this "
        "embedding on Llama's layers, so the name of the architecture is ours; the keys and tensor "
        "names of the embedding are those of LongCat-Flash-Lite."
    )
    notes = (
        f"Table (n - 2) * {NUM_SPLITS} + s has {VOCAB_RATIO} * 2048 + 2 * index + 1 rows; the row "
        "of an n-gram is the sum of its ids times powers of 2048, the last id with power 0, modulo "
        f"that number. An n-gram does not reach over `<|eos|>` (id {EOS}, the `eos_token_id` of "
        "the configuration, not `<|eot|>`) or the beginning: ids before count as 0. The embedding "
        f"is the mean of {1 + NUM_TABLES} vectors. The head is tied to the table of single ids."
    )
    recipe = causal_recipe(steps=(42, 3, 5, 3), rates=Rates(muon=1e-3, adam=3e-3, warmup_steps=20))
    quick = CAUSAL_QUICK

    def config(self) -> dict[str, object]:
        return published_config(
            "LlamaNgramForCausalLM",
            "llama_ngram",
            intermediate_size=384,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            emb_neighbor_num=MAX_N,
            emb_split_num=NUM_SPLITS,
            ngram_vocab_size_ratio=VOCAB_RATIO,
            rms_norm_eps=1e-5,
            attention_bias=False,
            mlp_bias=False,
            tie_word_embeddings=True,
        ) | {"eos_token_id": EOS}

    def empty(self) -> nn.Module:
        return NgramLlama(Shape())

    def start(self, network: nn.Module) -> None:
        assert isinstance(network, NgramLlama)
        start(network)

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        return next_token_loss(network(batch.ids[:, :-1]), batch)

    def figures(self, network: nn.Module, tokenizer: Tokenizer, *, is_quick: bool) -> list[Figure]:
        assert isinstance(network, NgramLlama)
        own = loss_figures(network, tokenizer, is_quick=is_quick)
        late = loss_figures(
            lambda ids: network.with_ngrams(ids, functional.pad(ids[:, :-1], (1, 0))),
            tokenizer,
            is_quick=is_quick,
        )[0]
        bundled = loss_figures(load_network(MODEL_DIR), tokenizer, is_quick=is_quick)
        return [
            Figure(f"{late.name}, with the n-grams of the position before", late.value),
            *(
                Figure(f"{one.name} (bundled model: {other.value})", one.value)
                for one, other in zip(own, bundled, strict=True)
            ),
        ]


@torch.no_grad()
def start(network: NgramLlama) -> None:
    """Starts near the bundled model, whose embedding comes in equal parts from both kinds of table.

    Table idx has a quarter of the dimensions of the embedding of the last id, the mean of those
    n-grams of a sample that share its row. The final norm makes up for the larger table of single
    ids, which is the head.
    """
    bundled = load_network(MODEL_DIR).model
    network.model.load_state_dict(bundled.state_dict(), strict=False)
    network.model.embed_tokens.weight.mul_((1 + NUM_TABLES) / 2)
    network.model.norm.weight.div_((1 + NUM_TABLES) / 2)
    packer = Packer(load_tokenizer(MODEL_DIR), SAMPLE, seed=0)
    ids = torch.cat([packer.batch(step).ids for step in range(SAMPLE.steps)])
    found = ngram_rows(ids, network.model.ngram_embeddings.vocab_size).flatten(0, 1)
    parts = bundled.embed_tokens(ids).flatten(0, 1).mul((1 + NUM_TABLES) / 2).chunk(NUM_TABLES, 1)
    for index, part in enumerate(parts):
        table = network.model.ngram_embeddings.get_parameter(f"embedders.{index}.weight")
        counts = torch.bincount(found[:, index], minlength=len(table)).clamp(min=1)
        table.copy_(torch.zeros_like(table).index_add(0, found[:, index], part) / counts[:, None])
        project = network.model.ngram_embeddings.get_parameter(f"post_projs.{index}.weight")
        size = project.shape[1]
        project.zero_()[index * size : (index + 1) * size] = torch.eye(size)
