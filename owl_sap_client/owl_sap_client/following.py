"""Parse a job's server-sent events, and resume after a lost connection. Does no I/O itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx

from owl_sap_client.errors import UnexpectedAnswer
from owl_sap_client.operations import EVENTS, place
from owl_sap_client.results import JobEvent

# The service sends a comment every 15 s.
TIMEOUT = httpx.Timeout(30, read=60)


class Following:
    """The state of one stream. `after`: id of the last event received. `quiet`: lost connections since then."""

    def __init__(self, job: str, after: int) -> None:
        self.after = after
        self.over = False
        self.quiet = 0
        self._place = place(EVENTS, {"job_id": job})
        self._rest = b""
        self._fields: dict[str, str] = {}

    def request(self, client: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Return the request for the events after `after`."""
        self._rest, self._fields = b"", {}
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "Last-Event-ID": str(self.after)}
        return client.build_request("GET", self._place, headers=headers, timeout=TIMEOUT)

    @staticmethod
    def check(response: httpx.Response) -> None:
        """Raise UnexpectedAnswer for anything but an event stream, such as a proxy's login page."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream":
            raise UnexpectedAnswer(f"{response.url.host} sent no events; check the client's url")

    def feed(self, chunk: bytes) -> Iterator[JobEvent]:
        """Yield the events that `chunk` completes."""
        # Lines end with LF or CR LF; str.splitlines would also split at characters inside texts.
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b":"):  # a comment: the service is alive
                self.quiet = 0
            event = self._line(line.removesuffix(b"\r").decode(errors="replace"))
            if event is not None and event.id > self.after:
                self.after, self.quiet = event.id, 0
                self.over = event.event == "result"
                yield event

    def _line(self, line: str) -> JobEvent | None:
        """Add a line to the current event; return the event at the empty line that ends it."""
        if line:
            name, _, value = line.partition(":")
            if name:
                before = f"{self._fields[name]}\n" if name == "data" and "data" in self._fields else ""
                self._fields[name] = before + value.removeprefix(" ")
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        try:
            return JobEvent(int(fields["id"]), fields["event"], json.loads(fields["data"]))
        except (KeyError, ValueError) as error:
            raise UnexpectedAnswer("the stream contains an invalid event") from error
