"""What the tool needs of a member of the model zoo, whatever its architecture is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.train_tiny.packing import Batch, Packer
from tools.train_tiny.recipe import Recipe, Stage
from tools.train_tiny.tokenizer import BOS, EOS, EOT, PAD
from tools.train_tiny.training import Batches


@dataclass(frozen=True)
class Figure:
    """A line of the card. `required` is empty where nothing is required."""

    name: str
    value: str
    required: str = ""


class Member(ABC):
    about: str  # the first paragraph of the card
    notes: str  # what a loader must know beyond the config
    recipe: Recipe
    quick: Recipe
    # Prefixes of tensors in the network and in the file, where they differ.
    renames: tuple[tuple[str, str], ...] = ()

    @abstractmethod
    def config(self) -> dict[str, object]:
        """Returns what config.json says, in the keys of the published checkpoints."""

    @abstractmethod
    def empty(self) -> nn.Module:
        """Returns the network with weights of no meaning."""

    @abstractmethod
    def start(self, network: nn.Module) -> None:
        """Sets the weights before the training, which may come from the bundled model."""

    def build(self) -> nn.Module:
        network = self.empty()
        self.start(network)
        return network

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Tensor: ...

    @abstractmethod
    def figures(
        self, network: nn.Module, tokenizer: Tokenizer, *, is_quick: bool
    ) -> list[Figure]: ...

    def save_more(self, folder: Path) -> None:  # noqa: B027  # most members have no more files
        """Writes the files that a member has beside configuration and weights."""

    def batches(self, stage: Stage, tokenizer: Tokenizer, seed: int) -> Batches:
        return Packer(tokenizer, stage, seed=seed)


def published_config(
    architecture: str, model_type: str, *, rope_theta: float = 10000.0, **fields: object
) -> dict[str, object]:
    """The keys that all members share, for transformers 5 and for older versions."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 2048,
        "hidden_size": 128,
        "max_position_embeddings": 1024,
        "hidden_act": "silu",
        **fields,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "rope_theta": rope_theta,
        "bos_token_id": BOS,
        "eos_token_id": [EOS, EOT],
        "pad_token_id": PAD,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
