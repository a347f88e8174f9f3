"""API keys: what the file holds, who is let in by it, and what becomes of it when it changes or gets damaged."""

from __future__ import annotations

import hmac
import json
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.src.access.keys import Grant, KeyRing, create, read, revoke, rotate
from app.src.access.principal import AccessUnusable, Unauthenticated

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.src.access.files.LOOK_SECONDS", 0.0)


def ring(path: Path) -> KeyRing:
    made = KeyRing(path)
    made.open()
    return made


def refusal(made: KeyRing, key: str, now: datetime | None = None) -> str:
    with pytest.raises(Unauthenticated) as refused:
        made.principal(key, now)
    assert key not in str(refused.value) or not key
    return refused.value.code


def test_a_key_may_what_it_was_made_for(path: Path) -> None:
    record, key = create(path, Grant("web", ("search",), {"mandt": ["100", "200"]}, rate="5/second", concurrency=2))
    principal = ring(path).principal(key)
    assert (principal.name, principal.scopes, principal.every_row) == (record.id, frozenset(("search",)), False)
    assert (principal.claims, principal.rate, principal.concurrency) == ({"mandt": ["100", "200"]}, "5/second", 2)


def test_a_key_is_long_and_never_the_same(path: Path) -> None:
    keys = {create(path, Grant(f"k{number}", ("embed",)))[1] for number in range(20)}
    assert len(keys) == 20
    assert all(len(key.split("_", 2)[2]) >= 43 for key in keys)  # 43 letters of base64: 256 bits


