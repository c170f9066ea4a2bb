"""States that leave a live request for SGLang's own radix tree: complete, up to exactly the token of their key."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from test_verify_hooks import PREFILL, make_server  # noqa: F401

from sglang_replayssm.kernels.ring import WRITE_POS
from sglang_replayssm.plugin import donation
from sglang_replayssm.policies import POLICIES

# Accepted tokens of each step. Nothing verified yet; records pending; records behind a fold in verify.
PHASES = [(), (4,), (3, 4, 4)]
# With 10 tokens of prompt and an interval of 6: crossed at the last token of a window, at the first with a record
# pending, and at a middle one behind a fold.
TRACKED_PHASES = [(2,), (1, 4), (4, 2, 4)]


class Tree:
    """SGLang's MambaRadixCache on the server's pool, and requests that finish into it."""

    def __init__(self, server, monkeypatch, **settings):
        from sglang.srt.mem_cache import common, mamba_radix_cache
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.server_args import get_global_server_args  # here: the fixture has replaced it

        args = self.args = get_global_server_args()
        vars(args).update(page_size=1, speculative_algorithm="EAGLE", strip_thinking_cache=False)
        args.mamba_cache_chunk_size = 64
        for module in (common, mamba_radix_cache):
            monkeypatch.setattr(module, "get_global_server_args", lambda: args)
        self.release, self.server = common.release_kv_cache, server
        self.kv = TokenToKVPoolAllocator(256, torch.float16, "cpu", None, False)
        extra_buffer = server.pool.enable_mamba_extra_buffer
        self.cache = mamba_radix_cache.MambaRadixCache(
            CacheInitParams(False, server.pool, self.kv, 1, enable_mamba_extra_buffer=extra_buffer)
        )

    def serve(self, accepted: tuple[int, ...]) -> int:
        """A new request, and its verify steps."""
        row = self.server.admit()
        for keep in accepted:
            self.server.step([row], [keep])
        return row

    def tokens(self, row: int) -> array:
        """Of the request, as many as its state has seen, and no other's."""
        return array("q", range(1000 * row, 1000 * row + self.server.length[row]))

    def request(self, row: int, tracked: int | None = None) -> SimpleNamespace:
        """The request as far as releasing it looks at it."""
        server, length = self.server, self.server.length[row]
        server.pool.req_to_token[row, :length] = self.kv.alloc(length).int()
        req, tokens = server.req[row], self.tokens(row)
        vars(req).update(
            rid="r",
            origin_input_ids=tokens[:PREFILL],
            output_ids=tokens[PREFILL:],
            kv_committed_len=length,
            cache_protected_len=0,
            extra_key=None,
            last_node=self.cache.root_node,
            mamba_last_track_seqlen=tracked,
            pop_committed_kv_cache=lambda: length,
            pop_overallocated_kv_cache=lambda: (length, length),
            get_fill_ids=lambda: tokens,
        )
        self.cache.inc_lock_ref(req.last_node)
        return req

    def finish(self, row: int, tracked: int | None = None, is_insert: bool = True) -> None:
        donation.release_kv_cache(self.release, self.request(row, tracked), self.cache, is_insert)

    def cached(self, tokens: array) -> tuple[int, torch.Tensor | None]:
        """How many of the tokens the tree holds, and the slot of the state there."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens, None)))
        return len(found.device_indices), found.last_device_node.mamba_value

    def check(self, slot: torch.Tensor, state: torch.Tensor, conv: torch.Tensor) -> None:
        cache, bf16 = self.server.pool.mamba_pool.mamba_cache, self.server.ring.spec.fold == "bf16"
        close = {"rtol": 0.05, "atol": 0.05} if bf16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(cache.temporal[:, int(slot)].double(), state, **close)
        assert torch.equal(cache.conv[0][:, int(slot)], conv)


@pytest.mark.parametrize("fold", POLICIES)
def test_a_donated_live_slot_is_complete(make_server, monkeypatch, fold):  # noqa: F811
    """Trap 10. Strategy no_buffer: the tree takes the slot itself."""
    server = make_server(fold)
    tree, pending = Tree(server, monkeypatch), 0
    for accepted in PHASES:
        row = tree.serve(accepted)
        pending += int(server.ring.cursors.position[row, WRITE_POS]) > 0
        slot, tokens, state, conv = int(server.req[row].mamba_pool_idx), tree.tokens(row), *server.truth(row)
        tree.finish(row)
        length, donated = tree.cached(tokens)
        assert (length, int(donated)) == (len(tokens), slot)
        tree.check(donated, state, conv)
        tree.cache.reset()  # the next request has the same row, and so the same tokens
    assert pending > 0 or fold == "every-commit", "no phase had records to fold"


@pytest.mark.parametrize("fold", POLICIES)
def test_a_tracked_state_is_that_of_the_interval(make_server, monkeypatch, fold):  # noqa: F811
    """Trap 11. Strategy extra_buffer: the commit has written a state from inside the window into the track slot."""
    server = make_server(fold, extra_buffer=True)
    tree = Tree(server, monkeypatch)
    for accepted in TRACKED_PHASES:
        row = tree.serve(accepted)
        tokens, (boundary, slot, state, conv) = tree.tokens(row), server.tracked[row]
        records = int(server.ring.cursors.position[row, WRITE_POS])
        tree.finish(row, boundary)
        assert int(server.ring.cursors.position[row, WRITE_POS]) == records, "a live slot that stays needs no fold"
        length, donated = tree.cached(tokens)
        assert (length, int(donated)) == (boundary, slot)
        tree.check(donated, state, conv)
        tree.cache.reset()


@pytest.mark.parametrize("extra_buffer", [False, True])
def test_an_int8_checkpoint_is_of_the_complete_state(make_server, monkeypatch, extra_buffer):  # noqa: F811
    settings = {"enable_int8_mamba_checkpoint": True, "int8_mamba_ckpt_size": 4}
    server = make_server("fp32", extra_buffer=extra_buffer, **settings)
    tree = Tree(server, monkeypatch)
    row = tree.serve((4, 4))
    tokens, (state, conv) = tree.tokens(row), server.truth(row)
    if extra_buffer:
        boundary, _, state, conv = server.tracked[row]
        tokens = tokens[:boundary]
    tree.finish(row, len(tokens))
    length, checkpoint = tree.cached(tokens)
    assert length == len(tokens)
    stored = server.pool.mamba_ckpt_pool
    step = state.abs().amax(-2, keepdim=True) / stored.temporal.QMAX
    error = (stored.temporal.load(checkpoint, torch.float32)[:, 0] - state).abs()
    assert (error <= 0.51 * step + 1e-5).all()
    assert torch.equal(stored.conv[0][:, int(checkpoint)], conv)


def test_a_live_slot_is_copied_only_with_an_empty_ring(make_server, monkeypatch):  # noqa: F811
    """A prefill that goes on with a row, as a session's next turn does: its extend has folded the row."""
    server = make_server("fp32")
    tree = Tree(server, monkeypatch)
    row = tree.serve((4, 2))
    server.extend(row)
    req = tree.request(row)
    tree.cache.cache_unfinished_req(req)
    _, copied = tree.cached(tree.tokens(row))
    assert int(copied) != int(req.mamba_pool_idx)
    tree.check(copied, *server.truth(row))


def test_what_is_thrown_away_is_not_folded(make_server, monkeypatch):  # noqa: F811
    """Retracted and aborted requests; one that has no row yet; a server that keeps no prefixes."""
    server = make_server("fp32")
    tree = Tree(server, monkeypatch)
    row = tree.serve((3,))
    position = server.ring.cursors.position
    called = []
    tree.release = lambda *args: called.append(args)
    tree.finish(row, is_insert=False)
    donation.release_kv_cache(tree.release, SimpleNamespace(req_pool_idx=None), tree.cache)
    tree.args.disable_radix_cache = True
    tree.finish(row)
    assert int(position[row, WRITE_POS]) == 3 and len(called) == 3
    tree.args.disable_radix_cache = False
    tree.finish(row)
    assert int(position[row, WRITE_POS]) == 0


def test_without_a_ring_it_is_stock():
    tree = SimpleNamespace(req_to_token_pool=SimpleNamespace())
    assert donation.release_kv_cache(lambda *args: args, 1, tree, False) == (1, tree, False)
