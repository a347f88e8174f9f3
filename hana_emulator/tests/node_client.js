// node node_client.js DRIVER PORT USER PASSWORD: everyday work with one of SAP's drivers for Node; exit 0 if all went well
const [driver, port, user, password] = process.argv.slice(2);
const assert = require("node:assert/strict");
const { promisify } = require("node:util");

// node-hdb gives the bytes of an NCLOB as HANA sends them
const text = (lob) => (Buffer.isBuffer(lob) ? require("iconv-lite").decode(lob, "cesu8") : lob);

function open() {
  if (driver === "hdb") {
    const client = require("hdb").createClient({ host: "127.0.0.1", port, user, password });
    const call = (object, name) => promisify(object[name].bind(object));
    return {
      connect: call(client, "connect"),
      prepare: async (sql) => {
        const statement = await call(client, "prepare")(sql);
        return { exec: call(statement, "exec"), drop: call(statement, "drop") };
      },
      exec: (sql) => call(client, "exec")(sql),
      autocommit: (on) => client.setAutoCommit(on),
      commit: call(client, "commit"), rollback: call(client, "rollback"),
      batch: (statement, rows) => statement.exec(rows),
      close: () => client.close(),
    };
  }
  const client = require("@sap/hana-client").createConnection();
  const call = (object, name) => promisify(object[name].bind(object));
  return {
    connect: () => call(client, "connect")({ serverNode: `127.0.0.1:${port}`, uid: user, pwd: password, encrypt: "false" }),
    prepare: async (sql) => {
      const statement = await call(client, "prepare")(sql);
      return { exec: call(statement, "exec"), execBatch: call(statement, "execBatch"), drop: call(statement, "drop") };
    },
    exec: (sql) => call(client, "exec")(sql),
    autocommit: (on) => client.setAutoCommit(on),
    commit: call(client, "commit"), rollback: call(client, "rollback"),
    batch: (statement, rows) => statement.execBatch(rows),
    close: () => client.disconnect(),
  };
}

async function main() {
  const db = open();
  await db.connect();
  await db.exec("CREATE TABLE NODE (ID INTEGER PRIMARY KEY, N NVARCHAR(20), T NCLOB, B BLOB, V REAL_VECTOR(3), TS TIMESTAMP)");
  const insert = await db.prepare("INSERT INTO NODE (ID, N, T) VALUES (?, ?, ?)");
  await db.batch(insert, Array.from({ length: 2500 }, (_, n) => [n, `näme ${n} 😀`, "x".repeat(n % 50)]));
  await insert.drop();
  const rows = await db.exec("SELECT ID, N FROM NODE ORDER BY ID");
  assert.equal(rows.length, 2500);
  assert.equal(rows[2499].N, "näme 2499 😀");
  const update = await db.prepare("UPDATE NODE SET T = ?, B = ?, V = TO_REAL_VECTOR(?) WHERE ID = ?");
  const long = "lang 😀 ".repeat(50_000);
  assert.equal(await update.exec([long, Buffer.alloc(300_000, 7), "[1,2,3.5]", 1]), 1);
  const [lob] = await db.exec("SELECT T, B, TO_NVARCHAR(V) AS V, V AS RAW FROM NODE WHERE ID = 1");
  assert.ok(text(lob.T) === long);
  assert.equal(lob.B.length, 300_000);
  assert.equal(lob.V, "[1,2,3.5]");
  assert.deepEqual([...new Float32Array(new Uint8Array(lob.RAW.subarray(4)).buffer)], [1, 2, 3.5]);
  db.autocommit(false);
  await db.exec("DELETE FROM NODE WHERE ID >= 10");
  await db.rollback();
  await db.exec("DELETE FROM NODE WHERE ID >= 20");
  await db.commit();
  db.autocommit(true);
  const [{ C }] = await db.exec("SELECT COUNT(*) AS C FROM NODE");
  assert.equal(Number(C), 20);
  const select = await db.prepare("SELECT ID FROM NODE WHERE N LIKE ? AND ID BETWEEN ? AND ? ORDER BY ID");
  assert.deepEqual((await select.exec(["näme%", 3, 5])).map((row) => row.ID), [3, 4, 5]);
  await assert.rejects(db.exec("SELECT * FROM NOSUCH"), (error) => error.code === 259);
  await assert.rejects(db.exec("INSERT INTO NODE (ID) VALUES (1)"), (error) => error.code === 301);
  const embed = await db.prepare("SELECT VECTOR_EMBEDDING(?, 'QUERY', ?) AS V FROM DUMMY");
  const [{ V }] = await embed.exec(["pump", "SAP_NEB.20240715"]);
  assert.equal(V.length, 4 + 4 * 768);
  await db.exec("DROP TABLE NODE");
  db.close();
  console.log("ok");
}
main().catch((error) => { console.error(error); process.exit(1); });
