"""Does the service answer a client? For deploy_t4_optimized.sh: `smoke.py URL KEYFILE`, standard library only.

Searches each synced collection once; embeds a text where nothing is synced yet. Prints counts and times, never a row, a
vector or the key. Exit 1 when something did not answer as it should. A key that may not read a collection (row rights)
has been answered too.
"""

import json
import math
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TEXT = "steel bolt"
SECONDS = 30


def ask(url: str, key: str, body: object = None) -> tuple[int, object]:
    """Status and document; 0 and the reason where nothing answered."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    # No proxy of the environment between this machine and itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data, headers), timeout=SECONDS) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None
    except (OSError, ValueError) as error:
        return 0, type(error).__name__


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def embeds(url: str, key: str) -> bool:
    status, vectors = ask(f"{url}/embed", key, {"inputs": TEXT})
    good = status == 200 and isinstance(vectors, list) and len(vectors) == 1 and len(vectors[0]) > 0
    good = good and all(math.isfinite(number) for number in vectors[0])
    say(f"embed: {len(vectors[0])} finite numbers" if good else f"embed: no vector (HTTP {status})")
    return good


def searches(url: str, key: str, name: str) -> bool:
    started = time.monotonic()
    status, found = ask(f"{url}/v1/collections/{name}/search", key, {"query": TEXT, "k": 3})
    spent = (time.monotonic() - started) * 1000
    if status == 403:
        say(f"search in {name}: refused to this key by its rights (HTTP 403), as it should")
        return True
    hits = found.get("hits") if status == 200 and isinstance(found, dict) else None
    what = f"{len(hits)} hits in {spent:.0f} ms" if hits else f"no hit (HTTP {status})"
    say(f"search in {name}: {what}")
    return bool(hits)


def main(url: str, key: str) -> int:
    status, collections = ask(f"{url}/v1/collections", key)
    if status != 200 or not isinstance(collections, list):
        say(f"list of collections: HTTP {status}" if status else f"nothing answers at {url}: {collections}")
        return 1
    synced = [collection["collection"] for collection in collections if collection.get("rows")]
    if not synced:
        say("nothing is synced yet, so a text is embedded instead of a search")
    good = [searches(url, key, name) for name in synced] or [embeds(url, key)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].rstrip("/"), Path(sys.argv[2]).read_text(encoding="utf-8").strip()))
