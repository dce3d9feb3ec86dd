"""What the application's life holds for the routes, and who a request belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from llm_service.api.access import Access, Tenant
from llm_service.api.batches.service import Batches
from llm_service.api.endpoint import Endpoint
from llm_service.api.uploads import Uploads


@dataclass(frozen=True)
class State:
    """What the application's life holds for the routes."""

    endpoint: Endpoint
    access: Access
    uploads: Uploads
    batches: Batches


def _state(request: Request) -> State:
    state: State = request.app.state.lookonce
    return state


def _tenant(request: Request) -> Tenant:
    access = _state(request).access
    tenant = access.tenant(request.headers.get("authorization"))
    access.count(tenant)
    return tenant


def _known(request: Request) -> Tenant:
    """A tenant whose question is too small to count."""
    return _state(request).access.tenant(request.headers.get("authorization"))


def _admin(request: Request) -> Tenant:
    return _state(request).access.admin(request.headers.get("authorization"))


StateOf = Annotated[State, Depends(_state)]
TenantOf = Annotated[Tenant, Depends(_tenant)]
KnownTenant = Annotated[Tenant, Depends(_known)]
Administrator = Annotated[Tenant, Depends(_admin)]
