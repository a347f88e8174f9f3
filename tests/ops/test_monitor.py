"""scripts/monitor_gpu.sh over a stub nvidia-smi."""

from __future__ import annotations

import json
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from app.src.core import nvml

if TYPE_CHECKING:
    from tests.ops.conftest import Host

SCRIPT = "scripts/monitor_gpu.sh"
NOT_TOLD = {"temperature_slowdown_celsius", "remapped_rows_pending"}
"""By nvidia-smi, of a T4."""


def the_card(host: Host) -> dict[str, Any]:
    (card,) = host.json(SCRIPT, "--once", "--json")["devices"]
    return dict(card)


def test_reading_as_json(host: Host) -> None:
    reading = host.json(SCRIPT, "--once", "--json")
    assert (reading["driver_version"], reading["cuda_version"], reading["reason"]) == ("580.95.05", "13.0", None)
    (card,) = reading["devices"]
    assert {name for name, value in card.items() if value is None} == NOT_TOLD | {"reason"}
    assert {name: value for name, value in card.items() if value is not None} == {
        "index": 0,
        "name": "Tesla T4",
        "uuid": "GPU-0",
        "compute_capability": "7.5",
        "memory_total_bytes": 15360 << 20,
        "memory_used_bytes": 9120 << 20,
        "utilization_percent": 98,
        "memory_utilization_percent": 41,
        "temperature_celsius": 71,
        "power_watts": 69.8,
        "power_limit_watts": 70,
        "sm_clock_mhz": 1005,
        "sm_clock_max_mhz": 1590,
        "pcie_generation": 3,
        "pcie_generation_max": 3,
        "pcie_width": 16,
        "pcie_sent_bytes_per_second": 12_000_000,
        "pcie_received_bytes_per_second": 250_000_000,
        "ecc_uncorrected_errors": 0,
        "retired_pages_pending": False,
        "throttle": [{"reason": "sw_power_cap", "words": nvml.THROTTLE_REASONS[4].words, "normal": True}],
        "throttled_abnormally": False,
        "processes": [{"pid": 4711, "memory_bytes": 812 << 20}],
    }


def test_the_fields_are_those_of_the_rest_route_in_its_order(host: Host) -> None:
    reading = host.json(SCRIPT, "--once", "--json")
    assert list(reading["devices"][0]) == list(nvml.GpuState.__dataclass_fields__)
    assert set(reading) - {"time"} == set(nvml.GpuSnapshot.__dataclass_fields__)
    assert reading["note"] == nvml.NOTE


@pytest.mark.parametrize(
    "bits",
    [
        *(0, 0x4 | 0x8 | 0x40, 0x4 | 0x8000),
        *(pytest.param(bits, marks=pytest.mark.slow) for bits in (*nvml.THROTTLE_REASONS, 0x60)),
    ],
)
def test_throttle_reasons_are_told_as_nvml_s_are(host: Host, bits: int) -> None:
    host.card({"clocks_event_reasons.active": f"0x{bits:016X}"})
    card, wanted = the_card(host), nvml.throttles(bits)
    assert wanted is not None
    assert card["throttle"] == [{"reason": each.reason, "words": each.words, "normal": each.normal} for each in wanted]
    assert card["throttled_abnormally"] == any(each.normal is False for each in wanted)


def test_several_gpus_and_absent_sensors(host: Host) -> None:
    unknown = {"temperature.gpu": "[N/A]", "utilization.gpu": "[Not Supported]", "clocks_event_reasons.active": "[N/A]"}
    host.card({"index": "1", "uuid": "GPU-1", "name": 'Odd "name"', **unknown}, number=1)
    host.variables["STUB_PROCESSES"] = "GPU-1, 12, [N/A]\nGPU-1, 13, 5"
    host.variables["STUB_REMAPPED"] = "GPU-1, 1"
    host.variables["STUB_DMON"] = "#Time     gpu  txpci  rxpci\n#HH:MM  Idx  MB/s  MB/s\n"
    first, second = host.json(SCRIPT, "--once", "--json")["devices"]
    assert (first["processes"], first["remapped_rows_pending"]) == ([], None)
    assert second["name"] == 'Odd "name"'
    names = ("temperature_celsius", "utilization_percent", "throttle", "throttled_abnormally")
    assert [second[name] for name in names] == [None] * 4
    assert second["processes"] == [{"pid": 12, "memory_bytes": None}, {"pid": 13, "memory_bytes": 5 << 20}]
    assert second["remapped_rows_pending"] is True
    assert first["pcie_sent_bytes_per_second"] is None


