# Lines that the rules of rules.yml must flag (ruleid: on the line before) or accept (ok:). Never run.


def sql(db, table, value, statement, place):
    # ruleid: owl-sql-formatted
    db.execute(f"SELECT * FROM {table}")
    # ruleid: owl-sql-formatted
    db.execute("SELECT * FROM t WHERE a = '%s'" % value)
    # ruleid: owl-sql-formatted
    db.execute("SELECT * FROM {}".format(table))
    # ruleid: owl-sql-formatted
    db.executemany("DELETE FROM " + table, value)
    # ok: owl-sql-formatted
    db.execute(f"SET SCHEMA {quote(place)}")
    # ok: owl-sql-formatted
    db.execute(f"SELECT {COLUMNS} FROM t WHERE a = ?", (value,))
    # ok: owl-sql-formatted
    db.execute(f"SELECT {_COLUMNS} FROM t")
    # ok: owl-sql-formatted
    db.execute("SELECT * FROM t WHERE a = ?", (value,))
    # ok: owl-sql-formatted
    db.execute(statement.create(3), doing=f'making a table in schema "{place}"')


def compared(given, key, password, token, settings, digest):
    # ruleid: owl-secret-compared
    if given == password:
        return True
    # ruleid: owl-secret-compared
    if settings.api_key != given:
        return True
    # ruleid: owl-secret-compared, owl-access-compared
    if given == key.key_hash:
        return True
    # ruleid: owl-secret-compared
    if settings.password.get_secret_value() == given:
        return True
    # ok: owl-secret-compared
    if password == "":
        return False
    # ok: owl-secret-compared
    if hmac.compare_digest(given, key.key_hash):
        return True
    # ruleid: owl-access-compared
    if given == token:
        return True
    # ruleid: owl-access-compared
    if key.digest != given:
        return True
    # ok: owl-access-compared
    if hmac.compare_digest(digest, given):
        return True
    # ok: owl-access-compared
    return len(token) == 32


def models(AutoModel, SentenceTransformer, folder, flag):
    # ruleid: owl-remote-code
    SentenceTransformer(folder, trust_remote_code=True)
    # ruleid: owl-remote-code
    SentenceTransformer(folder, trust_remote_code=flag)
    # ok: owl-remote-code
    SentenceTransformer(folder, trust_remote_code=False)
    # ruleid: owl-model-from-afar
    AutoModel.from_pretrained(folder)
    # ruleid: owl-model-from-afar
    AutoModel.from_pretrained(folder, local_files_only=True)
    # ok: owl-model-from-afar
    AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # ok: owl-model-from-afar
    AutoModel.from_pretrained(folder, trust_remote_code=False, local_files_only=True, dtype=None)


def unpickled(file, text):
    # ruleid: owl-pickle
    torch.load(file)
    # ruleid: owl-pickle
    torch.load(file, weights_only=False)
    # ok: owl-pickle
    torch.load(file, weights_only=True)
    # ruleid: owl-pickle
    pickle.loads(text)
    # ruleid: owl-pickle
    pickle.load(file)
    # ruleid: owl-pickle
    np.load(file, allow_pickle=True)
    # ok: owl-pickle
    np.load(file, allow_pickle=False)
    # ruleid: owl-yaml-load
    yaml.load(text)
    # ruleid: owl-yaml-load
    yaml.load(text, Loader=yaml.UnsafeLoader)
    # ok: owl-yaml-load
    yaml.safe_load(text)
    # ok: owl-yaml-load
    yaml.load(text, Loader=yaml.SafeLoader)


def logged(row, rows, params, hit, count, name, settings):
    # ruleid: owl-data-logged
    _log.info("read %s", row)
    # ruleid: owl-data-logged
    _log.warning("failed with %s", params)
    # ruleid: owl-data-logged
    logging.error("hit %s of %s", name, hit.text)
    # ruleid: owl-data-logged
    log.debug("login %s", settings.password)
    # ok: owl-data-logged
    _log.info("read %d rows of %s", count, name)
    # ok: owl-data-logged
    _log.info("read %d rows", len(rows))
    # ruleid: owl-data-logged-formatted
    _log.info(f"read {row}")
    # ruleid: owl-data-logged-formatted
    _log.info(f"{name}: {hit.text}")
    # ok: owl-data-logged-formatted
    _log.info(f"read {count} of {name}")


def environment():
    # ruleid: owl-environment
    os.environ["HOME"]
    # ruleid: owl-environment
    os.getenv("HOME")
    # ok: owl-environment
    os.getcwd()


def line_out(address):
    # ruleid: owl-line-out
    urllib.request.urlopen(address)
    # ruleid: owl-line-out
    requests.get(address)
    # ruleid: owl-line-out
    httpx.post(address)
    # ruleid: owl-line-out
    httpx.AsyncClient()
    # ruleid: owl-line-out
    http.client.HTTPSConnection(address)
    # ruleid: owl-line-out
    socket.create_connection((address, 443))
    # ok: owl-line-out
    urllib.parse.urlsplit(address)


def shell(command):
    # ruleid: owl-shell
    subprocess.run(command, shell=True)
    # ruleid: owl-shell
    os.system(command)
    # ruleid: owl-shell
    subprocess.getoutput(command)
    # ok: owl-shell
    subprocess.run([command, "--version"], check=True)
    # ruleid: owl-evaluated
    eval(command)
    # ruleid: owl-evaluated
    exec(command)
    # ok: owl-evaluated
    model.eval()


def certificates(context, address, token, key):
    # ruleid: owl-certificate-unchecked
    context.verify_mode = ssl.CERT_NONE
    # ruleid: owl-certificate-unchecked, owl-line-out
    httpx.get(address, verify=False)
    # ruleid: owl-certificate-unchecked
    jwt.decode(token, options={"verify_signature": False})
    # ok: owl-certificate-unchecked
    jwt.decode(token, key, algorithms=["ES256"], options={"require": ["exp"]})
    # ok: owl-certificate-unchecked
    context.verify_mode = ssl.CERT_REQUIRED


def decided(principal):
    # ruleid: owl-assert-decides
    assert principal.admin, "not allowed"
    # ok: owl-assert-decides
    assert principal is not None
    # ok: owl-assert-decides
    if not principal.admin:
        raise PermissionError
