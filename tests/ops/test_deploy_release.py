"""deploy_t4_optimized.sh on hosts made of stubs: the way back, the lock, the status, the card's settings."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ops.conftest import Host

SCRIPT = "deploy_t4_optimized.sh"


def running(host: Host, image: str, previous: str | None = None) -> None:
    """As after earlier deployments of these images."""
    tags = host.folder.parent / "docker/tags"
    tags.mkdir(parents=True, exist_ok=True)
    (tags / "owl-sap-connector:t4").write_text(f"{image}\n")
    (tags.parent / "container").write_text(f"{image}\n")
    if previous is not None:
        (tags / "owl-sap-connector:t4-previous").write_text(f"{previous}\n")


def tags(host: Host) -> dict[str, str]:
    folder = host.folder.parent / "docker/tags"
    return {path.name.removeprefix("owl-sap-connector:"): path.read_text().strip() for path in folder.iterdir()}


def serves(host: Host) -> str:
    return (host.folder.parent / "docker/container").read_text().strip()


# ----------------------------------------------------------------------------------------------------------- rollback


def test_rollback_swaps_the_images_and_back(host: Host) -> None:
    running(host, "sha256:one", previous="sha256:zero")
    result = host.run(SCRIPT, "--rollback")
    assert result.returncode == 0, result.stderr
    assert tags(host) == {"t4": "sha256:zero", "t4-previous": "sha256:one"}
    assert serves(host) == "sha256:zero"
    assert "The image before serves: 0.1.0, commit abc1234" in result.stdout
    assert " build" not in host.log
    assert host.run(SCRIPT, "--rollback").returncode == 0
    assert serves(host) == "sha256:one"


@pytest.mark.slow
def test_rollback_leaves_monitoring_alone(host: Host) -> None:
    """Deployed without it, so its secrets are not there; and its pinned images are not known to a rollback."""
    host.variables["STUB_BUILT"] = "sha256:zero"
    assert host.run(SCRIPT, "--no-monitoring").returncode == 0
    host.variables["STUB_BUILT"] = "sha256:one"
    assert host.run(SCRIPT, "--no-monitoring").returncode == 0
    result = host.run(SCRIPT, "--rollback")
    assert result.returncode == 0, result.stdout + result.stderr
    assert serves(host) == "sha256:zero"
    assert not (host.folder / "secrets/grafana_password").exists()


@pytest.mark.slow
def test_a_build_leaves_no_note_of_its_time_in_the_image(host: Host) -> None:
    """Or every build would be another image, where Docker keeps images in containerd's store."""
    shebang, rest = (host.bin / "docker").read_text().split("\n", 1)
    tell = '[[ "$*" != *build ]] || echo "attestations off: ${BUILDX_NO_DEFAULT_ATTESTATIONS:-}" >>"$STUB_LOG"'
    host.stub("docker", f"{shebang}\n{tell}\n{rest}")
    assert host.run(SCRIPT).returncode == 0
    assert "attestations off: 1\n" in host.log


@pytest.mark.parametrize(("previous", "wrong"), [(None, "there is no image"), ("sha256:one", "nothing to go back to")])
def test_rollback_without_another_image_is_refused(host: Host, previous: str | None, wrong: str) -> None:
    running(host, "sha256:one", previous)
    result = host.run(SCRIPT, "--rollback")
    assert result.returncode == 1
    assert wrong in result.stderr
    assert serves(host) == "sha256:one"
    assert " up " not in host.log


