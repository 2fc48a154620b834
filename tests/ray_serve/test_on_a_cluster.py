"""The application on clusters whose machines are processes here: served, killed, updated, drained.

Needs the extra 'ray-serve'. ``python -m tests.ray_serve.test_on_a_cluster 5000 60`` asks 5,000 requests and kills an
engine each minute.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from compiled_llm.system.child_process import with_package
from tests.battery.test_replicas import TEXT, bodies, ended_once, total, until
from tests.offline.test_ray_workers import MachinesOfRay
from tests.server.test_run import LONG, Program, program

pytest.importorskip("ray.serve", reason="needs the extra 'ray-serve'", exc_type=ImportError)
pytestmark = pytest.mark.battery
SMALL = {"num_kv_blocks": 256, "max_model_len": 768, "dtype": "float32"}
TWO = ("--data-parallel-size", "2", *(f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()))
ENGINE = {**SMALL, "enforce_eager": True, "bucket_sizes": [1, 4], "progress": "off"}


@pytest.fixture(scope="module")
def machines() -> Iterator[MachinesOfRay]:
    """Three raylets: a head without cores, and two of one core."""
    machines = MachinesOfRay()
    yield machines
    machines.close()


def engines(machines: MachinesOfRay) -> list[psutil.Process]:
    """The engines' processes."""
    found = []
    for child in psutil.Process(machines.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "compiled_llm.server.engine_process" in child.cmdline():
                found.append(child)
    return found


@contextlib.contextmanager
def serving(machines: MachinesOfRay, log: Path, *flags: str) -> Iterator[Program]:
    with log.open("w") as file, program("--ray", machines.address, *flags, stderr=file) as server:
        until(lambda: server.process.poll() is not None or ": serves" in said(log))
        assert server.process.poll() is None, said(log)
        yield server
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0, said(log)
        until(lambda: engines(machines) == [])


def said(log: Path) -> str:
    return log.read_text()


def asking(url: str, num_requests: int, ends: Counter[str], faults: list[BaseException]) -> list[threading.Thread]:
    """Clients that ask so many requests together, whole answers and streams, and note how each ends."""
    left, lock = iter(range(num_requests)), threading.Lock()

    def client() -> None:
        try:
            while True:
                with lock:
                    number = next(left, None)
                if number is None or ends["stop"]:
                    return
                own = random.Random(number)
                prompt = TEXT[own.randrange(60) :][: own.randrange(1, 300)]
                body: dict[str, Any] = {"prompt": prompt, "max_tokens": own.randrange(1, 24), "ignore_eos": True}
                if own.random() < 0.5:
                    body |= {"stream": True, "stream_options": {"include_usage": True}}
                ended_once(url, body, ends)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    return threads


def killed_under_load(machines: MachinesOfRay, log: Path, num_requests: int, kill_seconds: float) -> Counter[str]:
    """How the requests ended, how many engines were killed, and how many requests were asked a second time."""
    ends, faults, rng = Counter[str](), list[BaseException](), random.Random(0)
    kills = 0
    with serving(machines, log, *TWO) as server:
        fixed = {"prompt": TEXT[:100], "max_tokens": 20, "seed": 3}
        expected = server.http.post("/v1/completions", json=fixed).json()["choices"]
        threads = asking(str(server.http.base_url), num_requests, ends, faults)
        next_kill = time.monotonic() + kill_seconds
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            if time.monotonic() > next_kill and (found := engines(machines)):
                rng.choice(found).kill()
                kills += 1
                next_kill = time.monotonic() + kill_seconds
        assert faults == []
        assert sum(ends.values()) == num_requests, "each has ended, and once"
        assert server.http.post("/v1/completions", json=fixed).json()["choices"] == expected
        until(lambda: server.http.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0})
        again = int(total(server, "compiled_llm:requests_served_again_total")[""])
    return ends + Counter({"kills": kills, "served again": again})


def test_answers_are_those_of_one_engine_and_sigterm_drains(machines: MachinesOfRay, tmp_path: Path) -> None:
    with program(*TWO[2:]) as server:
        server.wait_until("/health")
        expected = [server.http.post("/v1/completions", json=body).json()["choices"] for body in bodies()]
    log = tmp_path / "log"
    with serving(machines, log, *TWO) as server:
        assert [server.http.post("/v1/completions", json=body).json()["choices"] for body in bodies()] == expected
        served = total(server, "vllm:request_success_total")
        assert set(served) == {"0", "1"}
        assert min(served.values()) > 0, "both have served"
        assert server.http.get("/nothing").json()["error"]["code"] == "not_found"
        assert server.http.post("/v1/completions", json={"prompt": 3}).status_code == 400
        running = engines(machines)
        assert len(running) == 2
        with server.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 200}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert "error" not in rest[-2]
        assert server.process.wait(120) == 0
    assert not any(engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE for engine in running)


def test_each_request_ends_once_whichever_engine_is_killed(machines: MachinesOfRay, tmp_path: Path) -> None:
    ends = killed_under_load(machines, tmp_path / "log", 500, 10)
    print(dict(ends))
    assert ends["whole"] > 400
    assert ends["kills"] > 0


