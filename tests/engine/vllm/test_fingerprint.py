"""The namespace's fields: stable where bytes mean the same, different where they do not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment: make test has it")
import torch

from kvtier.engine.vllm.fingerprint import _model_fields, _plain, _shapes, _weights

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kernel_blocks", [1, 4])
def test_the_number_of_blocks_does_not_matter(kernel_blocks: int) -> None:
    # 16 blocks are as many as a block has tokens, and kernels may see a block as several of their own.
    fields = [
        _shapes({"layer": torch.empty(blocks * kernel_blocks, 2, 16, 8)}, num_blocks=blocks) for blocks in (5, 16, 2)
    ]
    assert fields[0] == fields[1] == fields[2]


def test_kernel_blocks_shape_order_and_type_matter() -> None:
    plain = torch.empty(6, 4, 16, 8)
    different = [plain, torch.empty(12, 4, 16, 8), torch.empty(6, 16, 4, 8), plain.half(), plain.transpose(1, 2)]
    fields = [_shapes({"layer": tensor}, num_blocks=6) for tensor in different]
    assert all(fields.count(one) == 1 for one in fields)


def test_sets_and_objects_are_the_same_in_every_process() -> None:
    code = (
        "from kvtier.engine.vllm.fingerprint import _plain\n"
        "print(_plain({'keys': {'a', 'b', 'c', 'd', 'e'}, 'inner': [frozenset('xyz')], 'object': object()}))"
    )
    path = os.pathsep.join([str(Path(__file__).parents[3] / "src"), os.environ.get("PYTHONPATH", "")])
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert " at 0x" not in str(_plain({"object": object()}))


def test_weights_are_told_apart_by_content_in_a_directory_and_as_one_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    seen = []
    for content in (b"a" * 100, b"b" * 100):
        path.write_bytes(content)
        seen += [_weights(str(tmp_path), None), _weights(str(path), None)]
    assert seen[0] != seen[2]
    assert seen[1] != seen[3]


def test_a_repository_without_a_cache_goes_by_the_commit_of_its_configuration() -> None:
    assert _weights("nobody/nothing", None, "c0ffee") == {"repository": "nobody/nothing", "revision": "c0ffee"}
    assert _weights("nobody/nothing", "v2") == {"repository": "nobody/nothing", "revision": "v2"}


def test_where_a_model_lies_is_left_out_of_nested_configurations_too() -> None:
    config = {"size": 1, "_name_or_path": "/a", "text_config": {"_name_or_path": "/b", "transformers_version": "5"}}
    assert _model_fields(config) == {"size": 1, "text_config": {}}
    assert _plain({0: float("inf"), "x": {1: (2, None)}}) == {"0": "inf", "x": {"1": [2, None]}}