def test_rollback_in_a_dry_run_only_says_it(host: Host) -> None:
    running(host, "sha256:one", previous="sha256:zero")
    result = host.run(SCRIPT, "--rollback", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "+ docker tag sha256:zero owl-sap-connector:t4" in result.stdout
    assert tags(host) == {"t4": "sha256:one", "t4-previous": "sha256:zero"}


def test_rollback_to_an_image_that_does_not_become_ready(host: Host) -> None:
    running(host, "sha256:one", previous="sha256:zero")
    host.variables["STUB_BAD"] = "sha256:zero"
    result = host.run(SCRIPT, "--rollback")
    assert result.returncode == 1
    assert "Forward again" in result.stderr
    assert "result=rolled back, not ready" in (host.folder / ".owl-deploy/last").read_text()


def test_an_unhealthy_new_image_gives_way_to_the_one_that_served(host: Host) -> None:
    running(host, "sha256:zero", previous="sha256:older")
    host.variables["STUB_BAD"] = "sha256:one"
    result = host.run(SCRIPT)
    assert result.returncode == 1
    assert tags(host) == {"t4": "sha256:zero", "t4-previous": "sha256:older", "t4-failed": "sha256:one"}
    assert serves(host) == "sha256:zero"
    assert "the one before it serves again" in result.stderr.splitlines()[-1]
    assert "the last line of the service" in result.stderr
    assert "is in .owl-deploy/failed.log" in result.stderr.splitlines()[-1]
    kept = host.folder / ".owl-deploy/failed.log"
    assert "the last line of the service" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0
    assert "result=went back" in (host.folder / ".owl-deploy/last").read_text()


@pytest.mark.slow
def test_without_an_older_way_back_the_tag_is_taken_away_again(host: Host) -> None:
    running(host, "sha256:zero")
    host.variables["STUB_BAD"] = "sha256:one"
    assert host.run(SCRIPT).returncode == 1
    assert tags(host) == {"t4": "sha256:zero", "t4-failed": "sha256:one"}


@pytest.mark.slow
def test_when_the_image_before_is_not_ready_either_it_is_not_the_image(host: Host) -> None:
    """HANA went away: healthy before, and neither image becomes ready."""
    running(host, "sha256:zero")
    seen = host.folder.parent / "docker/seen"
    once = f'if [[ "$*" == inspect*State.Status* && -e {seen} ]]; then echo "running unhealthy"; exit; fi\n'
    once += f'[[ "$*" != inspect*State.Status* ]] || touch {seen}\n'
    shebang, rest = (host.bin / "docker").read_text().split("\n", 1)
    host.stub("docker", f"{shebang}\n{once}{rest}")
    result = host.run(SCRIPT)
    assert result.returncode == 1
    assert "look at HANA, .env and owl-sap.toml rather than at the image" in result.stderr.splitlines()[-1]


def test_what_was_not_healthy_before_is_not_gone_back_to(host: Host) -> None:
    running(host, "sha256:zero")
    host.variables["STUB_HEALTH"] = "running unhealthy"
    result = host.run(SCRIPT)
    assert result.returncode == 1
    assert serves(host) == "sha256:one"
    assert "Going back" not in result.stderr
    assert tags(host)["t4-previous"] == "sha256:zero"
    assert result.stderr.rstrip().endswith("; or go back: ./deploy_t4_optimized.sh --rollback")


# --------------------------------------------------------------------------------------------------- a second service


def replica(host: Host) -> str:
    return (host.folder.parent / "docker/replica").read_text().strip()


def ups(host: Host) -> list[str]:
    return [line.partition(" up -d --no-build")[2].strip() for line in host.log.splitlines() if " up -d " in line]


@pytest.fixture
def both(host: Host) -> Host:
    """Two services of sha256:zero, and sha256:one about to be built."""
    running(host, "sha256:zero")
    (host.folder.parent / "docker/replica").write_text("sha256:zero\n")
    return host


def test_a_second_service_starts_with_the_first_and_shares_the_card(host: Host) -> None:
    result = host.run(SCRIPT, "--replicas")
    assert result.returncode == 0, result.stderr
    assert "both services at one address: http://127.0.0.1:5" in result.stdout
    assert "--profile monitoring --profile replicas up -d --no-build\n" in host.log
    assert ups(host) == [""], "none served that another could stand in for"
    assert serves(host) == replica(host) == "sha256:one"
    assert (host.folder.parent / "docker/shares").read_text() == "0.25 0.3\n"


def test_without_a_second_service_the_shares_are_those_of_compose(host: Host) -> None:
    assert host.run(SCRIPT).returncode == 0
    assert (host.folder.parent / "docker/shares").read_text() == " \n"
    assert not (host.folder.parent / "docker/replica").exists()


def test_one_is_replaced_after_the_other_without_a_flag(both: Host) -> None:
    result = both.run(SCRIPT)
    assert result.returncode == 0, result.stderr
    assert ups(both) == ["--no-deps replica", ""]
    assert "waiting for replica (" in result.stdout
    assert serves(both) == replica(both) == "sha256:one"
    assert both.run(SCRIPT, "--rollback").returncode == 0
    assert ups(both)[2:4] == ["--no-deps replica", "api worker"]
    assert serves(both) == replica(both) == "sha256:zero"


def test_a_new_image_that_is_not_ready_in_the_second_service_does_not_reach_the_first(both: Host) -> None:
    both.variables["STUB_BAD"] = "sha256:one"
    result = both.run(SCRIPT)
    assert result.returncode == 1
    assert "did not become ready (c-replica: running unhealthy)" in result.stderr
    assert ups(both) == ["--no-deps replica", "api worker", "--no-deps replica"]
    assert not (both.folder.parent / "docker/recreated").exists(), "the first service was never replaced"
    assert serves(both) == replica(both) == tags(both)["t4"] == "sha256:zero"


@pytest.mark.slow
def test_a_second_service_that_came_with_an_unhealthy_image_goes_back_too(host: Host) -> None:
    running(host, "sha256:zero")
    host.variables["STUB_BAD"] = "sha256:one"
    result = host.run(SCRIPT, "--replicas")
    assert result.returncode == 1
    assert "the one before it serves again" in result.stderr
    assert serves(host) == replica(host) == "sha256:zero"


def test_the_first_service_comes_first_where_it_is_not_healthy(both: Host) -> None:
    both.variables["STUB_BAD"] = "sha256:zero"
    result = both.run(SCRIPT)
    assert result.returncode == 0, result.stderr
    assert ups(both) == ["api worker", ""]


def test_a_sick_second_service_holds_up_neither_a_deployment_nor_the_way_back(both: Host) -> None:
    both.variables["STUB_REPLICA"] = "running unhealthy"
    for flags, code, image in (((), 1, "sha256:one"), (("--rollback",), 0, "sha256:zero")):
        result = both.run(SCRIPT, *flags)
        assert (result.returncode, serves(both)) == (code, image), result.stderr
        assert "not the second one or its proxy (c-replica: running unhealthy)" in result.stderr
        assert "Going back" not in result.stderr


def test_the_way_back_from_a_first_deployment_of_both_does_not_wait_for_the_second(host: Host) -> None:
    running(host, "sha256:zero")
    host.variables.update(STUB_BAD="sha256:one", STUB_REPLICA="running unhealthy")
    result = host.run(SCRIPT, "--replicas")
    assert ups(host) == ["", "api worker", "--no-deps replica"]
    assert serves(host) == replica(host) == "sha256:zero"
    assert "the one before it serves again" in result.stderr.splitlines()[-1]


def test_a_stopped_second_service_still_belongs_to_a_deployment(both: Host) -> None:
    both.variables["STUB_REPLICA"] = "exited "
    assert both.run(SCRIPT).returncode == 1
    assert ups(both) == ["--no-deps replica", ""]
    assert (both.folder.parent / "docker/shares").read_text() == "0.25 0.3\n"
    assert "replica: exited" in both.run(SCRIPT, "--status").stdout


def test_status_shows_both_services(both: Host) -> None:
    result = both.run(SCRIPT, "--status")
    assert result.returncode == 0, result.stderr
    assert "replica: running healthy\nproxy: running healthy\n" in result.stdout
    both.variables["STUB_REPLICA"] = "running unhealthy"
    result = both.run(SCRIPT, "--status")
    assert result.returncode == 1
    assert "replica: running unhealthy" in result.stdout
    assert ups(both) == []


def test_a_dry_run_says_what_would_be_done_with_both(both: Host) -> None:
    for flags in (("--dry-run",), ("--dry-run", "--rollback")):
        (both.folder.parent / "docker/tags/owl-sap-connector:t4-previous").write_text("sha256:older\n")
        result = both.run(SCRIPT, *flags)
        assert result.returncode == 0, result.stderr
        assert "up -d --no-build --no-deps replica" in result.stdout
    assert ups(both) == []


def test_an_interrupted_start_is_taken_up_and_keeps_the_way_back(host: Host) -> None:
    running(host, "sha256:zero")
    host.variables["STUB_UP_HANGS"] = "yes"
    interrupted(host, signal.SIGKILL, "starting")
    assert tags(host) == {"t4": "sha256:one", "t4-previous": "sha256:zero"}
    del host.variables["STUB_UP_HANGS"]
    assert host.run(SCRIPT).returncode == 0
    assert tags(host) == {"t4": "sha256:one", "t4-previous": "sha256:zero"}
    assert serves(host) == "sha256:one"


# ------------------------------------------------------------------------------------------- lock, interruption, status


def test_two_deployments_at_once_are_refused(host: Host) -> None:
    (host.folder / ".owl-deploy").mkdir()
    with (host.folder / ".owl-deploy/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = host.run(SCRIPT)
        assert result.returncode == 1
        assert "another deployment runs in this folder" in result.stderr
        running(host, "sha256:one")
        assert "a deployment is going on" in host.run(SCRIPT, "--status").stdout
        assert host.run(SCRIPT, "--dry-run").returncode == 0
    assert "a deployment is going on" not in host.run(SCRIPT, "--status").stdout
    assert host.run(SCRIPT).returncode == 0


def interrupted(host: Host, number: signal.Signals, when: str) -> subprocess.CompletedProcess[str]:
    """Ctrl-C as a terminal sends it: to all that runs, once the stub says that it has come to `when`."""
    process = subprocess.Popen(
        [str(host.bin / "bash"), SCRIPT],
        cwd=host.folder,
        env=host.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    reached = host.folder.parent / "docker" / when
    end = time.monotonic() + 60
    while not reached.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, number)
    out, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, out, errors)


@pytest.mark.parametrize(
    ("number", "steer", "when", "says"),
    [
        pytest.param(
            signal.SIGINT,
            {"STUB_BUILD": "hangs"},
            "building",
            "while building the image. What ran before still runs",
            marks=pytest.mark.slow,
        ),
        (signal.SIGTERM, {"STUB_UP_HANGS": "yes"}, "starting", "while starting the containers. Some may run already"),
    ],
)
def test_an_interruption_says_what_is_left(
    host: Host, number: signal.Signals, steer: dict[str, str], when: str, says: str
) -> None:
    running(host, "sha256:zero")
    host.variables.update(steer)
    result = interrupted(host, number, when)
    assert result.returncode == 128 + number
    assert [line for line in result.stderr.splitlines() if line.startswith("deploy: ")] == [
        line for line in result.stderr.splitlines() if says in line
    ]
    for name in steer:
        del host.variables[name]
    again = host.run(SCRIPT)  # the lock is free
    assert again.returncode == 0, again.stderr
    assert tags(host) == {"t4": "sha256:one", "t4-previous": "sha256:zero"}


def test_status_shows_health_version_and_gpu(host: Host) -> None:
    assert host.run(SCRIPT).returncode == 0
    log = host.log
    result = host.run(SCRIPT, "--status")
    assert result.returncode == 0, result.stderr
    assert "owl-sap-connector-t4: running healthy, http://127.0.0.1:1" in result.stdout
    assert "image: 0.1.0, commit abc1234; to go back to: nothing" in result.stdout
    assert "last deployment: when=" in result.stdout
    assert "result=serves" in result.stdout
    assert "Tesla T4" in result.stdout
    for act in (" up ", " build", " tag"):
        assert act not in host.log[len(log) :]
    host.variables["STUB_HEALTH"] = "running unhealthy"
    assert host.run(SCRIPT, "--status").returncode == 1


def test_status_of_nothing(host: Host) -> None:
    gone = host.run(SCRIPT, "--status")
    assert gone.returncode == 1
    assert "there is no container owl-sap-connector-t4" in gone.stderr
    assert not (host.folder / ".owl-deploy").exists()


def test_the_log_tells_what_was_done(host: Host) -> None:
    host.run(SCRIPT)
    kept = (host.folder / ".owl-deploy/deploy.log").read_text()
    assert "up -d --no-build" in kept
    assert (host.folder / ".owl-deploy/deploy.log").stat().st_mode & 0o077 == 0
    assert all(line[:4].isdigit() and line[19] == "Z" for line in kept.splitlines())


# -------------------------------------------------------------------------------------------------- the card's settings

POWERFUL = {"power.min_limit": "60.00", "power.default_limit": "70.00", "power.max_limit": "75.00"}


def card(host: Host, field: str) -> str:
    lines = (host.folder.parent / "cards/0").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)[field]


