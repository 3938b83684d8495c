"""Kubernetes' objects of a run, as documents, and documents as YAML.

A headless Service and a StatefulSet for the PS, whose pods keep their names and volumes; an indexed
Job whose pods run the user's script as workers; a Job for the Supervisor; Secrets. Workers find
their places in their pods' environment (`thinwire.launcher.schedulers`).
"""

from __future__ import annotations

import base64
import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from thinwire.runtime.run.settings import (
    EXIT_BAD_FLAG,
    EXIT_CONFIGURATION,
    EXIT_DIVERGED,
    EXIT_REFUSED,
)

Document = dict[str, Any]
#: Where volumes are mounted.
RUN_DIR, CERTIFICATES = "/var/lib/thinwire", "/etc/thinwire"
#: The user of the image (Dockerfile).
USER = 1000
_NODE_FILES = "{node}"
#: What another start of a worker does not mend.
_FINAL = (EXIT_BAD_FLAG, EXIT_CONFIGURATION, EXIT_REFUSED, EXIT_DIVERGED)
_POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"


@dataclasses.dataclass(frozen=True)
class Deployment:
    """What the objects are made from."""

    name: str
    image: str
    workers: int
    shards: int
    script: str  # its path in the image
    flags: tuple[str, ...]  # of every node
    token: str  # empty: certificates
    certificates: Mapping[str, bytes]  # file -> content; empty: a token
    port: int
    storage: str
    storage_class: str
    cpus: str
    memory: str
    gpus: int

    @property
    def addresses(self) -> str:
        """host:port of every shard; names of pods outlive the pods and their addresses."""
        service = f"{self.name}-ps"
        hosts = (f"{service}-{shard}.{service}" for shard in range(self.shards))
        return ",".join(f"{host}:{self.port}" for host in hosts)


def documents(made: Deployment) -> Iterator[Document]:
    """Yield the objects in the order in which they are applied."""
    yield from _secrets(made)
    yield _service(made)
    yield _stateful_set(made)
    yield {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(made, "supervisor"),
        "spec": _claim(made),
    }
    yield _supervisor(made)
    yield _workers(made)


def to_yaml(value: Any, indent: int = 0) -> str:
    """Return mappings, lists, strings, numbers and booleans as YAML, strings quoted as in JSON."""
    pad = "  " * indent
    if isinstance(value, dict) and value:
        return "".join(f"{pad}{key}:{_below(each, indent)}" for key, each in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{pad}-{_below(each, indent)}" for each in value)
    return f"{pad}{json.dumps(value)}\n"


def _below(value: Any, indent: int) -> str:
    is_nested = isinstance(value, dict | list) and value
    return f"\n{to_yaml(value, indent + 1)}" if is_nested else f" {json.dumps(value)}\n"


def _metadata(made: Deployment, role: str) -> Document:
    return {"name": f"{made.name}-{role}", "labels": _labels(made, role)}


def _labels(made: Deployment, role: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "thinwire",
        "app.kubernetes.io/instance": made.name,
        "app.kubernetes.io/component": role,
    }


def _secrets(made: Deployment) -> Iterator[Document]:
    """Yield the token, or each role's certificates: a pod sees no other role's keys."""
    for role in () if made.token else ("ps", "supervisor", "worker"):
        files = {
            name: base64.b64encode(content).decode()
            for name, content in sorted(made.certificates.items())
            if name == "ca.crt" or name.startswith(f"{role}-")
        }
        yield _secret(_metadata(made, role)) | {"data": files}
    if made.token:
        yield _secret(_metadata(made, "token")) | {"stringData": {"token": made.token}}


def _secret(metadata: Document) -> Document:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}


def _service(made: Deployment) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(made, "ps"),
        "spec": {
            "clusterIP": "None",
            # Workers bring the model: they must find a PS that is not ready yet.
            "publishNotReadyAddresses": True,
            "selector": _labels(made, "ps"),
            "ports": [{"name": "grpc", "port": made.port, "protocol": "TCP"}],
        },
    }


