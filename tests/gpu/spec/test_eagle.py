"""EAGLE-1 and EAGLE-3: the bundled drafters accept what plain PyTorch accepts, trees accept more
than chains, published dialects of checkpoints load, and each variant computes its formula.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from aserve.errors import ConfigError
from aserve.gpu.build import BuildOptions, build_executor
from aserve.gpu.executor import TorchExecutor
from aserve.gpu.models.base import CausalModel, LoadPlan
from aserve.gpu.models.load import make_loader
from aserve.gpu.spec import eagle, eagle3
from aserve.gpu.spec.base import HiddenInputs
from aserve.gpu.spec.eagle3 import Eagle3Model
from aserve.gpu.spec.fixed_tree import tree_of
from aserve.gpu.spec.mode import Speculative
from aserve.gpu.spec.recurrent import RecurrentChain
from aserve.gpu.spec.recurrent_model import RecurrentModel
from aserve.gpu.spec.recurrent_tree import RecurrentTree, TreeShape
from aserve.gpu.spec.request import DraftRequest, SpecOptions
from aserve.gpu.spec.tree_growth import TreeSize
from aserve.messages.base import array_i32, pack_i32
from aserve.messages.requests import AdmitRequest
from aserve.tiny import DRAFTERS_DIR, MODEL_DIR
from tests.gpu.drive import Served, make_executor, request, serve
from tests.gpu.plain_engine import plain_tokens
from tests.gpu.spec.draft_files import CONFIG, Shapes, layer_shapes, write_draft
from tests.parity.dense_attend import DenseAttend
from tools.train_tiny.network import Shape, rotate, rotations

EXPECTED = json.loads((DRAFTERS_DIR / "expected_acceptance.json").read_bytes())
PROMPTS: list[list[int]] = EXPECTED["prompts"]
BUNDLED = {"EAGLE": "eagle", "EAGLE3": "eagle3"}
PLAN = LoadPlan(torch.float64)

ASKED = [
    request("greedy", PROMPTS[0], max_tokens=24),
    request("warm", PROMPTS[1], max_tokens=20, temperature=0.8, seed=5),
    request("hot", PROMPTS[20], max_tokens=18, temperature=1.5, seed=6),
]


def make(options: SpecOptions, **settings: Any) -> TorchExecutor:
    settings = {"num_pages": 200, "max_rows": 4, "debug_checks": True, **settings}
    build = BuildOptions(model_dir=MODEL_DIR, speculative=options, **settings)
    return build_executor(build)


def spec(algorithm: str, **options: Any) -> SpecOptions:
    return SpecOptions(algorithm, bundled_drafters=DRAFTERS_DIR, **options)


@cache
def target(dtype: torch.dtype = torch.float64) -> CausalModel:
    return make_loader(MODEL_DIR)[0].load(LoadPlan(dtype))


@cache
def plain() -> dict[tuple[str, int], list[int]]:
    return plain_tokens(ASKED, target())


def num_windows(served: Served, asked: list[AdmitRequest]) -> int:
    """The verified windows of all rows: each sampled once by its prefill."""
    return sum(len(array_i32(batch.sample_rows)) for batch in served.batches) - len(asked)


@pytest.mark.parametrize("algorithm", BUNDLED)
def test_the_bundled_drafter_accepts_what_plain_pytorch_accepts(algorithm: str) -> None:
    expected, *_ = EXPECTED["drafters"][BUNDLED[algorithm]]
    num = 4
    asked = [
        request(str(number), prompt, max_tokens=EXPECTED["max_tokens"], end_ids=(2, 7))
        for number, prompt in enumerate(PROMPTS[:num])
    ]
    served = serve(make(spec(algorithm), dtype="float32", depth=1, lead=1), asked)
    assert num_windows(served, asked) == pytest.approx(
        sum(expected["verifies_by_prompt"][:num]), rel=0.02
    )


def test_a_tree_accepts_more_than_a_chain() -> None:
    asked = [request(str(n), prompt, max_tokens=60) for n, prompt in enumerate(PROMPTS[:3])]

    def windows(**options: int) -> int:
        executor = make(spec("EAGLE", num_steps=3, **options), dtype="float32", depth=1, lead=1)
        return num_windows(serve(executor, asked), asked)

    assert windows(topk=4, num_draft_tokens=16) < windows()


def test_a_static_tree_stands_beside_a_prediction() -> None:
    """A row with a prediction verifies a chain of more drafts than the tree has, as long as it may
    have so many tokens."""
    long = request("long", PROMPTS[2], max_tokens=60)
    expected = plain_tokens([long], target())["long", 0]
    asked = [msgspec.structs.replace(long, prediction_ids=pack_i32(expected)), ASKED[1]]
    executor = make(spec("EAGLE", token_tree="static"), dtype="float64", depth=1, lead=1)
    served = serve(executor, asked)
    assert served.outputs == {("long", 0): expected, ("warm", 0): plain()["warm", 0]}
    longest = [array_i32(batch.query_lens).max() for batch in served.batches if batch.verify]
    assert max(longest) == 27  # the tree has 25 nodes
    assert num_windows(served, asked) <= 20


def head_shapes(size: int = 64, *, draft_vocab: int = 2048) -> Shapes:
    """An EAGLE-3 drafter of hidden size `size` for the bundled model, with names of their own."""
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        **layer_shapes("layers.0", width=size, in_features=2 * size),
        **{f"layers.0.{name}.weight": (size,) for name in norms},
        "fc.weight": (size, 3 * 128),
        "norm.weight": (size,),
        "lm_head.weight": (draft_vocab, size),
        "embed_tokens.weight": (2048, size),
    }


HEAD_CONFIG = {
    **CONFIG,
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 64,
    "target_hidden_size": 128,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
}


def load(directory: Path, *, algorithm: Any = eagle3) -> RecurrentModel:
    options = SpecOptions("EAGLE3", draft_model_dir=directory)
    model: RecurrentModel = algorithm.load(DraftRequest(options, target(), PLAN)).model
    return model


def outputs(model: RecurrentModel) -> Tensor:
    """The logits of a short text, from random streams."""
    generator = torch.Generator().manual_seed(1)
    streams = torch.randn(len(model.inputs.layer_ids), 5, 128, generator=generator).double()
    ids = torch.tensor([5, 900, 17, 17, 2047])
    hidden = model.fuse(tuple(streams))
    for _ in range(2):  # the second run reads what the first one returned
        hidden = model.forward(ids, torch.arange(5), DenseAttend(), hidden=hidden)
    return model.logits(hidden)


DIALECTS: dict[str, dict[str, Any]] = {
    "prefixed": {"rename": lambda name: f"model.{name}"},
    "midlayer": {"rename": lambda name: name.replace("layers.0.", "midlayer.")},
    "transformers 5": {
        "config": {
            **{k: v for k, v in HEAD_CONFIG.items() if k not in ("rope_theta", "torch_dtype")},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "dtype": "float32",
        }
    },
    "speculators": {
        "config": {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 2048,
            "target_hidden_size": 128,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 5],  # the layers that the streams enter
            "transformer_layer_config": {**CONFIG, "hidden_size": 64, "architectures": None},
        }
    },
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_published_dialects_load_as_the_same_model(tmp_path: Path, dialect: str) -> None:
    plain_dir = write_draft(tmp_path / "plain", head_shapes(), HEAD_CONFIG)
    other = {"config": HEAD_CONFIG, **DIALECTS[dialect]}
    same, model = load(plain_dir), load(write_draft(tmp_path / "other", head_shapes(), **other))
    assert model.inputs == same.inputs == HiddenInputs(layer_ids=(0, 2, 4))
    assert torch.equal(outputs(model), outputs(same))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_fc": {"input_norm.weight": (3 * 128,)},
    "fc_norm": {f"fc_norm.{i}.weight": (128,) for i in range(3)},
    "norm_before_residual": {},
    "norm_output": {},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_b02_each_variant_of_eagle_3_computes_its_formula(tmp_path: Path, variant: str) -> None:
    shapes = {**head_shapes(), **VARIANTS[variant]}
    config = {**HEAD_CONFIG, "eagle_config": {**HEAD_CONFIG["eagle_config"], variant: True}}
    model = load(write_draft(tmp_path, shapes, config))
    assert isinstance(model, Eagle3Model)
    weights = {name: value.double() for name, value in _stored(tmp_path).items()}
    generator = torch.Generator().manual_seed(1)
    streams = torch.randn(3, 5, 128, generator=generator).double()
    ids = torch.tensor([5, 900, 17, 17, 2047])
    norm = partial(_norm, weights)
    if variant == "fc_norm":
        streams = torch.stack([norm(f"fc_norm.{i}", streams[i]) for i in range(3)])
    joined = torch.cat(tuple(streams), dim=1)
    if variant == "norm_before_fc":
        joined = norm("input_norm", joined)
    hidden = joined @ weights["fc.weight"].T
    for _ in range(2):
        hidden = _layer(weights, ids, hidden, is_normed=variant == "norm_before_residual")
        if variant == "norm_output":
            hidden = norm("norm", hidden)
    last = hidden if variant == "norm_output" else norm("norm", hidden)
    expected = last @ weights["lm_head.weight"].T
    torch.testing.assert_close(outputs(model), expected, rtol=1e-6, atol=1e-6)


def _layer(weights: dict[str, Tensor], ids: Tensor, hidden: Tensor, *, is_normed: bool) -> Tensor:
    """The layer of EAGLE-3 in plain torch. [tokens, 64] -> the same."""
    head_dim, at = 64 // 4, "layers.0."
    shape = Shape(head_dim=head_dim)
    cos, sin = (each[: len(ids)].double() for each in rotations(shape))
    embedded = _norm(weights, f"{at}input_layernorm", weights["embed_tokens.weight"][ids])
    normed = _norm(weights, f"{at}hidden_norm", hidden)
    x = torch.cat((embedded, normed), dim=1)

    def heads(name: str) -> Tensor:
        return (x @ weights[f"{at}self_attn.{name}.weight"].T).unflatten(1, (-1, head_dim))

    q, k = (rotate(heads(name).transpose(0, 1), cos, sin) for name in ("q_proj", "k_proj"))
    mixed = functional.scaled_dot_product_attention(
        q[None], k[None], heads("v_proj").transpose(0, 1)[None], is_causal=True, enable_gqa=True
    )[0]
    out = mixed.transpose(0, 1).flatten(1) @ weights[f"{at}self_attn.o_proj.weight"].T
    hidden = (normed if is_normed else hidden) + out
    x = _norm(weights, f"{at}post_attention_layernorm", hidden)
    gate, up = (x @ weights[f"{at}mlp.{name}.weight"].T for name in ("gate_proj", "up_proj"))
    return hidden + (functional.silu(gate) * up) @ weights[f"{at}mlp.down_proj.weight"].T


def _norm(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], 1e-5)


def _stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def test_a_reduced_vocabulary_is_named_by_differences(tmp_path: Path) -> None:
    config = {**HEAD_CONFIG, "draft_vocab_size": 4}
    ids = torch.tensor([3, 10, 11, 2047])
    shapes = head_shapes(draft_vocab=4)
    tables = {"d2t": ids - torch.arange(4), "t2d": torch.zeros(2048, dtype=torch.bool)}
    model = load(write_draft(tmp_path, shapes, config, integers=tables))
    assert model.token_ids is not None
    assert torch.equal(model.token_ids, ids)
    assert outputs(model).shape == (5, 4)
    for wrong, message in (
        ({}, "no tensor d2t"),
        ({"d2t": ids}, "d2t leads out of the model's 2048 tokens"),
        ({"d2t": torch.zeros(5, dtype=torch.int64)}, r"d2t has the shape \(5,\)"),
    ):
        write_draft(tmp_path, shapes, config, integers=wrong)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)


def test_a_head_that_is_missing_is_the_targets(tmp_path: Path) -> None:
    shapes = {**head_shapes(128)}
    own = {name: shape for name, shape in shapes.items() if name[:4] not in ("lm_h", "embe")}
    config = {**HEAD_CONFIG, "hidden_size": 128, "draft_vocab_size": None}
    model = load(write_draft(tmp_path, own, config))
    hidden = torch.randn(2, 128, generator=torch.Generator().manual_seed(1)).double()
    normed = _norm({"norm.weight": _stored(tmp_path)["norm.weight"].double()}, "norm", hidden)
    torch.testing.assert_close(model.logits(hidden), target().logits(normed))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 64}, "target_hidden_size is 64, but"),
        ({"vocab_size": 2000}, "2000 tokens, and the model has 2048"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}}, "layers 0 to 5"),
        ({"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "reads three hidden streams"),
        ({"draft_vocab_size": 7}, "7 of the model's 2048 tokens"),
        ({"num_hidden_layers": 2}, "missing: model.layers.1"),
        ({"norm_before_fc": True}, "missing: input_norm.weight"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, r"windows of \[8\] tokens"),
        ({"layer_types": ["sliding_attention"] * 36, "sliding_window": 8}, "a list of 1 strings"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_draft(tmp_path, head_shapes(), {**HEAD_CONFIG, **changes})
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("has_bias", [False, True])
def test_eagle_1_takes_biases_as_its_checkpoint_has_them(tmp_path: Path, has_bias: bool) -> None:
    """Qwen2's drafters have biases of queries, keys and values, and `fc` may have one."""
    shapes: dict[str, tuple[int, ...]] = {
        **layer_shapes("layers.0", width=128),
        "layers.0.post_attention_layernorm.weight": (128,),
        "fc.weight": (128, 256),
    }
    if has_bias:
        shapes["fc.bias"] = (128,)
        names = {"q": 128, "k": 64, "v": 64}
        shapes |= {f"layers.0.self_attn.{x}_proj.bias": (size,) for x, size in names.items()}
    model = load(write_draft(tmp_path, shapes), algorithm=eagle)
    ids, hidden = torch.tensor([5, 6]), torch.zeros(2, 128, dtype=torch.float64)
    made = model.forward(ids, torch.arange(2), DenseAttend(), hidden=hidden)
    assert model.logits(made).shape == (2, 2048)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 64}))
    with pytest.raises(ConfigError, match="hidden_size is 64, but"):
        load(tmp_path, algorithm=eagle)


