"""A stand-in for an SGLang server's OpenAI API, in this process, on 127.0.0.1."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from aiohttp import web

INFO = {
    "version": "0.0.test",
    "model_path": "fake/model",
    "speculative_algorithm": "EAGLE",
    "speculative_num_draft_tokens": 4,
    "enable_gdn_replayssm_spec": True,
    "api_key": "secret-of-the-server",
    "internal_states": [{"gdn_replayssm": {"active": True, "reasons": []}}],
}


class FakeServer:
    """Answers chats with what `reply` makes of the last user message; remembers every request.

    `reply` returns a text, or a dict with `content` and optionally `finish_reason`, `reasoning_content`, `tokens`,
    `steps`, or raises LookupError for an answer with status 400.
    """

    def __init__(self, reply: Callable[[str], Any], sglang: bool = True) -> None:
        self.reply, self.sglang = reply, sglang
        self.requests: list[dict] = []
        self.under_way = self.most_under_way = 0

    def __enter__(self) -> FakeServer:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def start() -> None:
            app = web.Application()
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/chat/completions", self._chat)
            if self.sglang:
                app.router.add_get("/server_info", self._info)
            self._runner = web.AppRunner(app)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            started.set()

        def serve() -> None:
            self._loop.create_task(start())
            self._loop.run_forever()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        assert started.wait(30)
        return self

    def __exit__(self, *_) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _models(self, _) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _info(self, _) -> web.Response:
        return web.json_response(INFO)

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0.02)
        self.under_way -= 1
        try:
            reply = self.reply(body["messages"][-1]["content"])
        except LookupError as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        reply = {"content": reply} if isinstance(reply, str) else reply
        tokens = reply.get("tokens", 12)
        choice = {
            "index": 0,
            "finish_reason": reply.get("finish_reason", "stop"),
            "message": {
                "role": "assistant",
                "content": reply["content"],
                "reasoning_content": reply.get("reasoning_content"),
            },
        }
        if body.get("return_meta_info"):
            choice["meta_info"] = {"spec_verify_ct": reply.get("steps", 4), "spec_accept_length": tokens / 4}
        return web.json_response(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "fake",
                "choices": [choice],
                "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5},
            }
        )
