"""`GET /model_info` and `GET /server_info`."""

from __future__ import annotations

import asyncio
from typing import Any

from deploy.http.access.api_key import ApiKey
from deploy.http.engine_client import EngineClient
from deploy.http.generation.json_route import JsonRoute
from deploy.http.sglang.replies import SGLangModelInfo, SGLangServerInfo
from engine import __version__


class ModelInfoRoute(JsonRoute):
    """What is served."""

    paths = ("/model_info", "/get_model_info")
    methods = ("GET",)
    description = "As SGLang's `GET /model_info`."
    reply = SGLangModelInfo
    errors = (404, 500, 503)

    async def _answer(
        self, client: EngineClient, given: None, key: ApiKey | None
    ) -> dict[str, Any]:
        info = client.model_info
        return {
            "model_path": str(info.resolved.model.path),
            "tokenizer_path": str(info.resolved.model.path),
            "served_model_name": info.name,
            "is_generation": True,
            "max_model_len": info.resolved.max_model_len,
            "vocab_size": info.resolved.model.vocab_size,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }


class ServerInfoRoute(JsonRoute):
    """How it is served, and how busy the engines are."""

    paths = ("/server_info", "/get_server_info")
    methods = ("GET",)
    description = "As SGLang's `GET /server_info`."
    for_admins = True
    reply = SGLangServerInfo
    errors = (404, 500, 503)

    async def _answer(
        self, client: EngineClient, given: None, key: ApiKey | None
    ) -> dict[str, Any]:
        server, stats = await asyncio.gather(client.server_info(), client.stats())
        info, replicas = client.model_info, server.pop("replicas")
        states = {state["replica"]: state for state in stats}
        shared = dict(replicas[0]) if replicas else {}
        for name in ("replica", "model", "num_kv_tokens"):
            shared.pop(name, None)
        return {
            **shared,
            **server,
            "disable_radix_cache": not shared.get("enable_prefix_cache", True),
            "version": __version__,
            "model_path": str(info.resolved.model.path),
            "tokenizer_path": str(info.resolved.model.path),
            "served_model_name": info.name,
            "max_model_len": info.resolved.max_model_len,
            "max_total_num_tokens": max((r["num_kv_tokens"] for r in replicas), default=0),
            "internal_states": [
                {
                    **states.get(replica["replica"], {}),
                    "replica": replica["replica"],
                    "device": replica["device"],
                    "max_total_num_tokens": replica["num_kv_tokens"],
                }
                for replica in replicas
            ],
        }
