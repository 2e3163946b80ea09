"""The API key: who may use a route.

Must not know what a route does. It decides on the matched route, never on the URL's text, and
whatever is not named as public needs the key, unknown routes as well.
"""

from __future__ import annotations

import hmac

from aiohttp import web

from aserve.errors import Unauthorized

# The page and the probe; they tell nothing about anybody's requests.
PUBLIC_ROUTES = frozenset({"/", "/health"})
METRICS = "/metrics"


def check_key(request: web.Request, api_key: str | None, *, has_public_metrics: bool) -> None:
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical
    is_public = path in PUBLIC_ROUTES or (path == METRICS and has_public_metrics)
    if api_key is None or is_public:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if not given:
        raise Unauthorized("No API key was given: send it as `Authorization: Bearer KEY`.")
    is_right = hmac.compare_digest(given.strip().encode("utf-8", "replace"), api_key.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise Unauthorized("The API key is not correct.")
