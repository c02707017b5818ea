"""Protection of the studio: who may ask, what pages may load, how large requests may be, and which files are served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..serving.access import AccessRules

MAX_BODY_BYTES = 64 * 2**20  # of any request; forms have a lower limit
MAX_FORM_BYTES = 2**20
SAFE_METHODS = ("GET", "HEAD")
COOKIE_SECONDS = 30 * 24 * 3600
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; media-src 'self'; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers would send forms with the origin "null"
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class StudioAccessMiddleware:
    """Refuses foreign hosts, pages of other origins, and browsers without the token.

    The token comes once as `?token=...`; a cookie holds it afterwards, and the address is shown without it. Programs
    send it as `Authorization: Bearer ...`. Requests that change something must come from a page of the studio: a form
    on another site carries that site's origin.
    """

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._find_refusal(request) or self._find_login(request)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await (refusal or self.app)(scope, limit_body(request, receive), send_with_headers)

    def _find_refusal(self, request: Request) -> Response | None:
        headers = request.headers
        host, origins, site = headers.get("host", ""), headers.getlist("origin"), headers.get("sec-fetch-site", "")
        if not self.rules.is_own_host(host, request.scope):
            return refuse(
                403, f"the host '{host:.60}' is not a name of this studio; start it with --allowed-host NAME [TM1355]"
            )
        if not self.rules.is_own_origin(origins, host):
            return refuse(403, "requests from web pages of other origins are refused; open the studio itself [TM1356]")
        if request.method in SAFE_METHODS:
            # A link on another site may open a page, but no other site may embed what is served here.
            is_foreign = site in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate"
            return refuse(403, "web pages of other origins may not embed the studio [TM1357]") if is_foreign else None
        if not origins and site != "same-origin":
            return refuse(
                403, "a request that changes something needs the studio's origin; use a page of the studio [TM1358]"
            )
        return None

    def _find_login(self, request: Request) -> Response | None:
        """Return the answer to a request without the cookie: a redirect that sets it, or a refusal."""
        if not self.rules.token:
            return None
        cookie = cookie_name(request)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = request.query_params.get("token", "")
        if given and self.rules.is_token(given):
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            target = request.url.path + (f"?{urlencode(rest)}" if rest else "")
            response = RedirectResponse("/" + target.lstrip("/"), 303)
            response.set_cookie(cookie, given, max_age=COOKIE_SECONDS, httponly=True, samesite="strict")
            return response
        if self.rules.is_token(request.cookies.get(cookie, "")) or self.rules.is_token(bearer):
            return None
        return refuse(401, "the token is missing or wrong; open the address that `tastemaker studio` printed [TM1359]")


def cookie_name(request: Request) -> str:
    """Name of the cookie with the token. Browsers share cookies between the ports of a host, so it names the port."""
    return f"tastemaker_studio_{(request.scope.get('server') or ['', 0])[1]}"


def refuse(status: int, reason: str) -> Response:
    return PlainTextResponse(f"{reason}\n", status)


def limit_body(request: Request, receive: Receive) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
    """Return a `receive` that refuses a request with more than MAX_BODY_BYTES, also if it does not say its length."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MAX_BODY_BYTES:
            raise HTTPException(
                413, f"the request is larger than {MAX_BODY_BYTES >> 20} MB; send less at once [TM1360]"
            )
        return message

    return receive_limited


async def read_form(request: Request, max_bytes: int = MAX_FORM_BYTES) -> dict[str, str]:
    """Read a form that a page sent as `application/x-www-form-urlencoded`; of equal names the last counts."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/x-www-form-urlencoded":
        raise HTTPException(415, f"a form of type '{content_type:.60}' cannot be read; send it URL-encoded [TM1361]")
    body = await read_body(request, max_bytes)
    try:
        return dict(parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=2000))
    except ValueError as error:
        raise HTTPException(400, "the form cannot be read; send it URL-encoded in UTF-8 [TM1362]") from error


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request, of at most `max_bytes`."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise HTTPException(413, f"the request is larger than {max_bytes >> 10} KB; send less at once [TM1363]")
        chunks.append(chunk)
    return b"".join(chunks)


def resolve_inside(root: Path, relative: str) -> Path:
    """Return an existing path below a directory; refuse one that leads outside, also through a symbolic link."""
    try:
        path = (root / relative).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # missing, a NUL byte, a loop of links
        raise HTTPException(404, "there is no such file [TM1364]") from error
    if not path.is_relative_to(root.resolve()):
        raise HTTPException(404, "there is no such file in the served directory [TM1365]")
    return path