def _stateful_set(made: Deployment) -> Document:
    command = [
        *("thinwire", "ps", "--model_from=worker", "--id_ps=$(SHARD)", "--ip_PS=0.0.0.0", "--stay"),
        *_flags(made),
    ]
    listens = {"tcpSocket": {"port": made.port}}
    serves = listens if made.certificates else {"grpc": {"port": made.port}}
    container = _container(made, "ps", command) | {
        "ports": [{"name": "grpc", "containerPort": made.port}],
        "startupProbe": {**listens, "periodSeconds": 2, "failureThreshold": 150},
        "livenessProbe": {**listens, "periodSeconds": 20, "failureThreshold": 6},
        "readinessProbe": {**serves, "periodSeconds": 5, "timeoutSeconds": 3},
    }
    shard = {"name": "SHARD", "valueFrom": {"fieldRef": {"fieldPath": _POD_INDEX}}}
    container["env"] = [shard, *container["env"]]
    claim = {"metadata": {"name": "run", "labels": _labels(made, "ps")}, "spec": _claim(made)}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(made, "ps"),
        "spec": {
            "serviceName": f"{made.name}-ps",
            "replicas": made.shards,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": _labels(made, "ps")},
            "template": _template(made, "ps", container, {"terminationGracePeriodSeconds": 60}),
            "volumeClaimTemplates": [claim],
        },
    }


def _supervisor(made: Deployment) -> Document:
    command = ["thinwire", "supervisor", "--model_from=worker", *_flags(made)]
    volume = {"name": "run", "persistentVolumeClaim": {"claimName": f"{made.name}-supervisor"}}
    pod = {"restartPolicy": "OnFailure", "volumes": [volume]}
    container = _container(made, "supervisor", command)
    container["env"] = [{"name": "THINWIRE_SCRIPT", "value": made.script}, *container["env"]]
    template = _template(made, "supervisor", container, pod)
    return _job(made, "supervisor", {"backoffLimit": 20, "template": template})


def _workers(made: Deployment) -> Document:
    container = _container(made, "worker", ["python", made.script])
    container["env"] = [
        {"name": "THINWIRE_PS", "value": made.addresses},
        {"name": "THINWIRE_NB_WORKERS", "value": str(made.workers)},
        {"name": "THINWIRE_FLAGS", "value": shlex.join(_own_flags(made))},
        *container["env"],
    ]
    if made.gpus:
        container["resources"]["limits"]["nvidia.com/gpu"] = str(made.gpus)
    pod = {"restartPolicy": "Never", "volumes": [{"name": "run", "emptyDir": {}}]}
    on_codes = {"containerName": "worker", "operator": "In", "values": list(_FINAL)}
    return _job(
        made,
        "worker",
        {
            "completionMode": "Indexed",
            "completions": made.workers,
            "parallelism": made.workers,
            "backoffLimit": 5 * made.workers,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": on_codes}]},
            "template": _template(made, "worker", container, pod),
        },
    )


def _job(made: Deployment, role: str, spec: Document) -> Document:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(made, role),
        "spec": spec,
    }


def _flags(made: Deployment) -> tuple[str, ...]:
    """Return the flags of PS and Supervisor."""
    place = (f"--nb_workers={made.workers}", f"--ps_hosts={made.addresses}")
    return (*place, *_own_flags(made))


def _own_flags(made: Deployment) -> tuple[str, ...]:
    """Return the flags of every node, workers too."""
    if not made.certificates:
        return (f"--run_dir={RUN_DIR}/run", *made.flags)
    files = {"cert": f"{_NODE_FILES}.crt", "key": f"{_NODE_FILES}.key", "ca": "ca.crt"}
    trust = (f"--tls_{name}={CERTIFICATES}/{file}" for name, file in files.items())
    return (f"--run_dir={RUN_DIR}/run", *made.flags, *trust)


def _container(made: Deployment, role: str, command: list[str]) -> Document:
    token = {"secretKeyRef": {"name": f"{made.name}-token", "key": "token"}}
    mounts = [{"name": "run", "mountPath": RUN_DIR}]
    if made.certificates:
        mounts.append({"name": "certificates", "mountPath": CERTIFICATES})
    return {
        "name": role,
        "image": made.image,
        "command": command,
        "env": [{"name": "THINWIRE_TOKEN", "valueFrom": token}] if made.token else [],
        "resources": {
            "requests": {"cpu": made.cpus, "memory": made.memory},
            "limits": {"memory": made.memory},
        },
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _template(made: Deployment, role: str, container: Document, pod: Document) -> Document:
    spec: Document = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        **pod,
    }
    if made.certificates:
        secret = {"secretName": f"{made.name}-{role}", "defaultMode": 0o400}
        volume = {"name": "certificates", "secret": secret}
        spec["volumes"] = [*spec.get("volumes", ()), volume]
    return {"metadata": {"labels": _labels(made, role)}, "spec": spec}


def _claim(made: Deployment) -> Document:
    spec: Document = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": made.storage}},
    }
    return spec | ({"storageClassName": made.storage_class} if made.storage_class else {})
