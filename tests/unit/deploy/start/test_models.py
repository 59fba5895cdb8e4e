"""`models:`, several models in one application."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.start import devices
from deploy.start.banner import loading_lines, ready_lines
from deploy.start.config import AppConfig
from deploy.start.target import load_target
from engine.errors import ConfigError

SMALL = "models/manta-small"


def test_each_has_its_own_and_what_all_share() -> None:
    one, two, three = AppConfig.models_from_args(
        {
            "page_size": 8,
            "ingress_replicas": 2,
            "max_running_requests": 7,
            "models": [
                {"model": SMALL, "num_replicas": 2},
                {"model": SMALL, "served_model_name": "org/two", "page_size": 4},
                {"model": SMALL, "served_model_name": "c", "engine_resources": {"x": 1}},
            ],
        }
    )
    assert [app.model_name for app in (one, two, three)] == ["manta-small", "org/two", "c"]
    assert [app.engine.page_size for app in (one, two, three)] == [8, 4, 8]
    assert {app.engine.max_running_requests for app in (one, two, three)} == {7}
    assert [app.max_replicas for app in (one, two, three)] == [2, 1, 1]
    assert {app.server.ingress_replicas for app in (one, two, three)} == {2}
    assert [app.deployment for app in (one, two, three)] == [
        "engine-manta-small",
        "engine-org-two",
        "engine-c",
    ]
    assert [app.engines_per_node for app in (one, two, three)] == [3, 3, 1]
    assert one.routing_policy and not two.routing_policy


def test_one_model_is_as_ever() -> None:
    (app,) = AppConfig.models_from_args({"model": SMALL})
    assert (app.deployment, app.engines_per_node) == ("engine", 1)


TWO = {"model": SMALL, "served_model_name": "two"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"models": []}, ["`models` must be a list"]),
        ({"models": {"model": SMALL}}, ["`models` must be a list"]),
        ({"models": ["x"]}, ["`models` must be a list"]),
        ({"models": [{"page_size": 4}]}, ["needs a `model`"]),
        ({"models": [{"model": SMALL}], "model": SMALL}, ["belong into the entries"]),
        ({"models": [{"model": SMALL}, {"model": SMALL}]}, ["two of `models`", "manta-small"]),
        ({"models": [{"model": SMALL, "ingress_replicas": 2}]}, ["ingress_replicas", "beside"]),
        (
            {"models": [{"model": SMALL, "allow_request_chat_templates": True}]},
            ["allow_request_chat_templates", "beside"],
        ),
        ({"models": [{"model": SMALL, "page_sise": 2}]}, ["page_sise", "did you mean 'page_size'"]),
        ({"models": [{"model": "models/none"}, TWO]}, ["models/none", "does not exist"]),
        (
            {"models": [{**TWO, "served_model_name": "a/b"}, {**TWO, "served_model_name": "a:b"}]},
            ["a/b", "in signs alone"],
        ),
    ],
)
def test_refusals_say_what_to_do(args: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.models_from_args(args)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_the_same_folder_of_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a folder of its own"):
        AppConfig.models_from_args(
            {"lora_folder": str(tmp_path), "models": [{"model": SMALL}, TWO]}
        )


def test_what_all_share_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [{**TWO, "served_model_name": name} for name in "abc"]
    args = {"device": "cpu", "max_total_tokens": 4096, "ingress_replicas": 30, "models": models}
    apps = AppConfig.models_from_args(args)
    (alone,) = AppConfig.models_from_args({**TWO, "device": "cpu", "max_total_tokens": 4096})
    more = devices.memory_bytes(apps[1])
    assert devices.memory_bytes(apps[0]) == devices.memory_bytes(alone) > more
    assert more > devices.model_bytes(apps[1])
    monkeypatch.setattr(devices, "get_num_cpus", lambda: 1.0)
    devices.check_devices(apps)


def test_a_file_of_them(tmp_path: Path) -> None:
    args = {"device": "cpu", "models": [{"model": SMALL}, TWO]}
    file = tmp_path / "two.yaml"
    app = {"name": "llm", "import_path": "serve_app:build_app", "args": args}
    file.write_text(yaml.safe_dump({"applications": [app]}))
    target = load_target(str(file), ["max_total_tokens=4096"])
    assert [app.model_name for app in target.applications] == ["manta-small", "two"]
    assert {app.engine.max_total_tokens for app in target.applications} == {4096}
    assert Path(target.config["applications"][0]["args"]["models"][0]["model"]).is_absolute()
    told = "\n".join(loading_lines(target, None, []))
    assert "loading manta-small" in told and "loading two" in told
    assert "manta-small" in ready_lines(target, 1.0)[1]
