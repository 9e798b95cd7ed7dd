import json
from pathlib import Path

import pytest

from replicast.config import Cluster, read_cluster, read_launch
from replicast.errors import ClusterError

TWO = ["a:1", "b:2"]


def described(cluster: object, task: object = None) -> dict[str, str]:
    value = {"cluster": cluster} if task is None else {"cluster": cluster, "task": task}
    return {"TF_CONFIG": json.dumps(value)}


def worker(index: object) -> dict[str, object]:
    return {"type": "worker", "index": index}


@pytest.mark.parametrize("environ", [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": "  "}, {"TF_CONFIG": "{}"}])
def test_without_a_cluster_the_job_has_one_worker(environ: dict[str, str]) -> None:
    assert read_cluster(environ) is None


@pytest.mark.parametrize("index", [1, "1"])  # as some platforms write it
def test_a_cluster_of_workers_is_read(index: object) -> None:
    cluster = read_cluster(described({"worker": TWO}, worker(index)))
    assert cluster == Cluster(addresses=("a:1", "b:2"), rank=1)
    assert cluster.size == 2
    assert read_cluster({"TF_CONFIG": cluster.tf_config()}) == cluster


@pytest.mark.parametrize(
    ("task", "rank"), [({"type": "chief", "index": 0}, 0), (worker(0), 1), (worker(1), 2)]
)
def test_a_chief_is_worker_0(task: object, rank: int) -> None:
    cluster = read_cluster(described({"worker": TWO, "chief": ["c:3"]}, task))
    assert cluster is not None
    assert (cluster.addresses, cluster.rank) == (("c:3", "a:1", "b:2"), rank)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TF_CONFIG": "{cluster"}, "malformed"),
        ({"TF_CONFIG": "[1]"}, "Expected `object`, got `array`"),
        (described([1]), "got `array` - at `$.cluster`"),
        (described({"worker": "a:1"}, worker(0)), "Expected `array`, got `str`"),
        (described({"worker": [1, 2]}, worker(0)), "Expected `str`, got `int`"),
        (described({"worker": TWO, "ps": ["p:1"]}, worker(0)), "parameter servers"),
        (described({"worker": ["a"]}, worker(0)), "host:port"),
        (described({"worker": ["a:0"]}, worker(0)), "port from 1 to 65535"),
        (described({"worker": ["a:65536"]}, worker(0)), "port from 1 to 65535"),
        (described({"worker": ["a:x"]}, worker(0)), "host:port"),
        (described({"worker": ["a:" + "9" * 4301]}, worker(0)), "port from 1 to 65535"),
        (described({"worker": [":5"]}, worker(0)), "host:port"),
        (described({"worker": ["a:1", "a:1"]}, worker(0)), "same address"),
        (described({"worker": TWO}), "Received: no task"),
        (described({"worker": TWO}, {"type": "worker"}), "missing required field `index`"),
        (described({"worker": TWO}, {"type": "master", "index": 0}), "Received: master 0"),
        (
            described({"worker": TWO, "master": ["e:1"]}, {"type": "master", "index": 0}),
            'those in "cluster" that train: worker 0 to 1',
        ),
        (described({"worker": TWO}, worker(2)), "worker 0 to 1"),
        (described({"worker": TWO}, worker(-1)), "worker 0 to 1"),
        (described({"worker": TWO}, worker(True)), "got `bool`"),
        (described({"worker": TWO}, worker("one")), "worker 0 to 1"),
    ],
)
def test_a_broken_tf_config_is_refused_by_name(environ: dict[str, str], expected: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_cluster(environ)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_long_broken_tf_config_is_shortened_in_the_message() -> None:
    with pytest.raises(ClusterError) as caught:
        read_cluster({"TF_CONFIG": "x" * 5000})
    assert len(str(caught.value)) < 600


def test_the_variables_of_the_launcher_are_read() -> None:
    launch = read_launch({"REPLICAST_RUN_DIR": "/r", "REPLICAST_ATTEMPT": "3", "REPLICAST_LAUNCHED": "1"})
    assert (launch.run_dir, launch.attempt, launch.launched) == (Path("/r"), 3, True)
    alone = read_launch({})
    assert (alone.run_dir, alone.attempt, alone.launched) == (None, 0, False)
    with pytest.raises(ClusterError, match="REPLICAST_ATTEMPT"):
        read_launch({"REPLICAST_ATTEMPT": "first"})
