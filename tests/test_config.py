"""Options: one definition, four layers, and errors that name what to change."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.config import ALL_RECORDS, Facts, Raw, Resolved, read_raw, resolve
from aserve.errors import ConfigError
from aserve.options.option import options_of

FACTS = Facts(default_model="/bundled/model", default_name="tiny")
NAMES = tuple(option.name for option in options_of(*ALL_RECORDS))


def resolved(**command_line: object) -> Resolved:
    return resolve(Raw(command_line=command_line), FACTS)


def test_a_later_layer_overrides_an_earlier_one_and_leaves_the_rest() -> None:
    raw = Raw(
        file={"port": 1, "overlap_depth": 3, "page-size": 8},
        environment={"ASERVE_PORT": "2", "ASERVE_OVERLAP_DEPTH": "4"},
        command_line={"port": "3"},
    )
    result = resolve(raw, FACTS)
    assert (result.server.port, result.scheduler.overlap_depth, result.kv.page_size) == (3, 4, 8)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (Raw(environment={"ASERVE_PORTS": "1"}), ("ASERVE_PORTS", "ASERVE_PORT?")),
        (Raw(file={"max-model-length": 1}, file_name="a.toml"), ("a.toml", "max-model-len?")),
        (Raw(command_line={"page_sizes": 1}), ("page_sizes", "page_size?")),
    ],
)
def test_an_unknown_option_is_named_with_its_nearest_match(
    raw: Raw, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(raw, FACTS)
    assert all(word in caught.value.message for word in words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", "0"),
        ("page_size", "65"),
        ("page_size", "16.0"),
        ("page_size", True),
        ("overlap_depth", "9"),
        ("overlap_depth", "0"),
        ("port", "65536"),
        ("port", ""),
        ("num_pages", "1"),
        ("dtype", "float8"),
        ("temperature", "nan"),
        ("drain_timeout", "inf"),
        ("drain_timeout", "-1"),
        ("no_prefix_cache", "perhaps"),
        ("log_level", "loud"),
        ("host", 7),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**{name: value})
    assert caught.value.message.startswith(f"--{name.replace('_', '-')} {value}: must be ")


@pytest.mark.parametrize("other", [{"processes": "1"}, {"uds": "a"}])
def test_several_frontends_need_a_port_and_an_engine_of_its_own(other: dict[str, str]) -> None:
    name, value = next(iter(other.items()))
    with pytest.raises(ConfigError, match=f"--{name}"):
        resolved(frontends=2, **other)
    assert getattr(resolved(frontends=1, **other).server, name) == value
    assert resolved(frontends=2).server.frontends == 2
    with pytest.raises(ConfigError, match=r"--sleep-idle-seconds .* needs an engine in a"):
        resolved(sleep_idle_seconds=5, processes="1")


def test_a_prefill_engine_that_no_prompt_of_another_engine_would_wake_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither keep it awake nor wake it"):
        resolved(sleep_idle_seconds=5, disaggregation_mode="prefill")
    assert resolved(sleep_idle_seconds=5, disaggregation_mode="null").server.sleep_idle_seconds == 5


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_eplb": True}, "--enable-eplb moves .* give --expert-parallel-size N, or"),
        ({"enable_eplb": True, "tensor_parallel_size": 2}, "with --enable-expert-parallel$"),
        ({"eplb_num_redundant_experts": 2}, "that --enable-eplb places; give that, too$"),
    ],
)
def test_experts_that_cannot_move_are_refused_by_what_is_missing(
    given: dict[str, object], words: str
) -> None:
    """All were told what --eplb-num-redundant-experts needs, which some had not given."""
    with pytest.raises(ConfigError, match=words):
        resolved(**given)


def test_an_api_key_is_not_empty_and_a_wrong_one_is_not_repeated_in_the_error() -> None:
    with pytest.raises(ConfigError, match="not empty"):
        resolve(Raw(environment={"ASERVE_API_KEY": ""}), FACTS)
    with pytest.raises(ConfigError) as caught:
        resolve(Raw(file={"api-key": 123456}, file_name="f"), FACTS)
    assert "123456" not in caught.value.message


def test_lead_follows_depth_down_but_is_never_cut_silently() -> None:
    assert resolved(overlap_depth=1).scheduler.overlap_lead == 1
    assert resolved(overlap_depth=3).scheduler.overlap_lead == 2
    assert resolved(overlap_depth=3, overlap_lead=3).scheduler.overlap_lead == 3
    staged = resolved(pipeline_parallel_size=3).scheduler
    assert (staged.overlap_depth, staged.overlap_lead) == (None, 1)  # known where ranks meet
    with pytest.raises(ConfigError, match="--overlap-lead 2 is larger than --overlap-depth 1"):
        resolved(overlap_depth=1, overlap_lead=2)
    with pytest.raises(ConfigError, match="the lead is 1"):
        resolved(pipeline_parallel_size=2, overlap_lead=2)


FORMER = {
    "depth": "overlap_depth",
    "lead": "overlap_lead",
    "mixed_prompt_tokens": "max_mixed_prefill_tokens",
}


@pytest.mark.parametrize(("former", "name"), FORMER.items())
def test_a_former_name_still_sets_its_option_everywhere_but_not_beside_the_new_one(
    former: str, name: str
) -> None:
    variable = f"ASERVE_{former.upper()}"
    for raw in (
        Raw(file={former: 1}),
        Raw(file={former.replace("_", "-"): 1}),
        Raw(environment={variable: "1"}),
        Raw(command_line={former: "1"}),
        Raw(file={name: 2}, environment={variable: "1"}),
    ):
        assert getattr(resolve(raw, FACTS).scheduler, name) == 1
    for raw in (
        Raw(file={former: 1, name: 2}, file_name="a.toml"),
        Raw(environment={variable: "1", f"ASERVE_{name.upper()}": "2"}),
    ):
        with pytest.raises(ConfigError, match=f"sets {name} and also {former}"):
            resolve(raw, FACTS)


@pytest.mark.parametrize(
    ("word", "value"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("FALSE", False)]
)
def test_a_switch_in_the_environment_may_be_off(word: str, value: bool) -> None:
    result = resolve(Raw(environment={"ASERVE_NO_PREFIX_CACHE": word}), FACTS)
    assert result.kv.no_prefix_cache is value


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "tiny"),
        ("/bundled/model", "tiny"),
        ("/data/Llama-3", "Llama-3"),
        ("./models/mine", "mine"),
        ("org/Some-Model", "org/Some-Model"),
    ],
)
def test_a_model_is_named_by_its_hub_id_or_its_folder(model: str | None, name: str) -> None:
    given_model = {} if model is None else {"model": model}
    assert resolved(**given_model).model_name == name
    assert resolved(**given_model, served_model_name="x").model_name == "x"
    assert resolved(served_model_name="x, y z,x,").model_names == ("x", "y z")


def test_the_file_may_come_from_the_environment_and_is_parsed_as_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.toml"
    path.write_text("port = 9\nno_prefix_cache = true\nserved-model-name = 'm'\n")
    monkeypatch.setenv("ASERVE_CONFIG", str(path))
    monkeypatch.setenv("ASERVE_PAGE_SIZE", "4")
    monkeypatch.setenv("ASERVE_TEST_PROFILE", "large")  # the tests' own, not an option
    result = resolve(read_raw({}), FACTS)
    assert (result.server.port, result.kv.no_prefix_cache, result.kv.page_size) == (9, True, 4)
    assert result.model_name == "m"


def test_a_yaml_file_has_the_same_options_also_in_other_spellings(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "# as for vLLM\nport: 9\nmax_num_seqs: 7\ncontext-length: 99\nenforce-eager: true\n"
        "allowed-origins: [https://a.example, https://b.example]\n"
    )
    result = resolve(read_raw({"config": str(path)}), FACTS)
    assert (result.server.port, result.scheduler.max_num_seqs) == (9, 7)
    assert (result.model.max_model_len, result.graphs.eager) == (99, True)
    assert result.server.allowed_origins == "https://a.example,https://b.example"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("port: [", "not valid YAML"),
        ("- port", "has no options"),
        ("port: many", "a.yaml: port = many: must be an integer"),
        ("prot: 1", "did you mean port?"),
        ("context-length: 9\nmax-model-len: 8", "sets max-model-len twice"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_bad_yaml_file_is_one_error(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        resolve(read_raw({"config": str(path)}), FACTS)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", [None, "port = ", "port = [1]", "[kv]\npage-size = 1"])
def test_a_bad_file_is_one_error_with_its_name(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "a.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        resolve(read_raw({"config": str(path)}), FACTS)
    assert "a.toml" in caught.value.message
    assert "\n" not in caught.value.message


@given(st.sampled_from(NAMES), st.one_of(st.text(), st.integers(), st.floats(), st.booleans()))
def test_any_value_of_any_option_is_taken_or_refused_with_a_config_error(
    name: str, value: object
) -> None:
    with contextlib.suppress(ConfigError):
        resolved(**{name: value})