def test_a_machine_that_goes_takes_no_other_ones_requests(machines: MachinesOfRay, tmp_path: Path) -> None:
    """The one whose machine goes may be the process that speaks HTTP: then its requests end with an error."""
    ends, faults = Counter[str](), list[BaseException]()
    with serving(machines, tmp_path / "log", *TWO) as server:
        url = str(server.http.base_url)
        threads = asking(url, 60, ends, faults)
        time.sleep(1)
        machines.replace_one()
        for thread in threads:
            thread.join()

        def is_whole() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return server.http.post("/v1/completions", json={"prompt": "import"}).status_code == 200
            return False

        until(is_whole)
        until(lambda: len(engines(machines)) == 2)
    print(dict(ends), f"{len(faults)} connections ended")
    assert sum(ends.values()) >= 60 - 6


FILE = """
http_options: {{host: 127.0.0.1, port: {port}}}
proxy_location: HeadOnly
applications:
  - name: compiled-llm
    route_prefix: /
    import_path: compiled_llm.ray_serve.application:app
    args: {args}
    deployments: {deployments}
"""
RUN = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "run", "--non-blocking", "--address"]
END = "import sys, ray; from ray import serve; ray.init(sys.argv[1]); serve.shutdown()"


class Files:
    """Configuration files that are given to Ray Serve, one after the other, until it is shut down.

    Attributes:
        http: a client.
    """

    def __init__(self, machines: MachinesOfRay, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._address, self._file = machines.address, directory / "serve.yaml"
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=120)

    def deploy(self, *deployments: dict[str, Any], **args: Any) -> None:
        args["engine"] = {**ENGINE, **args.get("engine", {})}
        values = {"port": self._port, "args": json.dumps(args), "deployments": json.dumps(deployments)}
        self._file.write_text(FILE.format(**values))
        subprocess.run([*RUN, self._address, str(self._file)], check=True, capture_output=True, env=ENVIRONMENT)

    def names(self) -> list[str]:
        with contextlib.suppress(httpx.TransportError):
            answer = self.http.get("/v1/models")
            if answer.status_code == 200:
                return [model["id"] for model in answer.json()["data"]]
        return []

    def close(self) -> None:
        self.http.close()
        subprocess.run([sys.executable, "-c", END, self._address], check=True, capture_output=True, env=ENVIRONMENT)


ENVIRONMENT = with_package(os.environ)


@pytest.fixture
def files(machines: MachinesOfRay, tmp_path: Path) -> Iterator[Files]:
    files = Files(machines, tmp_path)
    yield files
    files.close()


def test_an_update_lets_answers_end_and_serves_new_ones(machines: MachinesOfRay, files: Files) -> None:
    files.deploy(server={"served_model_name": ["first"], "drain_seconds": 120})
    until(lambda: files.names() == ["first"])
    (old,) = engines(machines)
    with files.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 700}) as stream:
        lines = stream.iter_lines()
        next(lines)
        files.deploy(server={"served_model_name": ["second"], "drain_seconds": 120}, engine={"max_num_seqs": 3})
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert "error" not in rest[-2]
    until(lambda: files.names() == ["second"])
    until(lambda: len(engines(machines)) == 1)
    assert engines(machines) != [old]
    answer = files.http.post("/v1/completions", json={"prompt": "import os", "model": "second"})
    assert answer.status_code == 200
    assert files.http.get("/server_info").json()["sizes"]["max_num_seqs"] == 3


def test_engines_come_with_requests_and_go_without(machines: MachinesOfRay, files: Files) -> None:
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 1,
        "downscale_delay_s": 2,
        "look_back_period_s": 11,
        "policy": {"policy_function": "compiled_llm.ray_serve.autoscaling:QueueAndKvUse"},
    }
    files.deploy({"name": "Engine", "autoscaling_config": scaling}, replicas={"max_replicas": 2})
    until(lambda: files.names() != [])
    assert len(engines(machines)) == 1
    ends, faults = Counter[str](), list[BaseException]()
    threads = asking(str(files.http.base_url), 100_000, ends, faults)  # until it is closed
    try:
        until(lambda: len(engines(machines)) == 2)
    finally:
        ends["stop"] = 1
    for thread in threads:
        thread.join()
    assert faults == []
    until(lambda: len(engines(machines)) == 1)


def test_the_ranks_of_an_engine_are_on_one_machine(tmp_path: Path) -> None:
    """Two raylets: the head, and a machine of two cores."""
    machines = MachinesOfRay(1, cores=2)
    files = Files(machines, tmp_path)
    try:
        files.deploy(engine={"tensor_parallel_size": 2, "num_threads": 1})
        until(lambda: files.names() != [])
        (engine,) = engines(machines)
        assert len([child for child in engine.children() if child.status() != psutil.STATUS_ZOMBIE]) >= 1
        answer = files.http.post("/v1/completions", json={"prompt": "import os", "max_tokens": 8, "temperature": 0})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        files.close()
        machines.close()


if __name__ == "__main__":
    cluster = MachinesOfRay()
    try:
        with tempfile.TemporaryDirectory() as directory:
            print(dict(killed_under_load(cluster, Path(directory) / "log", int(sys.argv[1]), float(sys.argv[2]))))
    finally:
        cluster.close()