def test_without_the_flag_the_card_is_only_looked_at(host: Host) -> None:
    host.card({"persistence_mode": "Disabled"})
    result = host.run(SCRIPT)
    assert "GPU settings: persistence Disabled, power limit 70.00 W (default 70.00 W)" in result.stdout
    assert card(host, "persistence_mode") == "Disabled"
    assert not [line for line in host.log.splitlines() if line.startswith("nvidia-smi") and " -p" in line]


def test_settings_are_changed_verified_and_can_be_undone(host: Host) -> None:
    host.card({"persistence_mode": "Disabled"})
    host.variables.update(OWL_GPU_POWER_LIMIT="65", OWL_GPU_CLOCKS="900,1000")
    result = host.run(SCRIPT, "--apply-gpu-settings")
    assert result.returncode == 0, result.stderr
    assert (card(host, "persistence_mode"), card(host, "power.limit")) == ("Enabled", "65")
    assert "persistence: Disabled -> Enabled" in result.stdout
    assert "power limit (W): 70.00 -> 65" in result.stdout
    assert "the card says" not in result.stdout
    undo = host.folder / ".owl-deploy/gpu-undo.sh"
    commands = [line for line in undo.read_text().splitlines() if not line.startswith("#")]
    assert commands == ["sudo nvidia-smi -i 0 -rgc", "sudo nvidia-smi -i 0 -pl 70.00", "sudo nvidia-smi -i 0 -pm 0"]
    for command in commands:
        assert f"undo: {command}" in result.stdout
    host.variables.update(OWL_GPU_POWER_LIMIT="60")
    del host.variables["OWL_GPU_CLOCKS"]
    assert host.run(SCRIPT, "--apply-gpu-settings").returncode == 0
    again = [line for line in undo.read_text().splitlines() if not line.startswith("#")]
    assert again == ["sudo nvidia-smi -i 0 -pl 65", *commands]  # from the top: 70 W remain
    assert "power limit: 60 W already" in host.run(SCRIPT, "--apply-gpu-settings").stdout


