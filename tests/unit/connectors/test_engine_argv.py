"""A table of vLLM arguments as a command line."""

from __future__ import annotations

import json

import pytest

from connectors.engine_argv import FENCE, abbreviated, fenced, parallel_sizes, server_argv
from connectors.types import ParallelSizes


@pytest.mark.parametrize(
    ("name", "value", "argv"),
    [
        ("max_num_seqs", 8, ["--max-num-seqs", "8"]),
        ("gpu_memory_utilization", 0.5, ["--gpu-memory-utilization", "0.5"]),
        ("enforce_eager", True, ["--enforce-eager"]),
        ("enable_chunked_prefill", False, ["--no-enable-chunked-prefill"]),
        ("served_model_name", ["a", "b c"], ["--served-model-name", "a", "b c"]),
        ("hf_overrides", {"b": 1, "a": {"c": None}}, ["--hf-overrides", '{"a": {"c": null}, "b": 1}']),
        ("lora_modules", [{"name": "x"}], ["--lora-modules", '{"name": "x"}']),
        ("middleware", ["a.B", "c.D"], ["--middleware", "a.B", "--middleware", "c.D"]),
        ("quantization", None, []),
        ("download_dir", "/a b/'c'", ["--download-dir", "/a b/'c'"]),
        ("num_gpu_blocks_override", -1, ["--num-gpu-blocks-override=-1"]),
        ("chat_template", "--{{ x }}", ["--chat-template=--{{ x }}"]),
    ],
)
def test_one_argument(name: str, value: object, argv: list[str]) -> None:
    assert list(server_argv("py", {name: value})) == ["py", "-P", "-m", "vllm.entrypoints.openai.api_server", *argv]


def test_arguments_stand_in_the_order_of_their_names() -> None:
    assert server_argv("py", {"b": 1, "a": 2})[4:] == ("--a", "2", "--b", "1")


def test_a34_a_transfer_config_is_one_element() -> None:
    config = {"kv_connector": "X", "path": "/a b"}
    assert json.loads(server_argv("py", {"kv_transfer_config": config})[-1]) == config


def test_parallel_sizes() -> None:
    sizes = parallel_sizes({"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "data_parallel_size": 3, "seed": 0})
    assert sizes == ParallelSizes(tensor=4, pipeline=2, prefill_context=1, decode_context=1, data=3)
    assert sizes.ranks == 24


@pytest.mark.parametrize(
    ("given", "loaded"),
    [
        (None, [FENCE]),
        ("a.B", ["a.B", FENCE]),
        (["a.B", "c.D"], ["a.B", "c.D", FENCE]),
        ([FENCE, "a.B"], ["a.B", FENCE]),
    ],
)
def test_the_fence_stands_around_the_users_middleware(given: object, loaded: list[str]) -> None:
    assert fenced(given) == loaded


@pytest.mark.parametrize("given", [3, True, {"a": 1}, ["a.B", 3]])
def test_a_middleware_that_is_none(given: object) -> None:
    with pytest.raises(ValueError, match="neither a string nor a list of strings"):
        fenced(given)


@pytest.mark.parametrize("value", [0, -1, True, "2", 1.0, None])
def test_a_size_that_is_none(value: object) -> None:
    with pytest.raises(ValueError, match="^tensor_parallel_size is .*, not a positive integer"):
        parallel_sizes({"tensor_parallel_size": value})


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("tensor_parallel", "tensor_parallel_size"),
        ("ssl_key", "ssl_keyfile"),
        ("dty", "dtype"),
        ("kv_transfer", "kv_transfer_config"),
        ("dtype", None),
        ("max_num_seqs", None),
        ("data_parallel_size_local", None),
    ],
)
def test_the_beginning_of_a_name_with_a_rule(name: str, whole: str | None) -> None:
    assert abbreviated(name) == whole
