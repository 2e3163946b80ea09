"""The arguments of the function that loads a drafter, and its result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from aserve.errors import ConfigError
from aserve.gpu.device.ops import TORCH_OPS, DeviceOps
from aserve.gpu.models.base import CausalModel, DraftModel, LoadPlan
from aserve.gpu.models.pooling import PooledModel
from aserve.gpu.models.vision_language import VisionLanguageModel
from aserve.gpu.spec.base import Drafter
from aserve.gpu.spec.fused import FuseDrafter
from aserve.gpu.weights.source import ONE_STAGE, WHOLE, unwrapped

TOKEN_MAP = "speculative_token_map"
TOKEN_MAP_OPTION = "--speculative-token-map"


class SpecOptions(msgspec.Struct, frozen=True):
    """The options of speculative decoding. A None lets the drafter choose."""

    algorithm: str
    draft_model_dir: Path | None = None
    bundled_drafters: Path | None = None  # a directory of drafters that fit the target
    num_steps: int | None = None  # drafts on one path
    topk: int | None = None  # branches at each node of a draft tree; 1: a chain
    num_draft_tokens: int | None = None  # tokens that one step verifies, the root included
    token_tree: str | None = None  # the paths of a static tree
    token_map: Path | None = None  # a file with the tokens that are drafted; None: all
    min_match_len: int | None = None  # of a suffix that is looked up
    max_match_len: int | None = None
    shared_table_size: int | None = None  # n-grams that a namespace keeps for its rows; 0: none
    verification: str = "coupled"  # one of registry.VERIFICATIONS


def tree_flags(options: SpecOptions | None) -> Mapping[str, bool]:
    """Returns the options that ask for draft trees, and whether they are on."""
    if options is None:
        return {}
    return {
        "--speculative-topk": options.topk not in (None, 1),
        "--speculative-token-tree": options.token_tree is not None,
    }


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The arguments of a drafter's loader."""

    options: SpecOptions
    target: CausalModel
    target_plan: LoadPlan
    ops: DeviceOps = TORCH_OPS
    target_dir: Path | None = None  # the target's checkpoint

    @property
    def plan(self) -> LoadPlan:
        """The dtype, context and device of the target. A drafter has no LoRA adapters, and each
        rank that has one has all of it."""
        target = dataclasses.replace(
            self.target_plan.target,
            wrap=unwrapped,
            divide=unwrapped,
            part=unwrapped,
            shard=WHOLE,
            stage=ONE_STAGE,
        )
        return dataclasses.replace(self.target_plan, target=target)

    def model_dir(self, *, bundled: str, default: Path | None = None) -> Path:
        """Returns the directory of the draft model. Where the options name none, it is the drafter
        `bundled` with the target, or else `default`; raises ConfigError if there is neither."""
        drafters = self.options.bundled_drafters
        if self.options.draft_model_dir is None:
            if drafters is not None and (drafters / bundled).is_dir():
                return drafters / bundled
            if default is not None:
                return default
            raise ConfigError(
                f"--speculative-algorithm {self.options.algorithm} needs a draft model for this "
                "model; name its directory with --speculative-draft-model-path",
                param="speculative_draft_model_path",
            )
        return self.options.draft_model_dir

    def refuse_token_map(self) -> None:
        if self.options.token_map is not None:
            raise ConfigError(
                f"{TOKEN_MAP_OPTION} is for drafters of EAGLE-1 alone; leave it out",
                param=TOKEN_MAP,
            )

    def refuse_pictures(self) -> None:
        """Refuses a target whose pictures move rotary positions, for a drafter that reads it."""
        if isinstance(self.target, VisionLanguageModel) and self.target.has_axes:
            raise ConfigError(
                f"--speculative-algorithm {self.options.algorithm} does not draft for a model that "
                "reads pictures, whose tokens have positions of three axes; take NGRAM, STANDALONE "
                "or a single module of multi-token prediction (NEXTN)",
                param="speculative_algorithm",
            )

    def chain_len(self, *, default: int) -> int:
        """Returns the number of drafts of a drafter that makes chains only."""
        options = self.options
        if options.token_tree is not None:
            raise ConfigError(
                f"--speculative-token-tree: {options.algorithm} drafts a chain; leave it out",
                param="speculative_token_tree",
            )
        if options.topk not in (None, 1):
            raise ConfigError(
                f"--speculative-topk {options.topk}: {options.algorithm} drafts a chain; "
                "leave the option out",
                param="speculative_topk",
            )
        steps, tokens = options.num_steps, options.num_draft_tokens
        if steps is not None and tokens not in (None, steps + 1):
            raise ConfigError(
                f"--speculative-num-draft-tokens {tokens} differs from --speculative-num-steps "
                f"{steps} + 1, which a chain has; leave one of both out",
                param="speculative_num_draft_tokens",
            )
        return steps or (tokens - 1 if tokens is not None else default)


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    drafter: Drafter
    model: DraftModel | None  # None: it drafts without a model
    about: str  # for the log
    fuse: FuseDrafter | None = None  # None: its steps run operator by operator


def refuse_drafts(model: CausalModel) -> None:
    """Raises ConfigError for a model that generates nothing."""
    if isinstance(model, PooledModel):
        raise ConfigError(
            "this model generates nothing that could be drafted", param="speculative_algorithm"
        )