def test_refused_settings_never_fail_the_deployment(host: Host) -> None:
    host.card({"persistence_mode": "Disabled"})
    host.variables.update(STUB_SMI_REFUSES="yes", OWL_GPU_POWER_LIMIT="65", OWL_GPU_CLOCKS="900,1000")
    result = host.run(SCRIPT, "--apply-gpu-settings")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("was refused and stays as it was (Insufficient Permissions)") == 3
    assert not (host.folder / ".owl-deploy/gpu-undo.sh").exists()


@pytest.mark.parametrize(
    "watts",
    [
        "71",
        pytest.param("75", marks=pytest.mark.slow),
        pytest.param("59.9", marks=pytest.mark.slow),
        pytest.param("many", marks=pytest.mark.slow),
        pytest.param("-65", marks=pytest.mark.slow),
    ],
)
def test_power_is_never_raised_above_the_default(host: Host, watts: str) -> None:
    host.card(POWERFUL)
    host.variables["OWL_GPU_POWER_LIMIT"] = watts
    result = host.run(SCRIPT, "--dry-run", "--apply-gpu-settings")
    assert result.returncode == 0
    assert "the power limit stays as it is" in result.stdout
    assert " -pl " not in result.stdout


@pytest.mark.parametrize(
    "clocks",
    [
        pytest.param("1000,900", marks=pytest.mark.slow),
        pytest.param("900", marks=pytest.mark.slow),
        "900,1600",
        pytest.param("900,1000;reboot", marks=pytest.mark.slow),
    ],
)
def test_clocks_beyond_the_card_are_refused(host: Host, clocks: str) -> None:
    host.variables["OWL_GPU_CLOCKS"] = clocks
    result = host.run(SCRIPT, "--dry-run", "--apply-gpu-settings")
    assert "the clocks stay as they are" in result.stdout
    assert "-lgc" not in result.stdout


