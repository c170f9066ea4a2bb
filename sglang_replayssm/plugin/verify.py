"""The verify step on SGLang's side: attention layer, conv rollback and commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_replayssm.plugin.launch import commit, commit_conv, convolve, fold_due, materialize, plan_window, verify
from sglang_replayssm.plugin.pool import ring_of

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def forward_extend(
    original,
    self: GDNAttnBackend,
    layer: RadixLinearAttention,
    forward_batch: ForwardBatch,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **kwargs,
) -> torch.Tensor:
    """AROUND GDNAttnBackend.forward_extend: a target verify runs from checkpoint and ring.

    Args:
        mixed_qkv: [N, (2 H K + HV V)], N = batch rows x draft tokens. a, b: [N, HV].

    Returns:
        [1, N, HV, V] in the dtype of mixed_qkv; zeros for padding rows.
    """
    pool = ring_of(self.req_to_token_pool)
    if pool is None or not forward_batch.forward_mode.is_target_verify():
        return original(self, layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs)

    tokens, drafts = mixed_qkv.shape[0], forward_batch.spec_info.draft_token_num
    batch = tokens // drafts
    if batch == 0:  # a data-parallel rank without rows
        return mixed_qkv.new_empty(1, 0, layer.num_v_heads, layer.head_v_dim)
    cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    index = self.req_to_token_pool.mamba_map[layer.layer_id]
    if index == 0:  # once a step, on the stream that the layers run on
        slots = self.forward_metadata.mamba_cache_indices[:batch]
        plan_window(pool.cursors, forward_batch.req_pool_indices[:batch], slots)

    qkv = convolve(
        mixed_qkv,
        cache.conv[0],
        layer.conv_weights,
        layer.bias,
        layer.activation,
        cache.intermediate_conv_window[0],
        pool.cursors,
        drafts,
    )
    q, k, v = qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    out = verify(
        q.view(tokens, layer.num_q_heads, layer.head_q_dim),
        k.view(tokens, layer.num_k_heads, layer.head_k_dim),
        v.view(tokens, layer.num_v_heads, layer.head_v_dim),
        a,
        b,
        layer.A_log,
        layer.dt_bias,
        cache.temporal,
        pool.ring.layer(index),
        pool.cursors,
        drafts,
        overlap_previous=True,  # that is the conv, which touches neither state nor ring nor plan
    )
    return out.unsqueeze(0)


def forward_decode(original, self: GDNAttnBackend, *args, **kwargs) -> torch.Tensor:
    """AROUND GDNAttnBackend.forward_decode: never reached with speculation in the pin; it would miss pending records.

    Raises:
        RuntimeError: always, when this server serves from the ring.
    """
    if ring_of(self.req_to_token_pool) is None:
        return original(self, *args, **kwargs)
    raise RuntimeError(
        "a plain decode step reached a server that keeps pending records in the ring; it would lose them. "
        "Start without --enable-gdn-replayssm-spec and report this configuration"
    )


def update_mamba_state_after_mtp_verify(
    original,
    self: HybridLinearAttnBackend,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    model,
) -> None:
    """AROUND HybridLinearAttnBackend.update_mamba_state_after_mtp_verify: commit the conv states, copy no state.

    A row that has crossed a track interval of the prefix cache inside its window leaves the state of that point in its
    track slot. This comes before the cursors move, and before any fold that a commit may bring.

    Args:
        last_correct_step_indices: [batch], the last accepted step of each window.
        mamba_track_indices, mamba_steps_to_track: [batch], the slot to track into and the step to track, -1 for none.
    """
    backend = self.linear_attn_backend
    pool = ring_of(backend.req_to_token_pool)
    if pool is None:
        return original(self, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track, model)

    cache = backend.req_to_token_pool.get_speculative_mamba2_params_all_layers()
    tracked = () if mamba_track_indices is None else (mamba_steps_to_track, mamba_track_indices)
    commit_conv(cache.conv[0], cache.intermediate_conv_window[0], pool.cursors, last_correct_step_indices, *tracked)
    if tracked:
        materialize(cache.temporal, pool.ring, pool.cursors, *tracked)


def commit_mamba_states_after_verify(
    original,
    target_worker: TpModelWorker,
    batch: ScheduleBatch,
    accept_lens: torch.Tensor,
    accept_index: torch.Tensor,
    draft_token_num: int,
) -> None:
    """AROUND commit_mamba_states_after_verify: after the conv rollback, the cursors pass the accepted tokens.

    Rows that are due then fold, if the policy folds after commits.

    Args:
        accept_lens: int32 [batch], the bonus token included.
    """
    original(target_worker, batch, accept_lens, accept_index, draft_token_num)
    req_to_token_pool = target_worker.model_runner.req_to_token_pool
    pool = ring_of(req_to_token_pool)
    if pool is not None and not batch.forward_mode.is_idle() and accept_index.numel() > 0:
        commit(pool.cursors, batch.req_pool_indices, accept_lens)
        state = req_to_token_pool.mamba_pool.mamba_cache.temporal
        fold_due(state, pool.ring, pool.cursors, accept_lens.shape[0])
