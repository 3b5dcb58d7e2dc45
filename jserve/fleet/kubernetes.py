"""A RayService of KubeRay for the replicas of one model, and the Service of their front.

It owns what these objects say. KubeRay keeps the pods alive and has Serve run the replicas, one a worker; the front has
a pod of its own, so that probes and restarts are its own, and uses that application (option ``ray_application``)::

    clients -> Service -> front pod [ ray | jserve serve ]    worker pods [ ray: an engine each ]    head pod [ ray ]
                                         +---- handle of the Serve application ----^
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jserve.config import EngineConfig, ServerOptions
from jserve.errors import ConfigError
from jserve.fleet.start import check

APPLICATION = "jserve"
RAY_VERSION = "2.60.0"
"""KubeRay chooses its health checks by it."""
PORT, AGENT_PORT = 8000, 52365
SAID = ("ray_address", "ray_application", "host", "port")
SECRET = ("api_key", "kv_transfer_key")
SHARED = {"ray": "/tmp/ray", "shm": "/dev/shm"}
"""Shared with the Ray beside a process: its address and its object store."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The makings of the pods.

    Args:
        image: a container image with ``jserve[ray]`` and the model.
        cpus: of a worker.
        memory: of a worker, as Kubernetes writes it.
        gpus: of a worker; 0 on CPUs.
    """

    name: str = "jserve"
    image: str = "jserve"
    cpus: int = 8
    memory: str = "32Gi"
    gpus: int = 0


def as_yaml(config: EngineConfig, pods: Pods) -> str:
    """Raises ConfigError, as ``objects``, which it writes."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes text of several lines as lines."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump_all(objects(config, pods), Dumper=Dumper, sort_keys=False)


def objects(config: EngineConfig, pods: Pods) -> list[dict[str, Any]]:
    """The objects, in the order in which they are applied.

    Raises:
        ConfigError: there are no replicas, or an option that a file should not hold or a cluster has otherwise.
    """
    if not config.fleet.replicas:
        raise ConfigError("replicas: at least 1, each has a pod", field="replicas")
    given = _given(config)
    for name in SAID:
        if name in given:
            raise ConfigError(f"{name} is for this file to say", field=name)
    for name in SECRET:
        if name in given:
            why = f"{name} would stand in the file: give it to the pods as {_variable(name)} from a Secret"
            raise ConfigError(why, field=name)
    check(_joined(config))
    labels = {"app.kubernetes.io/name": pods.name, "app.kubernetes.io/component": "front"}
    return [_ray_service(config, pods, labels), _service(pods, labels)]


def _ray_service(config: EngineConfig, pods: Pods, labels: dict[str, str]) -> dict[str, Any]:
    import yaml

    fleet = config.fleet
    most = max(fleet.max_replicas, fleet.replicas)
    engines = _group("engines", fleet.replicas, most, [_ray(pods, engine=True)], "1")
    front = _group("front", 1, 1, [_ray(pods), _front(config, pods)], "0")
    front["template"]["metadata"] = {"labels": labels}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": pods.name},
        "spec": {
            "serveConfigV2": yaml.safe_dump(serve_config(config, pods), sort_keys=False),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                "enableInTreeAutoscaling": most > fleet.replicas,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},
                    "template": _template([_ray(pods, name="ray-head")]),
                },
                "workerGroupSpecs": [engines, front],
            },
        },
    }


def serve_config(config: EngineConfig, pods: Pods) -> dict[str, Any]:
    """Serve's own config file: the application of the replicas."""
    resources = {"num_cpus": 1} | ({"num_gpus": pods.gpus} if pods.gpus else {})
    engine = dataclasses.replace(config, server=ServerOptions())
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": None,
                "import_path": "jserve.fleet.on_ray:application",
                "args": _given(engine),
                "deployments": [{"name": "engine", "ray_actor_options": resources}],
            }
        ],
    }


def _given(config: EngineConfig) -> dict[str, Any]:
    """The options that are not at their defaults, by their flat names."""
    usual = EngineConfig().flat()
    given = {name: value for name, value in config.flat().items() if value != usual[name]}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in given.items()}


def _joined(config: EngineConfig) -> EngineConfig:
    """The options of the front."""
    at = {"ray_address": "auto", "ray_application": APPLICATION}
    return dataclasses.replace(config, fleet=dataclasses.replace(config.fleet, **at))


def _front(config: EngineConfig, pods: Pods) -> dict[str, Any]:
    given = _given(_joined(config)) | {"host": "0.0.0.0", "port": PORT}
    health = {"httpGet": {"path": "/health", "port": PORT}}
    return {
        "name": "front",
        "image": pods.image,
        "command": ["jserve", "serve"],
        "env": [{"name": _variable(n), "value": _text(v)} for n, v in given.items()],
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": {**health, "periodSeconds": 5},
        "volumeMounts": _mounts(),
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}},
    }


def _ray(pods: Pods, *, name: str = "ray", engine: bool = False) -> dict[str, Any]:
    """The container that KubeRay starts Ray in. Serve's proxies are off, and by itself KubeRay would ask a worker's."""
    cpus, memory = (pods.cpus, pods.memory) if engine else (1, "4Gi")
    size: dict[str, Any] = {"cpu": str(cpus), "memory": memory}
    limits = {"memory": memory} | ({"nvidia.com/gpu": pods.gpus} if engine and pods.gpus else {})
    made: dict[str, Any] = {
        "name": name,
        "image": pods.image,
        "env": [{"name": "RAY_worker_niceness", "value": "0"}],
        "resources": {"requests": size, "limits": limits},
        "volumeMounts": _mounts(),
    }
    if name != "ray-head":
        probe = {"httpGet": {"path": "/api/local_raylet_healthz", "port": AGENT_PORT}}
        made["readinessProbe"] = {**probe, "periodSeconds": 5}
    return made


def _group(
    name: str, least: int, most: int, containers: list[dict[str, Any]], cpus: str
) -> dict[str, Any]:
    """A worker group; ``cpus`` is what Ray may place there."""
    return {
        "groupName": name,
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": most,
        "rayStartParams": {"num-cpus": cpus},
        "template": _template(containers),
    }


def _template(containers: list[dict[str, Any]]) -> dict[str, Any]:
    shm = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return {"spec": {"containers": containers, "volumes": [{"name": "ray", "emptyDir": {}}, shm]}}


def _mounts() -> list[dict[str, str]]:
    return [{"name": name, "mountPath": path} for name, path in SHARED.items()]


def _service(pods: Pods, labels: dict[str, str]) -> dict[str, Any]:
    port = {"name": "http", "port": PORT, "targetPort": PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{pods.name}-front"},
        "spec": {"selector": labels, "ports": [port]},
    }


def _variable(option: str) -> str:
    return f"JSERVE_{option.replace('.', '_').upper()}"


def _text(value: Any) -> str:
    """As the command line reads it from a variable."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
