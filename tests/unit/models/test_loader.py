"""Reading checkpoints: shards, ties, splits, and what is refused with which words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.base import AttentionInputs, AttentionLayer
from engine.attention.kv_pool import MHATokenToKVPool
from engine.checkpoint.layout import AttentionCall
from engine.checkpoint.model_config import ModelConfig
from engine.config import EngineConfig
from engine.device.distributed import ParallelState
from engine.errors import ConfigError
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.layers.embedding_table import RowTable
from engine.layers.linear import QKVParallelLinear, RowParallelLinear
from engine.layers.linear_kernel import (
    TRANSPOSED_MAX_NUMEL,
    DenseKernel,
    PackedKernel,
    SharedRowsKernel,
    TransposedKernel,
    can_pack,
    make_linear_kernel,
)
from engine.layers.weights import DummySource, SafetensorsSource
from engine.models.loader import load_model, resolve_dtype
from engine.registry import ATTENTION_BACKENDS
from engine.worker.sizing.estimate import kv_bytes_per_token, profile_max_tokens
from tests.support.models import changed, make_config, make_model
from tests.support.step_driver import StepDriver, make_runner

CPU = torch.device("cpu")
SINGLE = ParallelState.single()


def logits_of(folder: Path) -> torch.Tensor:
    driver = StepDriver(make_runner(str(folder)))
    logits, _ = driver.run([(driver.add([5, 9, 100]), 3)], [])
    assert logits is not None
    return logits


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or (None) remove tensors; keys have "__" for "."."""
    weights = load_file(folder / "model.safetensors")
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "LlamaForCausalLM")


def test_sharded_files_give_the_same_model(folder: Path, tmp_path: Path) -> None:
    sharded = make_model(tmp_path / "sharded", "LlamaForCausalLM", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(folder), logits_of(sharded))


def test_checkpoints_saved_without_the_head_give_the_same_model(tmp_path: Path) -> None:
    """As those of models that only embed: no name begins with "model."."""
    folder = make_model(tmp_path, "Qwen3ForCausalLM", head_dim=16, tie_word_embeddings=True)
    expected = logits_of(folder)
    file = folder / "model.safetensors"
    weights = {name.removeprefix("model."): value for name, value in load_file(file).items()}
    assert "embed_tokens.weight" in weights and "lm_head.weight" not in weights
    save_file(weights, file)
    assert torch.allclose(logits_of(folder), expected, atol=1e-5)


def test_index_naming_a_missing_file(tmp_path: Path) -> None:
    sharded = make_model(tmp_path / "sharded", "LlamaForCausalLM", max_shard_size="40KB")
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=gone.name):
        make_runner(str(sharded))


