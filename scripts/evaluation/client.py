"""Asking a running server through its OpenAI API, and what SGLang tells beyond that API."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from evaluation.task import Message


@dataclass(frozen=True)
class Reply:
    text: str
    reasoning: str | None
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    verify_steps: int | None
    seconds: float


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float
    max_tokens: int
    template_kwargs: dict[str, Any]


class Client:
    """One server; `open` it first."""

    def __init__(self, api: openai.AsyncOpenAI, model: str, server: dict[str, Any]) -> None:
        self.api, self.model, self.server = api, model, server

    @classmethod
    async def open(cls, url: str, model: str | None, api_key: str, timeout: float) -> Client:
        """Connect; without a model name, take the first that the server offers."""
        api = openai.AsyncOpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=api_key, timeout=timeout, max_retries=3)
        if model is None:
            model = (await api.models.list()).data[0].id
        return cls(api, model, await server_facts(url, api_key))

    async def ask(self, messages: list[Message], sampling: Sampling) -> Reply:
        extra: dict[str, Any] = {}
        if self.server:  # SGLang's own, and refused elsewhere
            extra["return_meta_info"] = True
        if sampling.template_kwargs:
            extra["chat_template_kwargs"] = sampling.template_kwargs
        begin = time.perf_counter()
        completion = await self.api.chat.completions.create(
            model=self.model,
            messages=messages,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            extra_body=extra,
        )
        choice, usage = completion.choices[0], completion.usage
        meta = (choice.model_extra or {}).get("meta_info") or {}
        return Reply(
            choice.message.content or "",
            (choice.message.model_extra or {}).get("reasoning_content"),
            choice.finish_reason,
            usage.prompt_tokens if usage else 0,
            usage.completion_tokens if usage else 0,
            meta.get("spec_verify_ct"),
            time.perf_counter() - begin,
        )


async def server_facts(url: str, api_key: str) -> dict[str, Any]:
    """What of SGLang's /server_info tells one run from another; empty for a server that is not SGLang."""
    try:
        async with httpx.AsyncClient(timeout=30, headers={"Authorization": f"Bearer {api_key}"}) as http:
            response = await http.get(f"{url.rstrip('/')}/server_info")
            info = response.raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return {}
    if not isinstance(info, dict) or "internal_states" not in info:
        return {}
    state = (info["internal_states"] or [{}])[0]
    names = [name for name in info if name.startswith("speculative_num") or "gdn_replayssm" in name]
    return {
        "sglang": info.get("version"),
        **{name: info[name] for name in (*names, "speculative_algorithm", "model_path", "tp_size") if name in info},
        "ring": state.get("gdn_replayssm"),
    }
