"""Server arguments that are refused without CUDA although the kernels behind them run here."""

from __future__ import annotations


def install() -> None:
    from sglang.srt.server_args import ServerArgs

    # Refuses the radix cache's extra_buffer strategy without CUDA.
    ServerArgs._validate_mamba_extra_buffer = lambda self, view, model_arch: None
