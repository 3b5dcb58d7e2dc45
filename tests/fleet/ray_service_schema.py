"""KubeRay's definition of a RayService (ray.io/v1) and Kubernetes' of a Service, as far as jserve writes their fields:
names, types and which of them are required, as JSON Schema. A field that is not here is one that we do not write.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
"""Of objects, containers, volumes and ports: a DNS label."""
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": r"^\d+(\.\d+)?([KMGTPE]i?|[kmun])?$"}


def _object(required: str = "", **fields: Schema) -> Schema:
    needs = required.split()
    return {
        "type": "object",
        "properties": fields,
        "required": needs,
        "additionalProperties": False,
    }


def _map_of(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _list_of(items: Schema, *, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


SIZES = _map_of(QUANTITY)
PROBE = _object("httpGet", httpGet=_object("port", path=TEXT, port=PORT), periodSeconds=COUNT)
CONTAINER = _object(
    "name image",
    name=NAME,
    image=TEXT,
    command=_list_of(TEXT),
    env=_list_of(_object("name", name=TEXT, value=TEXT)),
    ports=_list_of(_object("containerPort", name=NAME, containerPort=PORT)),
    readinessProbe=PROBE,
    volumeMounts=_list_of(_object("mountPath name", mountPath=TEXT, name=NAME)),
    resources=_object(requests=SIZES, limits=SIZES),
)
VOLUME = _object("name", name=NAME, emptyDir=_object(medium={"enum": ["", "Memory"]}))
TEMPLATE = _object(
    "spec",
    metadata=_object(labels=_map_of(TEXT)),
    spec=_object("containers", containers=_list_of(CONTAINER, least=1), volumes=_list_of(VOLUME)),
)
START = _map_of(TEXT)
"""Parameters of ``ray start``, all of them text."""
WORKERS = _object(
    "groupName minReplicas maxReplicas template",
    groupName=NAME,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=START,
    template=TEMPLATE,
)
CLUSTER = _object(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    headGroupSpec=_object("template", rayStartParams=START, template=TEMPLATE),
    workerGroupSpecs=_list_of(WORKERS),
)
RAY_SERVICE = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_object("name", name=NAME),
    spec=_object("rayClusterConfig", serveConfigV2=TEXT, rayClusterConfig=CLUSTER),
)
SERVICE = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "v1"},
    kind={"const": "Service"},
    metadata=_object("name", name=NAME),
    spec=_object(
        "selector ports",
        selector=_map_of(TEXT),
        ports=_list_of(_object("port", name=NAME, port=PORT, targetPort=PORT), least=1),
    ),
)