class Recorded:
    """A draft model that keeps what it returned for the last token of each forward."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.last: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, *args: Any, **named: Any) -> Tensor:
        hidden: Tensor = self.model.forward(*args, **named)
        self.last.append(hidden[-1].clone())
        return hidden


@pytest.mark.parametrize(
    "shape", [TreeSize(3, 1, 3), tree_of(((0,), (0, 0), (0, 0, 0)), torch.device("cpu"))]
)
def test_a_tree_of_one_branch_computes_what_a_chain_computes(shape: TreeShape) -> None:
    """Tokens, positions, masks and hidden states: the model returns the same in every forward."""

    def run(*, is_tree: bool) -> tuple[Served, list[Tensor]]:
        loaded = eagle3.load(DraftRequest(spec("EAGLE3", num_steps=3), target(), PLAN))
        model, chain = Recorded(loaded.model), loaded.drafter
        assert isinstance(chain, RecurrentChain)
        drafter = RecurrentTree(chain, shape) if is_tree else chain
        mode = Speculative(drafter)
        executor = make_executor(target(), mode=mode, drafter=model, depth=1, lead=1, graph_rows=0)
        return serve(executor, ASKED[:1]), model.last

    (chained, expected), (grown, got) = run(is_tree=False), run(is_tree=True)
    assert grown.outputs == chained.outputs
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
