"""Check that the service answers a client: `smoke.py URL KEYFILE [CERTIFICATE]`, with the standard library only.

Searches each synced collection once; embeds a text if no collection is synced yet. Prints counts and times, never a
row, a vector or the key. Exits with 1 if an answer is wrong. A key whose row rights hide all rows passes. CERTIFICATE
is the service's own and trusted under any host name.
"""

import json
import math
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TEXT = "steel bolt"
SECONDS = 30
UNSEEN = "no row is visible"  # start of the note of a search whose row rights hide all rows (app/src/access/rows.py)


class Client:
    """A client of one service, with one key."""

    def __init__(self, url: str, key: str, certificate: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        # Bypass proxies set in the environment: the service is on this machine.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if certificate is not None:
            context = ssl.create_default_context(cafile=certificate)
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        """Return status and document; 0 and the reason when the request fails."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, self._headers)
            with self._opener.open(request, timeout=SECONDS) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, None
        except (OSError, ValueError) as error:
            return 0, type(error).__name__


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def embeds(client: Client) -> bool:
    status, vectors = client.ask("/embed", {"inputs": TEXT})
    good = status == 200 and isinstance(vectors, list) and len(vectors) == 1 and len(vectors[0]) > 0
    good = good and all(math.isfinite(number) for number in vectors[0])
    say(f"embed: {len(vectors[0])} finite numbers" if good else f"embed: no vector (HTTP {status})")
    return good


def searches(client: Client, name: str) -> bool:
    started = time.monotonic()
    status, found = client.ask(f"/v1/collections/{name}/search", {"query": TEXT, "k": 3})
    spent = (time.monotonic() - started) * 1000
    if status == 403:
        say(f"search in {name}: refused to this key by its rights (HTTP 403), as configured")
        return True
    answer = found if status == 200 and isinstance(found, dict) else {}
    hits = answer.get("hits")
    if hits == [] and any(str(note).startswith(UNSEEN) for note in answer.get("notes", [])):
        say(f"search in {name}: no row visible to this key, as its row rights require")
        return True
    what = f"{len(hits)} hits in {spent:.0f} ms" if hits else f"no hit (HTTP {status})"
    say(f"search in {name}: {what}")
    return bool(hits)


def main(url: str, key: str, certificate: str | None = None) -> int:
    client = Client(url, key, certificate)
    status, collections = client.ask("/v1/collections")
    if status != 200 or not isinstance(collections, list):
        say(f"list of collections: HTTP {status}" if status else f"nothing answers at {url}: {collections}")
        return 1
    synced = [collection["collection"] for collection in collections if collection.get("rows")]
    if not synced:
        say("no collection is synced yet: embedding a text instead of searching")
    good = [searches(client, name) for name in synced] or [embeds(client)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8").strip(), *sys.argv[3:]))
