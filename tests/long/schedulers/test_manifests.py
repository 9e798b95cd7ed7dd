"""The Kubernetes, Kubeflow and Vertex AI examples against the schemas of their packages. make test-manifests

Nothing here runs on a cluster. Job, Service, NetworkPolicy and PersistentVolumeClaim are checked against the
JSON schemas of Kubernetes (kubernetes-validate), TrainJob and TrainingRuntime against the models of
Kubeflow's Trainer v2 (kubeflow-trainer-api), TFJob against those of the operator v1 (kubeflow-training), and
the job of Vertex AI against its protocol buffers (google-cloud-aiplatform).
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

PACKAGES = (
    "yaml",
    "kubernetes_validate",
    "kubeflow_trainer_api",
    "kubeflow.training",
    "google.cloud.aiplatform_v1",
)


def absent() -> list[str]:
    def is_there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in PACKAGES if not is_there(name)]


pytestmark = pytest.mark.skipif(bool(absent()), reason=f"not installed: {', '.join(absent())}")

EXAMPLES = Path(__file__).parents[3] / "examples"
KUBERNETES = "1.31"


def documents(name: str) -> list[dict[str, Any]]:
    import yaml

    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def of_kind(name: str, kind: str) -> dict[str, Any]:
    return next(document for document in documents(name) if document["kind"] == kind)


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """The fields of a document that its model does not know, or changes."""
    if isinstance(before, dict):
        return [
            field
            for key, value in before.items()
            for field in lost(value, (after or {}).get(key), f"{path}.{key}")
        ]
    if isinstance(before, list):
        pairs = zip(before, after or [None] * len(before), strict=True)
        return [
            field
            for number, (one, other) in enumerate(pairs)
            for field in lost(one, other, f"{path}[{number}]")
        ]
    return [] if before == after else [path]


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubeflow_trainer.yaml", "kubeflow.yaml"])
def test_every_resource_of_kubernetes_itself_fits_its_schema(name: str) -> None:
    import kubernetes_validate

    own = [one for one in documents(name) if "kubeflow" not in one["apiVersion"]]
    assert "NetworkPolicy" in {one["kind"] for one in own}
    for one in own:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


@pytest.mark.parametrize("kind", ["TrainJob", "TrainingRuntime"])
def test_the_resources_of_trainer_v2_have_only_fields_that_it_knows(kind: str) -> None:
    from kubeflow_trainer_api import models

    document = of_kind("kubeflow_trainer.yaml", kind)
    model = getattr(models, f"TrainerV1alpha1{kind}")
    assert lost(document, model.from_dict(document).to_dict()) == []


def test_the_job_of_the_operator_v1_has_only_fields_that_it_knows() -> None:
    from kubeflow.training import ApiClient, Configuration
    from kubeflow.training import models as v1

    class Answer:
        def __init__(self, document: dict[str, Any]) -> None:
            self.data = json.dumps(document)

    document = of_kind("kubeflow.yaml", "TFJob")
    client = ApiClient(Configuration())
    read = client.deserialize(Answer(document), v1.KubeflowOrgV1TFJob)
    assert lost(document, client.sanitize_for_serialization(read)) == []


def test_the_job_of_vertex_ai_has_only_fields_that_it_knows() -> None:
    from google.cloud import aiplatform_v1
    from google.protobuf import json_format

    (document,) = documents("vertex_ai.yaml")
    spec = json_format.ParseDict(document, aiplatform_v1.CustomJobSpec.pb()())
    assert [pool.replica_count for pool in spec.worker_pool_specs] == [1, 1]


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubeflow_trainer.yaml", "kubeflow.yaml"])
def test_the_policy_selects_the_pods_of_the_job_and_lets_nobody_else_in(name: str) -> None:
    policy = of_kind(name, "NetworkPolicy")["spec"]
    text = (EXAMPLES / name).read_text()
    labels = policy["podSelector"]["matchLabels"]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert re.search(r"labels: { app: digits }", text)
    assert labels == {"app": "digits"}


def test_pods_may_end_later_than_their_launcher_kills_the_workers() -> None:
    pod = of_kind("kubernetes.yaml", "Job")["spec"]["template"]["spec"]
    grace = next(part for part in pod["containers"][0]["command"] if part.startswith("--grace="))
    assert pod["terminationGracePeriodSeconds"] > int(grace.partition("=")[2])
