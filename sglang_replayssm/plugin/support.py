"""Which configurations can use the ring. The decision is made once per process, here, from arguments and config."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# HiCache, which moves states by itself, other state layouts, two batches in flight at once, and torch.compile,
# which would trace the hooks and kernels.
OPTIONS_WITHOUT_RING = (
    "enable_hierarchical_cache",
    "enable_unified_memory",
    "enable_page_major_kv_layout",
    "enable_two_batch_overlap",
    "enable_pdmux",
    "enable_torch_compile",
)
MAX_DRAFT_TOKENS = 16
MAX_WINDOW = 64
# Text configs whose linear-attention layers are GDN layers that run through GDNAttnBackend.
GDN_MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def why_not(server_args: ServerArgs) -> list[str]:
    """Reasons why this configuration is served by the recurrent verify; empty if the ring can serve it.

    Each reason is a clause that completes "the ring is not used because ...", naming the setting found.
    """
    reasons = [*speculation_reasons(server_args), *_server(server_args)]
    return reasons if reasons else _model(server_args)


def speculation_reasons(args: ServerArgs) -> list[str]:
    """Reasons that lie in the speculation alone."""
    if args.speculative_algorithm is None:
        return ["no speculative decoding is configured (set --speculative-algorithm NEXTN)"]
    reasons = []
    if args.speculative_algorithm.upper() not in ALGORITHMS:
        reasons.append(f"--speculative-algorithm {args.speculative_algorithm} is not one of {', '.join(ALGORITHMS)}")
    if (args.speculative_eagle_topk or 1) > 1:
        reasons.append(f"--speculative-eagle-topk is {args.speculative_eagle_topk} (tree verify); only 1 is a chain")
    if args.enable_multi_layer_eagle:
        reasons.append("--enable-multi-layer-eagle never commits linear-attention state in this SGLang release")
    drafts = args.max_speculative_num_draft_tokens
    if drafts is not None and drafts > MAX_DRAFT_TOKENS:
        reasons.append(f"--speculative-num-draft-tokens is {drafts}; the kernels verify at most {MAX_DRAFT_TOKENS}")
    if args.gdn_replayssm_cache_len > MAX_WINDOW:
        reasons.append(f"--gdn-replayssm-cache-len is {args.gdn_replayssm_cache_len}; the largest is {MAX_WINDOW}")
    return reasons


def _server(args: ServerArgs) -> list[str]:
    reasons = []
    if not args.disable_radix_cache:
        reasons += _prefix_cache(args)
    for phase in ("decode", "prefill"):
        backend = getattr(args, f"linear_attn_{phase}_backend") or args.linear_attn_backend
        if backend != "triton":
            reasons.append(f"the linear-attention {phase} backend is {backend}, not triton")
    if args.pp_size > 1:
        reasons.append(f"pipeline parallelism is on (--pp-size {args.pp_size})")
    if args.disaggregation_mode != "null":
        reasons.append(f"PD disaggregation is on (--disaggregation-mode {args.disaggregation_mode})")
    reasons += [f"--{option.replace('_', '-')} is on" for option in OPTIONS_WITHOUT_RING if getattr(args, option)]
    reasons += _device(args.device)
    return reasons


def _prefix_cache(args: ServerArgs) -> list[str]:
    """Reasons that lie in the prefix cache: SGLang's MambaRadixCache is the one whose reads of states are known."""
    from sglang.srt.environ import envs

    reasons = []
    if args.radix_cache_backend:
        reasons.append(f"--radix-cache-backend is {args.radix_cache_backend}, not SGLang's own prefix cache")
    if envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE.get():
        reasons.append("SGLANG_ENABLE_UNIFIED_RADIX_TREE selects another prefix cache")
    if envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get():
        reasons.append("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE selects another prefix cache")
    return reasons


def _device(device: str) -> list[str]:
    if device == "cuda" and torch.version.hip is None:
        return []
    if device == "cpu":
        import triton

        if triton.knobs.runtime.interpret:
            return []
    return [f"the device is {'hip' if torch.version.hip else device}; the kernels run on NVIDIA GPUs"]


def _model(args: ServerArgs) -> list[str]:
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype

    model_config = args.get_model_config()
    config = model_config.hf_config.get_text_config()
    if config.model_type not in GDN_MODEL_TYPES:
        return [f"{model_config.hf_config.architectures[0]} has no Gated-DeltaNet layers that it knows"]
    reasons = []
    state = mamba2_state_dtype(model_config.hf_config).temporal
    if state != torch.float32:
        reasons.append(f"mamba_ssm_dtype is {_name(state)}; the checkpoint must be float32")
    if model_config.dtype not in ACTIVATION_DTYPES:
        reasons.append(f"the activation dtype is {_name(model_config.dtype)}")
    for field in ("linear_key_head_dim", "linear_value_head_dim"):
        size = getattr(config, field)
        if size & (size - 1) or not 16 <= size <= 256:
            reasons.append(f"{field} is {size}; the kernels take powers of two from 16 to 256")
    return reasons


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
