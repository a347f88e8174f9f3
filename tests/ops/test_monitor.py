"""scripts/monitor_gpu.sh over a stub nvidia-smi."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ops.conftest import Host

SCRIPT = "scripts/monitor_gpu.sh"


def test_reading_as_json(host: Host) -> None:
    reading = host.json(SCRIPT, "--once", "--json")
    assert reading["reason"] is None
    assert reading["gpus"] == [
        {
            "index": 0,
            "name": "Tesla T4",
            "driver": "580.95.05",
            "temperature_c": 71,
            "utilization_percent": 98,
            "memory_used_mib": 9120,
            "memory_total_mib": 15360,
            "power_w": 69.8,
            "power_limit_w": 70.00,
            "sm_clock_mhz": 1005,
            "clock_limits": "power-cap",
        }
    ]


def test_several_gpus_absent_sensors_and_thermal_slowdown(host: Host) -> None:
    host.variables["STUB_READING"] = (
        "0, A 10, 580.1, 90, 5, 1, 2, 3, 4, 5, 0x0000000000000060\n"
        '1, Odd "name", 580.1, [N/A], [Not Supported], 1, 2, [N/A], [N/A], 5, 0x0000000000000000'
    )
    first, second = host.json(SCRIPT, "--once", "--json")["gpus"]
    assert first["clock_limits"] == "THERMAL-software THERMAL-hardware"
    assert second["name"] == 'Odd "name"'
    assert second["clock_limits"] == "none"
    assert [second[name] for name in ("temperature_c", "utilization_percent", "power_w")] == [None, None, None]


def test_old_driver_is_asked_by_the_old_name(host: Host) -> None:
    host.variables["STUB_OLD_DRIVER"] = "yes"
    assert len(host.json(SCRIPT, "--once", "--json")["gpus"]) == 1


def test_text_reading(host: Host) -> None:
    result = host.run(SCRIPT, "--once")
    assert result.returncode == 0
    assert "GPU 0 Tesla T4 (driver 580.95.05)  71 C  load 98 %  memory 9120/15360 MiB" in result.stdout
    assert "clock held by: power-cap" in result.stdout


@pytest.mark.parametrize("driver", ["absent", "no GPU"])
def test_without_a_gpu_it_says_so(host: Host, driver: str) -> None:
    if driver == "absent":
        host.without("nvidia-smi")
    host.variables["STUB_GPU"] = ""
    once = host.run(SCRIPT, "--once")
    assert once.returncode == 0
    assert "no" in once.stdout.lower()
    assert len(once.stdout.splitlines()) == 1
    assert host.json(SCRIPT, "--once", "--json")["gpus"] == []
    # Nothing to watch: it does not loop for ever.
    assert host.run(SCRIPT).returncode == 1


def test_it_goes_on_reading(host: Host) -> None:
    command = [str(host.bin / "bash"), SCRIPT, "--json", "--interval", "0.05"]
    environment = {"PATH": str(host.bin), "STUB_LOG": "/dev/null"}
    with subprocess.Popen(command, cwd=host.folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        readings = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.terminate()
    assert all(len(reading["gpus"]) == 1 for reading in readings)


@pytest.mark.parametrize("arguments", [["--interval", "soon"], ["--interval"], ["--forever"]])
def test_wrong_usage(host: Host, arguments: list[str]) -> None:
    assert host.run(SCRIPT, *arguments).returncode == 2
