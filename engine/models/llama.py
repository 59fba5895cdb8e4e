"""The Llama family's decoder: Llama, Mistral, Qwen2 and Qwen3 differ by switches of ModelConfig."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionLayer
from engine.attention.forward_batch import ForwardBatch
from engine.checkpoint.layout import rank_calls
from engine.checkpoint.model_config import ModelConfig
from engine.device.distributed import ParallelState
from engine.layers.activation import SiluAndMul
from engine.layers.adapted import AdaptedLinears
from engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from engine.layers.expert_counts import ExpertCounts
from engine.layers.fused_ops import FusedOps
from engine.layers.layernorm import RMSNorm
from engine.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from engine.layers.rotary import RotaryEmbedding, StepRope
from engine.layers.weights import WeightSource
from engine.models.recorded_decodes import RecordedDecodes

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Attention:
    """Projections, norms of q and k if the model has them, rotation, and the backend's call."""

    def __init__(
        self,
        config: ModelConfig,
        layer: AttentionLayer,
        parallel: ParallelState,
        fused: FusedOps | None,
    ) -> None:
        self.layer = layer
        self.qkv = QKVParallelLinear(config, parallel)
        self.o = RowParallelLinear(
            config.num_heads * config.head_dim, config.hidden_size, config.o_bias, parallel
        )
        self.num_heads = self.qkv.num_heads
        self.num_qk_heads = self.qkv.num_heads + self.qkv.num_kv_heads
        self.num_qkv_heads = self.num_qk_heads + self.qkv.num_kv_heads
        self.head_dim = config.head_dim
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, fused)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, fused)

    def load(self, source: WeightSource, prefix: str) -> None:
        self.qkv.load(source, (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"))
        self.o.load(source, f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.load(source, f"{prefix}.q_norm.weight")
            self.k_norm.load(source, f"{prefix}.k_norm.weight")

    def __call__(
        self,
        x: Tensor,
        rope: StepRope,
        backend: AttentionBackend,
        batch: ForwardBatch,
        only_sampled: bool,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden], or [N, hidden] of the tokens `batch.logits_rows`."""
        qkv = self.qkv(x).view(-1, self.num_qkv_heads, self.head_dim)
        v = qkv[:, self.num_qk_heads :]
        # A backend that rotates does so in one pass with the write to its pool.
        angles = rope.angles if backend.rotates and not only_sampled else None
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(qkv[:, : self.num_heads])
            k = self.k_norm(qkv[:, self.num_heads : self.num_qk_heads])
            if angles is None:
                q, k = rope.rotate(q, k)
        elif angles is not None:
            q, k = qkv[:, : self.num_heads], qkv[:, self.num_heads : self.num_qk_heads]
        else:
            q, k = rope.rotate_joint(qkv[:, : self.num_qk_heads], self.num_heads)
        if angles is not None:
            return self.o(backend.forward_rotating(q, k, v, angles, self.layer, batch))
        if only_sampled:
            q = q.index_select(0, batch.logits_rows)
            return self.o(backend.forward_sampled(q, k, v, self.layer, batch))
        return self.o(backend.forward(q, k, v, self.layer, batch))


class MLP:
    """The feed-forward block: down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: ModelConfig, parallel: ParallelState, fused: FusedOps | None
    ) -> None:
        size = config.intermediate_size
        self.gate_up = MergedColumnParallelLinear(
            config.hidden_size, (size, size), config.mlp_bias, parallel
        )
        self.down = RowParallelLinear(size, config.hidden_size, config.mlp_bias, parallel)
        self.act = SiluAndMul(fused)

    def load(self, source: WeightSource, prefix: str) -> None:
        self.gate_up.load(source, (f"{prefix}.gate_proj", f"{prefix}.up_proj"))
        self.down.load(source, f"{prefix}.down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down(self.act(self.gate_up(x)))


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(
        self,
        config: ModelConfig,
        layer: AttentionLayer,
        parallel: ParallelState,
        fused: FusedOps | None,
    ) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fused)
        self.attention = Attention(config, layer, parallel, fused)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fused)
        self.mlp = MLP(config, parallel, fused)

    @property
    def linears(self) -> tuple[MergedColumnParallelLinear | RowParallelLinear, ...]:
        """All matrices of the layer."""
        attention, mlp = self.attention, self.mlp
        return attention.qkv, attention.o, mlp.gate_up, mlp.down

    def load(self, source: WeightSource, prefix: str) -> None:
        self.input_norm.load(source, f"{prefix}.input_layernorm.weight")
        self.attention.load(source, f"{prefix}.self_attn")
        self.post_norm.load(source, f"{prefix}.post_attention_layernorm.weight")
        self.mlp.load(source, f"{prefix}.mlp")

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: StepRope,
        backend: AttentionBackend,
        batch: ForwardBatch,
        only_sampled: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The output and the residual, each [T, hidden]; they are not added yet.

        `only_sampled`: [N, hidden] of the tokens `batch.logits_rows`. All tokens' keys and values
        are still written, but nothing else is computed for the others.
        """
        x, residual = self.input_norm.add_and_norm(x, residual)
        x = self.attention(x, rope, backend, batch, only_sampled)
        if only_sampled:
            residual = residual.index_select(0, batch.logits_rows)
        x, residual = self.post_norm.add_and_norm(x, residual)
        return self.mlp(x), residual


class LlamaModel:
    """One pipeline stage of the decoder: its layers, the embedding if first, the head if last."""

    plans_attention = False

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelState,
        max_positions: int,
        fused: FusedOps | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.parallel = parallel
        self.layer_range = config.stage_layers(parallel.pp_size)[parallel.pp_rank]
        self.attention_layers = tuple(
            AttentionLayer(number, call)
            for number, call in enumerate(
                rank_calls(config.calls, parallel.tp_size, self.layer_range)
            )
        )
        self.fused = fused
        self.layers = [
            DecoderLayer(config, layer, parallel, fused) for layer in self.attention_layers
        ]
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope, device, fused)
        size = (config.vocab_size, config.hidden_size)
        self.embedding = (
            VocabParallelEmbedding(*size, parallel) if parallel.is_first_stage else None
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fused)
        self.head = ParallelLMHead(*size, parallel) if parallel.is_last_stage else None
        self.recorded: RecordedDecodes | None = None
        if self.layers:
            self.recorded = RecordedDecodes.of(self._run_layers, fused, parallel)

    def load(
        self, source: WeightSource, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Read the stage's weights; `progress(done, total)` after each layer."""
        tied = self.config.tie_word_embeddings
        embedding, head = EMBEDDING, HEAD
        if tied and not source.holds(HEAD):
            head = EMBEDDING
        elif tied and not source.holds(EMBEDDING):
            embedding = HEAD
        if self.embedding is not None and self.head is not None and tied:
            # Before the layers: while it is packed, the matrix is in memory twice.
            self.embedding.load_tied(source, embedding, self.head, head)
        elif self.embedding is not None:
            self.embedding.load(source, embedding)
        for done, (index, layer) in enumerate(zip(self.layer_range, self.layers, strict=True), 1):
            layer.load(source, f"model.layers.{index}")
            if progress is not None:
                progress(done, len(self.layers))
        if self.head is None:
            return
        self.norm.load(source, "model.norm.weight")
        if not tied or self.embedding is None:
            self.head.load(source, head)

    def count_experts(self) -> dict[int, ExpertCounts]:
        return {}

    def allocate(self, num_rows: int) -> None:
        """Keys and values are all that it keeps."""

    def adapt(self, linears: AdaptedLinears) -> None:
        for layer in self.layers:
            for linear in layer.linears:
                linear.adapt(linears)

    def forward(
        self,
        batch: ForwardBatch,
        backend: AttentionBackend,
        hidden: Tensor | None,
        *,
        only_sampled: bool = False,
    ) -> Tensor:
        """Run the stage's layers: [T, hidden] before the final norm.

        `hidden` is the previous stage's result, None on the first stage. `only_sampled`, for the
        last stage and a backend that `supports_sampled_queries`: [N, hidden] of the tokens
        `batch.logits_rows`. The last layer then skips the others, whose outputs nothing reads.
        """
        if self.embedding is not None:
            hidden = self.embedding(batch.input_ids)
        elif hidden is not None and self.fused is not None:
            hidden = hidden.clone()  # the caller owns it; fused norms add to it in place
        if hidden is None:
            raise ValueError("a later pipeline stage needs the previous stage's hidden states")
        done: tuple[Tensor, Tensor | None] | None = None
        if self.recorded is not None and not only_sampled:
            done = self.recorded(hidden, batch, backend)
        hidden, residual = done or self._run_layers(hidden, batch, backend, only_sampled)
        return hidden if residual is None else hidden.add_(residual)

    def _run_layers(
        self,
        hidden: Tensor,
        batch: ForwardBatch,
        backend: AttentionBackend,
        only_sampled: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output and the residual behind the last layer, as `DecoderLayer` returns them."""
        rope = self.rotary.lookup(batch.positions, self.dtype)
        residual: Tensor | None = None
        for layer in self.layers:
            is_last = layer is self.layers[-1]
            hidden, residual = layer(
                hidden, residual, rope, backend, batch, only_sampled and is_last
            )
            if batch.mark is not None:
                batch.mark()
        return hidden, residual

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The norm behind the last layer: [N, hidden] -> [N, hidden], new. Last stage only."""
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [N, hidden] -> [N, vocab_size], of the model's type or float32. Last
        stage only; collective over the tensor parallel group."""
        if self.head is None:
            raise ValueError("only the last pipeline stage has the output head")
        return self.head(self.norm(hidden))
