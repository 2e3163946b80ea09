"""The administrator's endpoints, which exist only on a server with an admin key."""

from __future__ import annotations

from aserve.http.control import pause, profile, sleep, weights

ROUTES = (*pause.ROUTES, *weights.ROUTES, *sleep.ROUTES, *profile.ROUTES)
