"""The platform SGLang believes to run on."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum


class CpuSimPlatform(CpuSRTPlatform):
    """A CPU that is not SGLang's own CPU backend, which would need a build of sgl-kernel and has other layouts.

    As an out-of-tree platform, every multi-platform operator takes its `forward_native`, and the Triton kernels are
    the generic ones that CUDA runs.
    """

    _enum = PlatformEnum.OOT

    def get_device(self, local_rank: int = 0) -> str:
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "triton"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

        class SingleTokenPages(TokenToKVPoolAllocator):
            def __init__(self, size, page_size, dtype, device, kvcache, need_sort):
                if page_size != 1:
                    raise ValueError("the CPU simulation has pages of one token only")
                super().__init__(size, dtype, device, kvcache, need_sort)

        return SingleTokenPages