def test_columns_of_dmon_are_found_by_their_headings(host: Host) -> None:
    host.variables["STUB_DMON"] = "# gpu    pwr  txpci  rxpci\n# Idx      W   MB/s   MB/s\n    0     69      7      -\n"
    card = the_card(host)
    assert (card["pcie_sent_bytes_per_second"], card["pcie_received_bytes_per_second"]) == (7_000_000, None)


def test_an_older_driver_is_asked_by_the_older_name_and_not_for_what_it_does_not_know(host: Host) -> None:
    new = ["clocks_event_reasons.active", "compute_cap", "retired_pages.pending"]
    host.card({"clocks_throttle_reasons.active": "0x0000000000000020"}, without=new)
    card = the_card(host)
    assert [each["reason"] for each in card["throttle"]] == ["sw_thermal_slowdown"]
    assert card["throttled_abnormally"] is True
    assert (card["compute_capability"], card["retired_pages_pending"], card["power_watts"]) == (None, None, 69.8)


def test_text_reading(host: Host) -> None:
    result = host.run(SCRIPT, "--once")
    assert result.returncode == 0, result.stderr
    assert "GPU 0 Tesla T4: 71 C, load 98 %, memory 9120 of 15360 MiB, power 69.80 of 70.00 W" in result.stdout
    assert "PCIe 3 x16 (sent 12, received 250 MB/s)" in result.stdout
    assert "clock: held by the power limit" in result.stdout
    assert "NOT NORMAL" not in result.stdout
    assert "processes: 4711 (812 MiB)" in result.stdout
    host.card({"clocks_event_reasons.active": "0x0000000000000044"})
    assert "NOT NORMAL: far too hot" in host.run(SCRIPT, "--once").stdout


@pytest.mark.parametrize("driver", ["absent", "no GPU"])
def test_without_a_gpu_it_says_so(host: Host, driver: str) -> None:
    if driver == "absent":
        host.without("nvidia-smi")
    host.variables["STUB_GPU"] = ""
    once = host.run(SCRIPT, "--once")
    assert once.returncode == 0
    assert once.stdout.startswith("No GPU to watch: nvidia-smi")
    assert len(once.stdout.splitlines()) == 1
    reading = host.json(SCRIPT, "--once", "--json")
    assert (reading["devices"], reading["answered"]) == ([], True)
    assert reading["reason"] == once.stdout.strip()
    # Nothing to watch: it does not loop for ever.
    assert host.run(SCRIPT).returncode == 1


def test_a_driver_that_hangs(host: Host) -> None:
    host.stub("timeout", "#!/usr/bin/env bash\n[[ $1 == 10 && $2 == nvidia-smi ]] && exit 124\n")
    reading = host.json(SCRIPT, "--once", "--json")
    assert (reading["devices"], reading["answered"]) == ([], False)
    assert "not answered within 10 s" in reading["reason"]


def test_it_needs_bash_and_nvidia_smi_alone(host: Host) -> None:
    """As in the image, and on any host. (`env` and `cat` are the stub's and --help's.)"""
    for tool in list(host.bin.iterdir()):
        if tool.name not in ("bash", "env", "nvidia-smi"):
            tool.unlink()
    assert the_card(host)["temperature_celsius"] == 71
    assert readings_of(host, 2)[1]["devices"][0]["name"] == "Tesla T4"


def readings_of(host: Host, count: int) -> list[dict[str, Any]]:
    command = [str(host.bin / "bash"), SCRIPT, "--json", "--interval", "0.3"]
    environment = {"PATH": str(host.bin), "STUB_LOG": "/dev/null"}
    with subprocess.Popen(command, cwd=host.folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        readings = [json.loads(process.stdout.readline()) for _ in range(count)]
        process.terminate()
    return readings


def test_it_goes_on_reading(host: Host) -> None:
    started = time.monotonic()
    readings = readings_of(host, 2)
    assert all(len(reading["devices"]) == 1 for reading in readings)
    assert time.monotonic() - started > 0.3, "it waits between two readings"


@pytest.mark.parametrize(
    "arguments", [["--interval", "soon"], ["--interval", "0"], ["--interval", "0.0"], ["--interval"], ["--forever"]]
)
def test_wrong_usage(host: Host, arguments: list[str]) -> None:
    assert host.run(SCRIPT, *arguments).returncode == 2
