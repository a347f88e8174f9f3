"""The change log through the command line: printed, put in, at work, out of order, taken out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.adversity.scene import EMPTY, NAME, ROWS, Scene

pytestmark = pytest.mark.parametrize("scene", ["local"], indirect=True)
LOGGED = 'changes = { method = "log" }\n'


def run(scene: Scene, *arguments: str, code: int = 0) -> Any:
    done, out, errors = scene.verb(*arguments, "--json")
    assert done == code, errors
    return json.loads(out)


def refused(scene: Scene, *arguments: str) -> str:
    code, _, errors = scene.verb(*arguments)
    assert code == 2, errors
    return errors


def by_log(scene: Scene) -> None:
    file = scene.folder / "owl-sap.toml"
    file.write_text(file.read_text(encoding="utf-8") + LOGGED, encoding="utf-8")


def test_from_install_to_drop(scene: Scene) -> None:
    by_log(scene)
    code, script, notes = scene.cli("changes", "install", NAME)
    assert (code, script.count("CREATE TRIGGER"), script.count("CREATE COLUMN TABLE")) == (0, 3, 1)
    assert all(word in script for word in ("1655725", "GRANT SELECT, DELETE", '"OWL_LOG_ROWS"'))
    assert "--apply" in notes
    assert scene.run("SELECT COUNT(*) FROM SYS.TRIGGERS") == [(0,)]  # it was only printed

    done = run(scene, "changes", "install", NAME, "--apply")
    assert (done["complete"], [piece["done"] for piece in done["pieces"]]) == (True, [True] * 4)
    (report,) = run(scene, "sync", NAME)
    assert (report["method"], report["upserted"]) == ("full", ROWS - EMPTY)

    scene.run('DELETE FROM "ROWS" WHERE "K" = 5')
    scene.run("""UPDATE "ROWS" SET "TXT" = 'a gasket' WHERE "K" = 6""")
    scene.run('UPDATE "ROWS" SET "K" = 1000 WHERE "K" = 8')
    assert run(scene, "plan", NAME, "--no-estimate")["method"] == "log"
    (report,) = run(scene, "sync", NAME)
    assert (report["method"], report["read"], report["upserted"], report["deleted"]) == ("log", 2, 2, 2)
    assert set(scene.content()) == scene.truth()
    assert scene.run('SELECT COUNT(*) FROM "OWL_LOG_ROWS"') == [(0,)]
    (status,) = run(scene, "status", NAME)
    assert (status["method"], status["last_full"] is not None) == ("log", True)

    gone = run(scene, "changes", "install", NAME, "--apply", "--drop")
    assert [piece["present"] for piece in gone["pieces"]] == [False] * 4
    assert run(scene, "changes", "install", NAME)["complete"] is False
    (report,) = run(scene, "sync", NAME, code=1)
    assert report["paused"] == "log_missing"


def test_what_cannot_be_logged_says_so(scene: Scene) -> None:
    assert 'method = "log"' in refused(scene, "changes", "install", NAME)
    by_log(scene)
    assert f"owl-sap changes install {NAME}" in refused(scene, "sync", NAME)
    scene.run('RENAME TABLE "ROWS" TO "BASE"')
    scene.run('CREATE VIEW "ROWS" AS SELECT * FROM "BASE"')
    file = scene.folder / "owl-sap.toml"
    file.write_text(file.read_text(encoding="utf-8") + 'key = ["K"]\n', encoding="utf-8")
    assert "is a view" in refused(scene, "changes", "install", NAME)
    assert "is a view" in refused(scene, "sync", NAME)


def test_names_of_tables_and_columns_emulator_messages_as_they_are(scene: Scene) -> None:
    file = scene.folder / "owl-sap.toml"
    collection = (
        f'[[collections]]\nname = "customers"\nsource = "{scene.schema}.CUSTOMER_NAMES"\ntemplate = "{{TXT}}"\n'
    )
    file.write_text(file.read_text(encoding="utf-8") + collection + LOGGED, encoding="utf-8")
    scene.run('CREATE COLUMN TABLE "CUSTOMER_NAMES" ("NAME1" NVARCHAR(20) PRIMARY KEY, "TXT" NVARCHAR(20))')
    scene.run("""INSERT INTO "CUSTOMER_NAMES" VALUES ('A', 'a pump')""")
    scene.run('CREATE COLUMN TABLE "OWL_LOG_CUSTOMERS" ("OTHER" INTEGER)')
    log, table = f"{scene.schema}.OWL_LOG_CUSTOMERS", f"{scene.schema}.CUSTOMER_NAMES"
    gap = f"the change log {log} of {table} has no column OWL_ID, NAME1; drop the log"
    assert f"{gap}: see `owl-sap changes install customers`" in refused(scene, "sync", "customers")
    checks = json.loads(scene.verb("doctor", "--json")[1])
    (check,) = [check for check in checks if check["check"].endswith("customers") and not check["ok"]]
    assert (check["detail"], check["fix"]) == (gap, "owl-sap changes install customers --apply")
