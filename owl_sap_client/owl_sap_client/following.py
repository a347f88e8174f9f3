"""The events of a job out of a stream of bytes (server-sent events), and where to go on after a break. Reads nothing
itself."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx

from owl_sap_client.errors import UnexpectedAnswer
from owl_sap_client.operations import EVENTS, place
from owl_sap_client.results import JobEvent

TIMEOUT = httpx.Timeout(30, read=60)
"""The service says something every 15 s."""


class Following:
    """`after`: the number of the last event that came. `quiet`: breaks since one came."""

    def __init__(self, job: str, after: int) -> None:
        self.after = after
        self.over = False
        self.quiet = 0
        self._place = place(EVENTS, {"job_id": job})
        self._rest = b""
        self._fields: dict[str, str] = {}

    def request(self, client: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """For the events behind `after`."""
        self._rest, self._fields = b"", {}
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "Last-Event-ID": str(self.after)}
        return client.build_request("GET", self._place, headers=headers, timeout=TIMEOUT)

    @staticmethod
    def check(response: httpx.Response) -> None:
        """Raises UnexpectedAnswer for a page in the place of a stream: a proxy's, for a login."""
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "text/event-stream":
            raise UnexpectedAnswer(f"{response.url.host} answered no events; does the address lead to this service?")

    def feed(self, chunk: bytes) -> Iterator[JobEvent]:
        """Lines end with LF or CR LF. Not by str.splitlines, which takes characters of texts for ends of lines."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b":"):  # the service is there, and nothing happens: no sign that it is lost
                self.quiet = 0
            event = self._line(line.removesuffix(b"\r").decode(errors="replace"))
            if event is not None and event.id > self.after:
                self.after, self.quiet = event.id, 0
                self.over = event.event == "result"
                yield event

    def _line(self, line: str) -> JobEvent | None:
        """An empty line ends an event; one that begins with a colon is a comment."""
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
            raise UnexpectedAnswer("what came is no event of a job") from error