@pytest.mark.slow
def test_a_card_that_tells_nothing_is_left_alone(host: Host) -> None:
    host.card({"power.limit": "[N/A]", "persistence_mode": "[N/A]"}, without=["power.min_limit"])
    host.variables["OWL_GPU_POWER_LIMIT"] = "65"
    result = host.run(SCRIPT, "--apply-gpu-settings")
    assert result.returncode == 0, result.stderr
    assert "does not tell the persistence mode" in result.stdout
    assert "does not tell the power limits" in result.stdout


def systemctl(host: Host, *, active: bool, sets: bool) -> None:
    """nvidia-persistenced is known, `active` or not; started, it `sets` the mode."""
    card = host.folder.parent / "cards/0"
    started = f'sed -i "s/^persistence_mode=.*/persistence_mode=Enabled/" {card}' if sets else ":"
    host.stub(
        "systemctl",
        f"""#!/usr/bin/env bash
printf "systemctl %s\\n" "$*" >>"$STUB_LOG"
case $1 in
  is-active) {"true" if active else "false"} ;;
  enable) {started} ;;
esac
""",
    )


@pytest.mark.parametrize("sets", [pytest.param(True, marks=pytest.mark.slow), False])
def test_the_persistence_daemon_is_preferred(host: Host, sets: bool) -> None:
    """One that starts without the mode, as Ubuntu's does, is asked for it."""
    host.card({"persistence_mode": "Disabled"})
    systemctl(host, active=False, sets=sets)
    result = host.run(SCRIPT, "--apply-gpu-settings")
    assert "systemctl enable --now nvidia-persistenced" in host.log
    assert "undo: sudo systemctl disable --now nvidia-persistenced" in result.stdout
    assert ("-pm 1" in host.log) != sets
    assert ("undo: sudo nvidia-smi -i 0 -pm 0" in result.stdout) != sets
    assert card(host, "persistence_mode") == "Enabled"