def test_the_file_holds_no_key_and_is_its_owners_alone(path: Path) -> None:
    _, key = create(path, Grant("web", ("search",)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_text()
    assert key not in content
    assert key.split("_", 2)[2] not in content
    assert [each.name for each in path.parent.iterdir()] == ["keys.json"]


def test_nothing_shows_digests_or_claims(path: Path) -> None:
    record, key = create(path, Grant("web", ("search",), {"mandt": "secret-client"}))
    for shown in (
        repr(record),
        str(record),
        repr(ring(path).principal(key)),
        json.dumps(record.shown(NOW), default=str),
    ):
        assert record.sha256 not in shown
    assert "secret-client" not in repr(record) + repr(ring(path).principal(key))


def test_wrong_keys(path: Path) -> None:
    record, key = create(path, Grant("web", ("search",)))
    _, other = create(path, Grant("other", ("search",)))
    made = ring(path)
    secret = key.split("_", 2)[2]
    wrong = [
        *("", "owl_", "owl__", f"owl_{record.id}", f"owl_{record.id}_", f"{record.id}_{secret}", key[:-1], key + "x"),
        *(key.upper(), f" {key}", f"{key}\n", f"owl_{record.id}_{other.split('_', 2)[2]}", f"owl_ffff_{secret}"),
        *(record.sha256, f"owl_{record.id}_{record.sha256}", "owl_" + "é" * 50, "owl_" + "x" * 100_000),
    ]
    assert {refusal(made, each) for each in wrong} == {"unknown_key"}


@given(st.text(max_size=200))
def test_no_text_is_a_key(text: str) -> None:
    made = KeyRing(Path("unread"))
    made.refresh = lambda: None  # type: ignore[method-assign]
    with pytest.raises(Unauthenticated):
        made.principal(text)


def test_digests_are_compared_in_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hmac.compare_digest and by nothing else, also for an id that is not there."""
    record, key = create(path, Grant("web", ("search",)))
    made = ring(path)
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert refusal(made, key) == "unknown_key"
    assert refusal(made, "owl_ffff_x") == "unknown_key"
    assert [other for _, other in compared] == [record.sha256, "0" * 64]


def test_expired_and_revoked(path: Path) -> None:
    record, key = create(path, Grant("web", ("search",), lifetime=60.0), NOW)
    made = ring(path)
    assert made.principal(key, NOW + timedelta(seconds=59)).name == record.id
    assert refusal(made, key, NOW + timedelta(seconds=60)) == "expired_key"
    _, gone = create(path, Grant("gone", ("search",)))
    assert made.principal(gone).scopes == {"search"}
    revoke(path, "gone")
    assert refusal(made, gone) == "revoked_key"


def test_rotation_overlaps_and_keeps_everything_else(path: Path) -> None:
    grant = Grant("web", ("search", "embed"), {"mandt": "100"}, True, 3600.0, "5/second", 3)
    old, old_key = create(path, grant, NOW)
    new, new_key = rotate(path, "web", 60.0, now=NOW + timedelta(seconds=10))
    made = ring(path)
    same = ("name", "scopes", "claims", "every_row", "rate", "concurrency")
    assert [getattr(old, name) for name in same] == [getattr(new, name) for name in same]
    assert new.expires == NOW + timedelta(seconds=3610)
    for after, old_is_good in ((69, True), (70, False)):
        now = NOW + timedelta(seconds=after)
        assert made.principal(new_key, now).name == new.id
        if old_is_good:
            assert made.principal(old_key, now).name == old.id
        else:
            assert refusal(made, old_key, now) == "expired_key"


def test_rotation_never_makes_a_key_live_longer(path: Path) -> None:
    create(path, Grant("web", ("search",), lifetime=60.0), NOW)
    rotate(path, "web", 86_400.0, now=NOW)
    assert read(path)[0].expires == NOW + timedelta(seconds=60)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 101, "-x", "é"])
def test_names_that_are_none(path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a valid key name"):
        create(path, Grant(name, ("search",)))
    assert not path.exists()


def test_what_cannot_be_done(path: Path) -> None:
    create(path, Grant("web", ("search",)))
    for call, why in (
        (lambda: create(path, Grant("web", ("search",))), "already|rotate"),
        (lambda: create(path, Grant("other", ())), "scope"),
        (lambda: create(path, Grant("other", ("search",), rate="often")), "rate"),
        (lambda: revoke(path, "nobody"), "does not exist"),
        (lambda: rotate(path, "nobody", 1.0), "does not exist"),
    ):
        with pytest.raises(ValueError, match=why):
            call()
    revoke(path, "web")
    with pytest.raises(ValueError, match="revoked"):
        revoke(path, "web")
    assert len(read(path)) == 1


def test_after_a_rotation_a_name_is_two_keys(path: Path) -> None:
    create(path, Grant("web", ("search",)))
    rotate(path, "web", 60.0)
    with pytest.raises(ValueError, match="several"):
        rotate(path, "web", 60.0)
    assert len(revoke(path, "web")) == 2


# ------------------------------------------------------------------------------------------------------------ the file

GOOD = {"id": "abcd", "name": "n", "sha256": "0" * 64, "scopes": ["search"], "created": "2026-01-01T00:00:00Z"}
DAMAGED: list[Any] = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"version": 2}',
    b'{"keys": [], "more": 1}',
    {"keys": [GOOD | {"scopes": ["everything"]}]},
    {"keys": [GOOD | {"sha256": "0" * 63}]},
    {"keys": [GOOD | {"sha256": ("0" * 63) + "G"}]},
    {"keys": [GOOD | {"created": "2026-01-01T00:00:00"}]},
    {"keys": [GOOD | {"expires": "soon"}]},
    {"keys": [GOOD | {"concurrency": -1}]},
    {"keys": [GOOD | {"rate": "often"}]},
    {"keys": [GOOD | {"key": "owl_abcd_xyz"}]},
    {"keys": [GOOD, GOOD]},
    b" " * (5 << 20),
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_ends_the_start_and_leaves_a_running_service_as_it_is(path: Path, content: Any) -> None:
    _, key = create(path, Grant("web", ("search",)))
    made = ring(path)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert made.principal(key).scopes == {"search"}
    assert made.fault is not None
    assert "keys.json" in made.fault
    assert made.principal(key).scopes == {"search"}
    assert made.fault is not None  # still, although the file has not changed since
    with pytest.raises(AccessUnusable, match=r"keys\.json"):
        ring(path)
    path.unlink()
    _, other = create(path, Grant("mended", ("embed",)))
    assert made.principal(other).scopes == {"embed"}
    assert made.fault is None
    assert refusal(made, key) == "unknown_key"


def test_messages_about_a_damaged_file_repeat_nothing_of_it(path: Path) -> None:
    path.write_text(json.dumps({"keys": [GOOD | {"sha256": "canary", "name": "canary"}]}))
    with pytest.raises(AccessUnusable) as error:
        read(path)
    assert "canary" not in str(error.value)
    assert "keys.0.sha256" in str(error.value)


def test_a_file_that_is_gone_or_out_of_reach(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AccessUnusable, match="keys create"):
        ring(path)
    _, key = create(path, Grant("web", ("search",)))
    made = ring(path)
    moved = path.rename(path.with_suffix(".away"))
    for _ in range(3):
        assert made.principal(key).scopes == {"search"}
    assert made.fault is not None
    assert [record.message for record in caplog.records] == [f"{made.fault}; the last good content stays in force"]
    moved.rename(path)
    assert made.principal(key).scopes == {"search"}
    assert made.fault is None


def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service has too many files open just when a key is revoked: afterwards that key is refused all the same."""
    _, key = create(path, Grant("web", ("search",)))
    made = ring(path)
    revoke(path, "web")

    def too_many(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", too_many)
        assert made.principal(key).scopes == {"search"}
        assert made.fault is not None
    assert refusal(made, key) == "revoked_key"
    assert made.fault is None


def test_a_file_that_everybody_may_write(path: Path) -> None:
    create(path, Grant("web", ("search",)))
    path.chmod(0o606)
    with pytest.raises(AccessUnusable, match="chmod 600"):
        ring(path)


def test_looks_are_rare(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = create(path, Grant("web", ("search",)))
    made = ring(path)
    monkeypatch.setattr("app.src.access.files.LOOK_SECONDS", 60.0)
    looks = 0
    stat_of = Path.stat

    def counted(self: Path, **options: Any) -> os.stat_result:
        nonlocal looks
        looks += 1
        return stat_of(self, **options)

    monkeypatch.setattr(Path, "stat", counted)
    for _ in range(100):
        made.principal(key)
    assert looks == 0


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AccessUnusable, match=r"folder for the API keys is unusable .*mkdir -m 700 \S+/none$"):
        create(tmp_path / "none" / "keys.json", Grant("web", ("search",)))


def test_of_a_link_what_it_leads_to_is_replaced(path: Path) -> None:
    link = path.with_name("link.json")
    create(path, Grant("web", ("search",)))
    link.symlink_to(path)
    create(link, Grant("other", ("search",)))
    assert link.is_symlink()
    assert [key.name for key in read(path)] == ["web", "other"]


def test_changes_at_once_lose_none(path: Path) -> None:
    """Two processes, five keys each."""
    program = (
        "import sys; from pathlib import Path; from app.src.access.keys import Grant, create\n"
        "for number in range(5): create(Path(sys.argv[1]), Grant(f'k{sys.argv[2]}{number}', ('embed',)))"
    )
    root = str(Path(__file__).parents[2])
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(path), str(number)], env={"PYTHONPATH": root})
        for number in range(2)
    ]
    assert [process.wait(60) for process in running] == [0] * 2
    assert len(read(path)) == 10


def test_a_write_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(path, Grant("web", ("search",)))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AccessUnusable, match="No space left"):
        create(path, Grant("other", ("search",)))
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["keys.json"]


def test_a_key_may_be_without_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create(path, Grant("loader", ("embed",), rate="unlimited", concurrency=0))
    (key,) = read(path)
    assert (key.principal.rate, key.principal.concurrency) == ("unlimited", 0)
