"""Workers in a Ray cluster, whose machines are processes here: one may go at any time, and no row is lost or twice."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_llm.offline.flags import parse_arguments
from compiled_llm.offline.ray_workers import RayCluster, ray_settings
from tests.offline.runs import COMMAND, write_prompts

NUM_ROWS = 900
FAST = ["--enforce-eager", "--bucket-sizes", "1,4", "--max-tokens", "6", "--num-kv-blocks", "300", "--quiet"]
FAST += ["--dtype", "float32", "--progress", "off"]
# A head without cores, and as many machines as it is told, with so many cores. A line that it reads has one replaced.
CLUSTER = """
import sys, time

from ray._private import services
from ray.cluster_utils import Cluster

get_node = services.get_node


def get_node_at_last(*arguments):  # Ray gives a raylet 30 s, which other work may hold the cores for
    for _ in range(100):
        try:
            return get_node(*arguments)
        except RuntimeError:
            time.sleep(3)
    return get_node(*arguments)


services.get_node = get_node_at_last

head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 2**27, "node_ip_address": "127.0.0.2"}
cluster = Cluster(initialize_head=True, head_node_args=head)
machine = {"num_cpus": int(sys.argv[2]), "object_store_memory": 2**27, "node_ip_address": "127.0.0.1"}
machines = [cluster.add_node(**machine) for _ in range(int(sys.argv[1]))]
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(machines.pop(0), allow_graceful=False)
    machines.append(cluster.add_node(**machine))
    print("gone", flush=True)
cluster.shutdown()
"""


class MachinesOfRay:
    def __init__(self, count: int = 2, cores: int = 1) -> None:
        environment = {**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, str(count), str(cores)], env=environment, **pipes
        )
        self.pid = self._process.pid
        self.address = self._answer()

    def replace_one(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._answer() == "gone"

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="module")
def machines() -> Iterator[MachinesOfRay]:
    machines = MachinesOfRay()
    yield machines
    machines.close()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("input") / "prompts.jsonl", NUM_ROWS)


@pytest.fixture(scope="module")
def whole(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a run with one engine, on this machine."""
    output = tmp_path_factory.mktemp("whole") / "out.jsonl"
    subprocess.run([*COMMAND, *FAST, "--input", str(prompts), "--output", str(output)], check=True, capture_output=True)
    return sorted(output.read_text().splitlines())


def started(output: Path, log: Path, *arguments: str) -> subprocess.Popen:
    """A run that has written some rows."""
    with open(log, "w") as file:
        driver = subprocess.Popen([*COMMAND, *FAST, "--output", str(output), *arguments], stdout=file, stderr=file)
    while not output.exists() or output.read_bytes().count(b"\n") < 20:
        assert driver.poll() is None, log.read_text()
        time.sleep(0.01)
    return driver


@pytest.mark.battery
def test_a_machine_that_goes_costs_no_row(
    machines: MachinesOfRay, prompts: Path, whole: list[str], tmp_path: Path
) -> None:
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    arguments = ["--input", str(prompts), "--workers", "2", "--ray", machines.address]
    driver = started(output, log, *arguments)
    machines.replace_one()
    assert output.read_bytes().count(b"\n") < NUM_ROWS, "it went while rows were served"
    assert driver.wait() == 0, log.read_text()
    assert sorted(output.read_text().splitlines()) == whole, "all rows once, sampled tokens too"


@pytest.mark.battery
def test_a_run_goes_on_after_its_driver_was_killed(
    machines: MachinesOfRay, prompts: Path, whole: list[str], tmp_path: Path
) -> None:
    output, log = tmp_path / "out.jsonl", tmp_path / "log"
    arguments = ["--input", str(prompts), "--workers", "2", "--ray", machines.address]
    driver = started(output, log, *arguments)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    assert output.read_bytes().count(b"\n") < NUM_ROWS
    # Without a cluster too: results and manifest are the same.
    subprocess.run([*COMMAND, *FAST, "--input", str(prompts), "--output", str(output), "--resume"], check=True)
    assert sorted(output.read_text().splitlines()) == whole


# A cluster of this machine alone, and a client that knows its address.
STRANGER = """
import os, subprocess, sys

from compiled_llm.offline.ray_workers import RayCluster

cluster = RayCluster("")
from ray._common.usage import usage_lib

address = cluster.ray.get_runtime_context().gcs_address
niceness = cluster.ray.get(cluster.ray.remote(num_cpus=1)(lambda: os.nice(0)).remote())
assert niceness == os.nice(0), niceness
assert not usage_lib.usage_stats_enabled()
environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
client = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).internal_kv_keys(b'', b'')"
done = subprocess.run([sys.executable, "-c", client, address], env=environment, capture_output=True, text=True)
assert "AuthenticationError" in done.stderr, done.stderr
cluster.close()
"""


@pytest.mark.battery
def test_a_cluster_of_ones_own_lets_nobody_in() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    subprocess.run([sys.executable, "-c", STRANGER], env=environment, check=True)


class ClusterOf(RayCluster):
    """One that is made up: machines with so many cores each."""

    def __init__(self, *cores: int) -> None:
        self._machines = list(cores)

    def _cores(self) -> list[int]:
        return self._machines


@pytest.mark.parametrize(
    ("cores", "workers", "threads", "together"),
    [([8], 2, 4, 2), ([8, 8], 2, 8, 1), ([8, 8], 3, 4, 2), ([4, 16], 2, 4, 2), ([2], 5, 1, 2)],
)
def test_engines_on_one_machine_share_its_cores_and_its_memory(
    cores: list[int], workers: int, threads: int, together: int
) -> None:
    flags = ["--workers", str(workers), "--ray", "--device", "cpu", "--gpu-memory-utilization", "0.8"]
    args = parse_arguments("serve_offline", flags)
    settings = ray_settings(args, ClusterOf(*cores), {"directory": "/"})
    assert [each["number"] for each in settings] == list(range(workers))
    for each in settings:
        assert each["directory"] == "/"
        assert each["overrides"]["num_threads"] == threads
        assert each["overrides"]["gpu_memory_utilization"] == pytest.approx(0.8 / together)
    args = parse_arguments("serve_offline", [*flags, "--num-threads", "2"])
    assert ray_settings(args, ClusterOf(*cores), {})[0]["overrides"]["num_threads"] == 2


def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"--ray must name a cluster that runs, given 127\.0\.0\.1:1: Connection refused"
    ):
        RayCluster("127.0.0.1:1")
    for address in ("somewhere", "ray://127.0.0.1:10001", ":6379", "host:port"):
        with pytest.raises(ValueError, match=f"--ray must be HOST:PORT, given {address}"):
            RayCluster(address)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match=r"RAY_ADDRESS must name a cluster that runs, given 127\.0\.0\.1:1"):
        RayCluster("")