@pytest.mark.slow
def test_a_daemon_that_ran_before_is_not_stopped_by_the_undo(host: Host) -> None:
    host.card({"persistence_mode": "Disabled"})
    systemctl(host, active=True, sets=True)
    result = host.run(SCRIPT, "--apply-gpu-settings")
    assert result.returncode == 0, result.stderr
    assert "systemctl enable" not in host.log
    assert "systemctl disable" not in result.stdout
    assert card(host, "persistence_mode") == "Enabled"


@pytest.mark.slow
def test_a_change_that_the_card_does_not_show_is_said(host: Host) -> None:
    host.card({"persistence_mode": "Disabled"})
    host.variables["STUB_PERSISTENCE"] = "deaf"
    result = host.run(SCRIPT, "--apply-gpu-settings")
    assert "persistence: the card says Disabled after the change, not Enabled" in result.stdout


def test_the_undo_runs(host: Host, tmp_path: Path) -> None:
    host.card({"persistence_mode": "Disabled"})
    host.variables["OWL_GPU_POWER_LIMIT"] = "65"
    host.run(SCRIPT, "--apply-gpu-settings")
    host.stub("sudo", '#!/usr/bin/env bash\nexec "$@"\n')
    assert host.run(".owl-deploy/gpu-undo.sh").returncode == 0
    assert (card(host, "persistence_mode"), card(host, "power.limit")) == ("Disabled", "70.00")
