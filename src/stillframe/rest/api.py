"""One request and its answer: who may ask, what is meant, what is wrong. No sockets here."""

from __future__ import annotations

import hmac
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from stillframe.json_values import JsonObject
from stillframe.rest.control import Call
from stillframe.rest.jobs import ServedJobs
from stillframe.rest.lookups import Lookups
from stillframe.rest.openapi import document
from stillframe.rest.operations import Operations
from stillframe.rest.refusals import Refused
from stillframe.rest.routes import (
    DOCUMENT_PATH,
    METRICS_PATH,
    Route,
    allowed_methods,
    routes_at,
    split_path,
)
from stillframe.rest.schemas import checked, parsed
from stillframe.rest.static import page_file
from stillframe.rest.streams import OwnStream, Stream

BODY_BYTES_MAX = 64 * 1024
_PARAMETERS_MAX = 50
_OF_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
log = logging.getLogger("stillframe.rest")


@dataclass(frozen=True, slots=True)
class Request:
    """As it came, but in one piece."""

    method: str
    target: str
    """The path and what is behind it, or a whole URL."""
    host: str | None = None
    authorization: str | None = None
    body: bytes = b""
    origin: str | None = None
    fetch_site: str | None = None
    """What a browser says of the page that asks: `Sec-Fetch-Site`."""
    last_event_id: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: JsonObject | list[JsonObject] | str | None
    """A text says in its headers what it is."""
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal(error: Refused) -> Answer:
    return Answer(error.status, {"errors": [str(error)]}, error.headers)


@dataclass(slots=True)
class Traffic:
    """Of one server."""

    streams: int = 0
    """That are open now."""
    sent_bytes: int = 0

    @contextmanager
    def following(self) -> Iterator[None]:
        self.streams += 1
        try:
            yield
        finally:
            self.streams -= 1