def test_pickled_weights_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*safetensors"):
        make_runner(str(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors"):
        make_runner(str(folder))


def test_damaged_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(ConfigError, match=r"model\.safetensors can't be read"):
        make_runner(str(folder))


def test_own_code_and_unknown_architectures_are_refused(folder: Path) -> None:
    edit_config(folder, architectures=["RwkvForCausalLM"], model_type="rwkv")
    with pytest.raises(ConfigError, match="RwkvForCausalLM"):
        make_runner(str(folder))
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Evil"}, model_type="evil")
    with pytest.raises(ConfigError, match="auto_map"):
        make_runner(str(folder))


def test_missing_and_misshapen_weights_are_named(folder: Path) -> None:
    edit_weights(folder, model__layers__1__mlp__up_proj__weight=torch.zeros(48, 31))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight.*\[48, 31\].*\[48, 32"):
        make_runner(str(folder))
    edit_weights(folder, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ConfigError, match=r"lacks.*model\.layers\.1\.mlp\.up_proj\.weight"):
        make_runner(str(folder))


def test_untied_checkpoint_without_head_is_named(folder: Path) -> None:
    edit_weights(folder, lm_head__weight=None)
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        make_runner(str(folder))
    edit_config(folder, tie_word_embeddings=True)
    runner = make_runner(str(folder))
    assert runner.model.head is not None and runner.model.embedding is not None
    kernel, table = runner.model.head.kernel, runner.model.embedding.table
    assert isinstance(kernel, SharedRowsKernel) and isinstance(table, RowTable)
    assert kernel.weight is table.weight


def test_quantized_weights_are_refused(folder: Path) -> None:
    edit_weights(folder, model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*int8"):
        make_runner(str(folder))


def test_weights_are_converted(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({k: v.to(torch.bfloat16) for k, v in weights.items()}, folder / "model.safetensors")
    source = SafetensorsSource(folder, torch.float32, CPU)
    name = "model.layers.0.mlp.down_proj.weight"
    part = source.get(name, (32, 48), dim=1, start=16, count=8)
    assert part.dtype == torch.float32 and part.is_contiguous()
    assert torch.equal(part, weights[name].bfloat16().float()[:, 16:24])


def test_bfloat16_is_close_to_float32(folder: Path) -> None:
    wide = logits_of(folder)
    driver = StepDriver(make_runner(str(folder), dtype="bfloat16"))
    req = driver.add([5, 9, 100])
    driver.run([(req, 2)], [])
    narrow, _ = driver.run([], [req])
    assert narrow is not None and narrow.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(wide, narrow) > 0.99


def test_dummy_weights_are_seeded_and_split_alike(folder: Path) -> None:
    first, same = (DummySource(3, torch.float32, CPU) for _ in range(2))
    other = DummySource(4, torch.float32, CPU)
    whole = first.get("a.weight", (6, 4))
    assert torch.equal(whole[:, 1:3], same.get("a.weight", (6, 4), dim=1, start=1, count=2))
    assert not torch.equal(whole, other.get("a.weight", (6, 4)))
    (folder / "model.safetensors").unlink()
    driver = StepDriver(make_runner(str(folder), load_format="dummy"))
    logits, _ = driver.run([(driver.add([5, 9, 100]), 3)], [])
    assert logits is not None and bool(logits.isfinite().all()) and float(logits.std()) > 0.1


def test_progress_is_reported(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    config = make_config(folder, max_model_len=16)
    load_model(config, SINGLE, CPU, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_unknown_words_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="int4"):
        resolve_dtype("int4")
    with pytest.raises(ConfigError, match="load_format 'gguf'"):
        make_runner(str(folder), load_format="gguf")
    with pytest.raises(ConfigError, match="max_model_len"):
        make_runner(str(folder), max_model_len=513)
    layer = AttentionLayer(0, AttentionCall(1, 1, 1, 1, 1.0))
    pool = MHATokenToKVPool(1, 1, [layer.call], torch.float32, CPU)
    inputs = AttentionInputs(pool, torch.zeros(1, 1, dtype=torch.int32), (layer,))
    with pytest.raises(ConfigError, match=r"'flashattention9'.*torch"):
        ATTENTION_BACKENDS["flashattention9"](inputs)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_splits_add_up(folder: Path, tp_size: int) -> None:
    """Column shards side by side and row shards summed give the whole layer's result."""
    source = SafetensorsSource(folder, torch.float32, CPU)
    config = ModelConfig.from_pretrained(folder)
    x = torch.randn(5, 32)
    names = tuple(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")

    def qkv(parallel: ParallelState) -> list[torch.Tensor]:
        layer = QKVParallelLinear(config, parallel)
        layer.load(source, names)
        return list(layer(x).split(list(layer.local_sizes), dim=1))

    def down(parallel: ParallelState, part: torch.Tensor) -> torch.Tensor:
        layer = RowParallelLinear(48, 32, False, parallel)
        layer.load(source, "model.layers.0.mlp.down_proj")
        return layer.kernel(part)

    states = [ParallelState(rank, tp_size, 0, 1) for rank in range(tp_size)]
    whole, parts = qkv(SINGLE), [qkv(state) for state in states]
    torch.testing.assert_close(torch.cat([p[0] for p in parts], 1), whole[0])
    step = max(1, tp_size // 2)  # two key/value heads: with four ranks two hold each
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([p[i] for p in parts[::step]], 1), whole[i])
    y = torch.randn(5, 48)
    summed = sum(down(state, part) for state, part in zip(states, y.chunk(tp_size, 1), strict=True))
    torch.testing.assert_close(summed, down(SINGLE, y))


def test_vocabulary_is_padded_to_the_ranks(folder: Path) -> None:
    """211 tokens over 4 ranks: 53 rows each, the last one has one row of padding."""
    source = SafetensorsSource(folder, torch.float32, CPU)
    heads = []
    for rank in range(4):
        head = ParallelLMHead(211, 32, ParallelState(rank, 4, 0, 1))
        head.load(source, "lm_head.weight")
        heads.append(head.kernel(torch.eye(32)))
    joined = torch.cat(heads, dim=1)
    assert joined.shape == (32, 212) and bool((joined[:, 211] == 0).all())
    torch.testing.assert_close(
        joined[:, :211].t(), load_file(folder / "model.safetensors")["lm_head.weight"]
    )
    far = VocabParallelEmbedding(5, 32, ParallelState(3, 4, 0, 1))
    far.load(DummySource(0, torch.float32, CPU), "e.weight")
    assert isinstance(far.table, RowTable)
    assert far.table.weight.shape == (2, 32) and not far.table.weight.any()


def test_impossible_splits_are_refused(folder: Path) -> None:
    config = EngineConfig(model=str(folder), tp_size=3)
    with pytest.raises(ConfigError, match=r"tp_size \(3\).*4 attention heads"):
        config.resolve()
    model = replace(ModelConfig.from_pretrained(folder), num_heads=12, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"tp_size \(6\).*4 key/value heads, or be a multiple"):
        model.check_split(6, 1)
    with pytest.raises(ConfigError, match=r"tp_size \(32\).*intermediate size 48"):
        replace(model, num_heads=32).check_split(32, 1)
    model.check_split(12, 3)
    assert [model.local_kv_heads(n) for n in (1, 2, 4, 8)] == [4, 2, 1, 1]


@pytest.mark.parametrize("shape", [(48, 32), (1200, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_kernels_agree(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    offset = torch.randn(shape[0]).to(dtype) if bias else None
    kernel = make_linear_kernel(weight, offset)
    small_float = dtype == torch.float32 and weight.numel() <= TRANSPOSED_MAX_NUMEL
    packed = PackedKernel if can_pack(dtype) else DenseKernel
    assert type(kernel) is (TransposedKernel if small_float else packed)
    for rows in (1, 2, 5, 70):
        x = torch.randn(rows, shape[1]).to(dtype)
        wanted = torch.nn.functional.linear(x, weight, offset)
        tolerance = 1e-4 if dtype == torch.float32 else 0.5
        torch.testing.assert_close(kernel(x), wanted, rtol=tolerance, atol=tolerance)
        if not bias:
            torch.testing.assert_close(
                SharedRowsKernel(weight)(x), wanted, rtol=tolerance, atol=tolerance
            )


def test_memory_sizing(folder: Path) -> None:
    config = make_config(folder, memory_fraction=0.5)
    # 3 layers, 2 key/value heads of 8, keys and values, 4 bytes
    assert kv_bytes_per_token(config, torch.float32) == 3 * 2 * 8 * 2 * 4
    split = changed(config, tp_size=2, pp_size=3)
    assert kv_bytes_per_token(split, torch.bfloat16) == 1 * 1 * 8 * 2 * 2
    tokens = profile_max_tokens(config)
    assert 0 < tokens * 2 * 384 <= 4 << 30
    with pytest.raises(ConfigError, match="no room for a KV cache"):
        profile_max_tokens(changed(config, memory_fraction=0.0))
