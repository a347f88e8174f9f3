"""The service as the compose file runs it, as far as that can be had without Docker: in a mount namespace of its own
with a read-only file system, without capabilities, with `/data`, `/models` and a bounded `/tmp` alone to write to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
NAMESPACE = r"""
set -eu
place=$1 root=$2
shift 2
mount --make-rprivate /
for name in data models; do mount --bind "$place/$name" "$place/$name"; done
mount -t tmpfs -o size=512m tmpfs "$place/tmp"
while read -r _ mounted kind _; do
  case $kind:$mounted in
    proc:* | sysfs:* | devpts:* | mqueue:* | cgroup*:* | devtmpfs:*) continue ;;
    *:/dev* | *:/proc* | *:/sys* | *:"$place"/*) continue ;;
  esac
  mount -o remount,ro,bind "$mounted" 2>/dev/null || echo "left writable: $mounted" >&2
done </proc/self/mounts
! touch "$place/x" "$root/x" 2>/dev/null
cd "$place/data"
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    try:
        tried = subprocess.run(
            [*UNSHARE, "mount", "--make-rprivate", "/"], capture_output=True, check=False, timeout=30
        )
    except FileNotFoundError:
        pytest.skip("unshare is not here (util-linux)")
    if tried.returncode:
        pytest.skip("this machine gives no mount namespace")


class Container:
    def __init__(self, place: Path) -> None:
        self.place = place
        for name in ("data", "models", "tmp"):
            (place / name).mkdir()
        self.port = free_port()
        temporary, data = str(place / "tmp"), str(place / "data")
        self.variables = {
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "HOME": temporary,
            "TMPDIR": temporary,
            "HF_HOME": str(place / "models"),
            "HF_HUB_OFFLINE": "1",
            "OWL_SAP_API__HOST": "0.0.0.0",
            "OWL_SAP_API__PORT": str(self.port),
            "OWL_SAP_ACCESS__KEYS": f"{data}/keys.json",
            "OWL_SAP_STATE__PATH": f"{data}/state",
            "OWL_SAP_STORE__KIND": "local",
            "OWL_SAP_STORE__PATH": data,
        }

    def start(self, *verb: str) -> subprocess.Popen[str]:
        command = [*UNSHARE, "bash", "-c", NAMESPACE, "container", str(self.place), str(ROOT)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*command, sys.executable, "-m", "app", *verb], env=self.variables, stdout=pipe, stderr=pipe, text=True
        )

    def as_process_1(self, *verb: str) -> subprocess.Popen[str]:
        """In a namespace where it is process 1, which the kernel spares every signal that it does not ask for."""
        command = [*UNSHARE, "--pid", "--fork", "--kill-child", sys.executable, "-m", "app", *verb]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.place / "data", env=self.variables, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *verb: str) -> str:
        with self.start(*verb) as process:
            out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        return out


def test_it_serves_its_model_with_nothing_to_write_but_its_volumes(tmp_path: Path) -> None:
    container = Container(tmp_path)
    key = container.run("keys", "create", "app", "--scope", "embed").strip()
    with container.start("start", "serve") as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first, process.stderr and process.stderr.read()
            assert json.loads(first)["url"].endswith(f":{container.port}")
            container.run("health")
            status = Path(f"/proc/{process.pid}/status").read_text()
            for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"):
                assert line in status
            with httpx.Client(base_url=f"http://127.0.0.1:{container.port}", timeout=60) as client:
                assert client.post("/embed", json={"inputs": "pump"}).status_code == 401
                answer = client.post("/embed", json={"inputs": "pump"}, headers={"Authorization": f"Bearer {key}"})
            assert (answer.status_code, len(answer.json()[0])) == (200, 384)
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Read-only" not in errors
    assert "left writable" not in errors
    assert list((tmp_path / "models").iterdir()) == []


def test_as_process_1_it_answers_sigterm_without_an_init(tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.variables |= {"OWL_SAP_API__HOST": "127.0.0.1", "OWL_SAP_EMBEDDING__MODEL": "hash:16"}
    del container.variables["OWL_SAP_ACCESS__KEYS"]
    with container.as_process_1("start", "serve") as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["url"]
            (inside,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            assert "NSpid:\t" + inside + "\t1\n" in Path(f"/proc/{inside}/status").read_text()
            os.kill(int(inside), signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate(timeout=30)