@dataclass(frozen=True, slots=True)
class Api:
    """All that a driver answers. May be used by any thread."""

    jobs: ServedJobs
    operations: Operations
    token: str
    bind_host: str
    is_loopback: bool
    lookups: Lookups = field(default_factory=Lookups)
    traffic: Traffic = field(default_factory=Traffic)
    more_routes: Sequence[Route] = ()
    """Beside those that every driver has."""

    def answer(self, request: Request) -> Answer | Stream | OwnStream:
        """Never raises, whatever was sent."""
        try:
            return self._answer(request)
        except Refused as error:
            return refusal(error)
        except Exception as error:
            log.exception("%s %s failed", request.method, request.target)
            sentence = f"the driver failed on this request ({type(error).__name__}): see its log"
            return refusal(Refused(500, sentence))

    def _answer(self, request: Request) -> Answer | Stream | OwnStream:
        self._refuse_other_hosts(request.host)
        _refuse_other_origins(request)
        path, behind = _split_target(request.target)
        parts = split_path(path)
        of_page = page_file(path)
        if of_page is not None:
            return _page(request, *of_page)
        if not self.is_loopback:
            self._refuse_without_token(request)
        if path == DOCUMENT_PATH:
            return self._document(request)
        if path == METRICS_PATH:
            return self._metrics(request)
        routes = routes_at(parts, self.more_routes)
        if not routes:
            known = "GET /openapi.json tells what there is"
            raise Refused(404, f"there is nothing at {path[:200]!r}: {known}")
        match = [route for route in routes if route.method == _as_read(request.method)]
        if not match:
            return _other_method(request, allowed_methods(routes))
        return self._routed(match[0], parts, behind, request)

    def _routed(
        self, route: Route, parts: list[str], behind: str, request: Request
    ) -> Answer | Stream | OwnStream:
        if route.needs_token:
            self._refuse_without_token(request)
        call = Call(
            self.jobs,
            self.operations,
            self.lookups,
            route.path_values(parts),
            _parameters(route, behind),
            _body(route, request.body),
            request.last_event_id,
            self._has_token(request),
        )
        told = route.handler(call)
        return told if isinstance(told, Stream) else Answer(route.status, told)

    def _document(self, request: Request) -> Answer:
        if _as_read(request.method) != "GET":
            return _other_method(request, ["GET", "HEAD", "OPTIONS"])
        return Answer(200, document(reading_needs_token=not self.is_loopback))

    def _metrics(self, request: Request) -> Answer:
        # Here, where somebody asks for them: most drivers are never scraped.
        from stillframe.rest.metrics import CONTENT_TYPE, metrics_text

        if _as_read(request.method) != "GET":
            return _other_method(request, ["GET", "HEAD", "OPTIONS"])
        return Answer(
            200,
            metrics_text(self.jobs.all(), self.jobs.clock.wall_ms(), self.traffic),
            {"Content-Type": CONTENT_TYPE},
        )

    # --- who may ask ---

    def _refuse_other_hosts(self, host: str | None) -> None:
        """A web page may have its own name lead to this machine, and then read what browsers take
        for its own. Bound elsewhere nobody gets an answer without the token, so names are free."""
        if not self.is_loopback:
            return
        name = _host_name(host)
        if name not in _OF_THIS_MACHINE and name != self.bind_host.lower():
            raise Refused(
                400,
                f"the request is for the host {host!r}, which this driver is not: call it"
                f" {self.bind_host} or localhost",
            )

    def _has_token(self, request: Request) -> bool:
        scheme, _, given = (request.authorization or "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(errors="replace"), self.token.encode())
        return scheme.lower() == "bearer" and is_right

    def _refuse_without_token(self, request: Request) -> None:
        if self._has_token(request):
            return
        how = "wrong" if request.authorization else "missing"
        raise Refused(
            401,
            f"the token is {how}: send the header 'Authorization: Bearer TOKEN'",
            {"WWW-Authenticate": 'Bearer realm="stillframe"'},
        )


def _refuse_other_origins(request: Request) -> None:
    """What a browser asks on behalf of another site's page, whatever it is: also what changes
    nothing could tell that page something, and also a form that needs no answer could do harm."""
    site, origin = request.fetch_site, request.origin
    is_own = site is None or site.lower() in ("same-origin", "none")
    if is_own and (origin is None or _is_origin_of(origin, request.host)):
        return
    raise Refused(403, "a page of another origin asks: only this driver's own page may")


def _is_origin_of(origin: str, host: str | None) -> bool:
    """Whatever the scheme: encryption may be somebody's in between."""
    scheme, parted, rest = origin.partition("://")
    return bool(parted) and scheme in ("http", "https") and rest.lower() == (host or "").lower()


def _as_read(method: str) -> str:
    """HEAD is GET without the body, which whoever sends the answer leaves out."""
    return "GET" if method == "HEAD" else method


def _page(request: Request, text: str, headers: Mapping[str, str]) -> Answer:
    if _as_read(request.method) != "GET":
        return _other_method(request, ["GET", "HEAD", "OPTIONS"])
    return Answer(200, text, headers)


def _other_method(request: Request, allowed: list[str]) -> Answer:
    headers = {"Allow": ", ".join(allowed)}
    if request.method == "OPTIONS":
        return Answer(204, None, headers)
    method = request.method[:20]
    raise Refused(405, f"{method!r} cannot be done here, only {', '.join(allowed)}", headers)


def _host_name(host: str | None) -> str:
    """Without the port, which a tunnel may change."""
    match = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](:[0-9]*)?|([^:\[\]]*)(:[0-9]*)?", host or "")
    return (match[1] or match[3] or "").lower() if match else ""


# --- what is meant ---


def _split_target(target: str) -> tuple[str, str]:
    try:
        parts = urlsplit(target if not target.startswith("/") else f"http://host{target}")
    except ValueError as error:
        raise Refused(400, f"the address {target[:200]!r} cannot be understood") from error
    if not parts.path.startswith("/"):
        raise Refused(400, f"the address {target[:200]!r} is not a path such as /jobs")
    return parts.path, parts.query


def _parameters(route: Route, behind: str) -> Mapping[str, Any]:
    try:
        pairs = parse_qsl(
            behind, keep_blank_values=True, errors="strict", max_num_fields=_PARAMETERS_MAX
        )
    except ValueError as error:
        raise Refused(400, f"the parameters {behind[:200]!r} cannot be understood") from error
    known = {each.name: each for each in route.parameters}
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name not in known:
            which = f"it has {', '.join(known)}" if known else "it has none"
            raise Refused(400, f"there is no parameter {name[:200]!r} here: {which}")
        if name in values:
            raise Refused(400, f"the parameter {name} is given twice: give it once")
        values[name] = parsed(text, known[name].schema, f"the parameter {name}")
    for each in route.parameters:
        if each.is_required and each.name not in values:
            raise Refused(400, f"the parameter {each.name} is missing: add ?{each.name}=…")
    return values


def _body(route: Route, data: bytes) -> Mapping[str, Any]:
    """A body that nobody wants is not looked at; one that is left out has no fields."""
    if route.body is None:
        return {}
    value = _json(data) if data.strip() else {}
    checked(value, route.body, "the body")
    assert isinstance(value, dict)
    return value


def _json(data: bytes) -> object:
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"says {error}"
        raise Refused(400, f"the body is no JSON: the reader {what[:200]}") from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no number")
