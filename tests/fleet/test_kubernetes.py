"""The file for KubeRay: what it says is what the options say, and Ray takes its part of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from jserve.cli import app
from jserve.cli_options import resolve
from jserve.config import EngineConfig
from jserve.errors import ConfigError
from jserve.fleet.kubernetes import Pods, objects, serve_config
from jserve.fleet.start import fleet_engine
from tests.fleet.ray_service_schema import RAY_SERVICE, SERVICE

OPTIONS: dict[str, Any] = {
    "model": "/models/m",
    "replicas": 2,
    "max_num_seqs": 48,
    "tensor_parallel_size": 2,
    "served_model_name": ("a", "b"),
    "structured_outputs": False,
    "memory_utilization": 0.5,
    "speculative.method": "ngram",
}


def config(**more: Any) -> EngineConfig:
    return EngineConfig.of(**OPTIONS | more)


def found(config: EngineConfig, **pods: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    ray_service, service = objects(config, Pods(**pods))
    return ray_service, service


def group(ray_service: dict[str, Any], name: str) -> dict[str, Any]:
    groups = ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return next(one for one in groups if one["groupName"] == name)


def front(ray_service: dict[str, Any]) -> dict[str, Any]:
    containers = group(ray_service, "front")["template"]["spec"]["containers"]
    return next(one for one in containers if one["name"] == "front")


def test_the_front_reads_the_options_from_its_variables() -> None:
    variables = {one["name"]: one["value"] for one in front(found(config())[0])["env"]}
    fleet = {"ray_address": "auto", "ray_application": "jserve"}
    assert resolve({}, None, variables) == config(**fleet, host="0.0.0.0", port=8000)


def test_replicas_get_the_options_without_those_of_the_server() -> None:
    ray_service, _ = found(config(max_waiting=99, log_level="debug"), gpus=2)
    [application] = yaml.safe_load(ray_service["spec"]["serveConfigV2"])["applications"]
    assert EngineConfig.of(**application["args"]) == config(max_waiting=99)
    [engine] = application["deployments"]
    assert engine["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 2}


def test_each_replica_has_a_worker_and_the_front_one_where_none_is_placed() -> None:
    ray_service, service = found(config(max_replicas=5), gpus=2, cpus=4, memory="9Gi", name="m")
    engines = group(ray_service, "engines")
    assert (engines["minReplicas"], engines["replicas"], engines["maxReplicas"]) == (2, 2, 5)
    assert ray_service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]
    [ray] = engines["template"]["spec"]["containers"]
    assert ray["resources"]["limits"] == {"memory": "9Gi", "nvidia.com/gpu": 2}
    assert ray["resources"]["requests"] == {"cpu": "4", "memory": "9Gi"}
    assert ray["env"] == [{"name": "RAY_worker_niceness", "value": "0"}], "else replicas have 15"
    assert group(ray_service, "front")["rayStartParams"] == {"num-cpus": "0"}
    assert service["metadata"]["name"] == "m-front"
    labels = group(ray_service, "front")["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert "metadata" not in engines["template"]


def test_a_front_shares_the_address_and_the_object_store_of_the_ray_beside_it() -> None:
    spec = group(found(config())[0], "front")["template"]["spec"]
    volumes = {one["name"] for one in spec["volumes"]}
    for container in spec["containers"]:
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert {*mounts} == {"/tmp/ray", "/dev/shm"}
        assert {*mounts.values()} == volumes


def test_workers_are_ready_without_proxies_of_serve() -> None:
    """KubeRay asks them otherwise, and no worker would be ready."""
    ray_service, _ = found(config())
    for name in ("engines", "front"):
        ray = group(ray_service, name)["template"]["spec"]["containers"][0]
        assert ray["readinessProbe"]["httpGet"]["path"] == "/api/local_raylet_healthz"
    assert yaml.safe_load(ray_service["spec"]["serveConfigV2"])["proxy_location"] == "Disabled"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replicas", 0),
        ("ray_address", "auto"),
        ("ray_application", "x"),
        ("roles", "prefill=1,decode=1"),
        ("api_key", ("k",)),
        ("kv_transfer_key", "k"),
        ("port", 9999),
        ("max_replicas", 1),
        ("kv_events", "ipc:///tmp/events"),
    ],
)
def test_what_the_file_cannot_say_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        objects(config(**{field: value}), Pods())
    assert caught.value.field == field


def test_the_command_prints_both_objects_and_names_a_bad_option() -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["kubernetes", "/models/m", "--replicas", "2", "--image", "i:1"])
    assert done.exit_code == 0
    kinds = [one["kind"] for one in yaml.safe_load_all(done.stdout)]
    assert kinds == ["RayService", "Service"]
    assert "i:1" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replicas": 1, "tensor_parallel_size": 1},
        {"max_replicas": 5, "max_waiting": 7},
        {"hedge_share": 0.02, "kv_events": "tcp://*:5557"},
    ],
    ids=["plain", "one", "scales", "options"],
)
@pytest.mark.parametrize("pods", [{}, {"gpus": 2, "cpus": 4, "memory": "9Gi", "name": "m"}])
def test_both_objects_are_what_kuberay_and_kubernetes_define(options: Any, pods: Any) -> None:
    text = yaml.safe_dump_all(objects(config(**options), Pods(**pods)))
    ray_service, service = yaml.safe_load_all(text)
    assert [
        str(e) for e in jsonschema.Draft202012Validator(RAY_SERVICE).iter_errors(ray_service)
    ] == []
    assert [str(e) for e in jsonschema.Draft202012Validator(SERVICE).iter_errors(service)] == []


def test_names_that_refer_to_one_another_exist() -> None:
    """Mounts name volumes, and names are given once: what a schema cannot say."""
    ray_service, service = found(config())
    cluster = ray_service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for spec in [one["template"]["spec"] for one in groups]:
        volumes = [one["name"] for one in spec["volumes"]]
        names = [one["name"] for one in spec["containers"]]
        assert len({*volumes}) == len(volumes)
        assert len({*names}) == len(names)
        mounts = {m["name"] for one in spec["containers"] for m in one["volumeMounts"]}
        assert mounts <= {*volumes}
    names = [one["groupName"] for one in cluster["workerGroupSpecs"]]
    assert len({*names}) == len(names)
    [port] = service["spec"]["ports"]
    assert port["targetPort"] in [one["containerPort"] for one in front(ray_service)["ports"]]


def _damaged(document: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(where, copy) with one thing wrong: a field that nobody knows, a value of another type."""
    if isinstance(document, dict):
        for key, value in document.items():
            for where, damaged in _damaged(value, f"{path}/{key}"):
                yield where, document | {key: damaged}
        if path.rsplit("/", 1)[-1] not in FREE:
            yield f"{path}/more", document | {"more": 1}
    elif isinstance(document, list):
        for i, value in enumerate(document):
            for where, damaged in _damaged(value, f"{path}/{i}"):
                yield where, [*document[:i], damaged, *document[i + 1 :]]
    else:
        yield path, {"not": "that"}


