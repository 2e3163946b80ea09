"""The administrator's endpoints, which exist only on a server with an admin key."""

from __future__ import annotations

from aserve.http.control import internals, pause, profile, sleep, weight_check, weights

ROUTES = (
    *(*pause.ROUTES, *weights.ROUTES, *weight_check.ROUTES),
    *(*sleep.ROUTES, *profile.ROUTES, *internals.ROUTES),
)
