"""Who asks: API keys to tenants, and their rate limits."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass

from shared.config import AccessSettings, TenantSettings
from shared.errors import Busy, Unauthorized

KEY_PREFIX = "lo-"


def new_key() -> tuple[str, str]:
    """A fresh API key of 256 random bits, and its hash for the configuration."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, key_hash(key)


def key_hash(key: str) -> str:
    """SHA-256 of a key, hex. A key is random, so it needs neither salt nor a slow hash."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True)
class Tenant:
    """Who a request belongs to.

    Attributes:
        name: for logs; empty where no tenants are configured.
        salt: of its images and its prompts; None where no tenants are configured.
        models: that it may use; empty for all.
        admin: whether it may see metrics and pools.
    """

    name: str = ""
    salt: str | None = None
    models: frozenset[str] = frozenset()
    admin: bool = False


EVERYBODY = Tenant(admin=True)


class RateLimit:
    """A bucket that fills steadily and holds at most a quarter of a minute's requests, but one at least."""

    def __init__(self, per_minute: float) -> None:
        self._rate = per_minute / 60
        self._capacity = max(1.0, per_minute / 4)
        self._level, self._at = self._capacity, time.monotonic()

    def take(self) -> None:
        """Takes one request's worth.

        Raises:
            Busy: empty; says when the next request fits.
        """
        now = time.monotonic()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        if self._level < 1:
            wait = (1 - self._level) / self._rate
            raise Busy(f"the rate limit of this API key is reached; try again in {wait:.1f} s", retry_after=wait)
        self._level -= 1


class Access:
    """The gate.

    Args:
        settings: the tenants and the hashes of their keys.
    """

    def __init__(self, settings: AccessSettings) -> None:
        self._tenants = {key: _tenant(tenant) for tenant in settings.tenants for key in tenant.keys}
        self._limits = {
            tenant.name: RateLimit(tenant.requests_per_minute)
            for tenant in settings.tenants
            if tenant.requests_per_minute is not None
        }

    def everyone(self) -> list[Tenant]:
        """All tenants that there are; the one of everybody where none are configured."""
        return list({tenant.name: tenant for tenant in self._tenants.values()}.values()) or [EVERYBODY]

    def tenant(self, authorization: str | None) -> Tenant:
        """Whose key this is.

        Args:
            authorization: the header of that name.

        Raises:
            Unauthorized: tenants are configured, and this is no key of theirs.
        """
        if not self._tenants:
            return EVERYBODY
        scheme, _, key = (authorization or "").partition(" ")
        # the table is keyed by hashes: how long a look-up takes says nothing about a key
        tenant = self._tenants.get(key_hash(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise Unauthorized("this service needs an API key: send the header 'Authorization: Bearer <key>'")
        return tenant

    def count(self, tenant: Tenant) -> None:
        """Counts a request against the tenant's rate limit.

        Raises:
            Busy: the limit is reached.
        """
        if (limit := self._limits.get(tenant.name)) is not None:
            limit.take()

    def admin(self, authorization: str | None) -> Tenant:
        """The same for routes that show the whole service.

        Raises:
            Unauthorized: not an administrator's key.
        """
        tenant = self.tenant(authorization)
        if not tenant.admin:
            raise Unauthorized("this route needs the API key of a tenant with 'admin: true'")
        return tenant


def _tenant(settings: TenantSettings) -> Tenant:
    return Tenant(settings.name, settings.salt or settings.name, frozenset(settings.models), settings.admin)