FREE = {"rayStartParams", "requests", "limits", "labels", "selector"}
"""Fields whose keys are anybody's."""


def test_each_field_that_is_written_is_checked() -> None:
    ray_service, service = found(config(max_replicas=5), gpus=2)
    n = 0
    for document, schema in ((ray_service, RAY_SERVICE), (service, SERVICE)):
        check = jsonschema.Draft202012Validator(schema)
        for where, damaged in _damaged(document):
            assert not check.is_valid(damaged), where
            n += 1
    assert n > 100


@pytest.mark.parametrize(
    "path",
    ["spec/rayClusterConfig", "spec/rayClusterConfig/headGroupSpec", "metadata/name"]
    + [f"spec/rayClusterConfig/workerGroupSpecs/0/{name}" for name in ("groupName", "minReplicas")]
    + ["spec/rayClusterConfig/workerGroupSpecs/1/template/spec/containers"],
)
def test_a_required_field_that_is_missing_is_an_error(path: str) -> None:
    ray_service = copy.deepcopy(found(config())[0])
    *above, last = path.split("/")
    at: Any = ray_service
    for name in above:
        at = at[int(name) if isinstance(at, list) else name]
    del at[last]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(ray_service, RAY_SERVICE)


@pytest.mark.ray
def test_ray_takes_its_part_and_makes_the_application_of_it() -> None:
    pytest.importorskip("ray")
    from ray.serve.schema import ServeDeploySchema

    from jserve.fleet.on_ray import Pinned, application

    for options in ({}, {"max_replicas": 4}):
        serve = serve_config(config(**options), Pods(gpus=2))
        parsed = ServeDeploySchema(**copy.deepcopy(serve))
        [one] = parsed.applications
        made = application(one.args)._bound_deployment
        assert made.name == one.deployments[0].name == "engine"
        options_of_replica, build = made.init_args
        assert build == "jserve.build:engine"
        assert EngineConfig.of(**options_of_replica) == config(replicas=0)
        scaling = made._deployment_config.autoscaling_config
        assert (scaling.max_replicas if options else made.num_replicas) == (4 if options else 2)
        router = made._deployment_config.request_router_config.request_router_class
        assert router == f"{Pinned.__module__}:{Pinned.__qualname__}"


@pytest.mark.ray
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ray_application": "a"}, "ray_address"),
        ({"ray_application": "a", "ray_address": "auto", "roles": "prefill=1,decode=1"}, "roles"),
    ],
)
def test_a_front_without_a_cluster_or_with_roles_is_refused(options: Any, field: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(ConfigError) as caught:
        fleet_engine(config(**options), "tests.fleet.fakes:build")
    assert caught.value.field == field
