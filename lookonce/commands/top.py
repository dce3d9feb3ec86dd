"""``lookonce top``: a running service at a glance, again every few seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from lookonce.client import KEY_VARIABLE
from lookonce.commands.sight import Sight, look, traffic
from lookonce.commands.top_lines import lines
from shared.errors import LookonceError


def view(now: Sight, before: Sight | None) -> Group:
    """Tables of pools, requests and cache; rates need an earlier look."""
    pools = Table("model", "pool", "replicas", "in work", "load", title="pools", title_justify="left")
    requests = Table("model", "requests/s", "errors/s", "p50", "p99", "images/s", "from cache", title_justify="left")
    for model in now.status["models"]:
        name = model["name"]
        for pool in ("encoder", "language"):
            if model[pool]:  # an encoder alone has one pool
                pools.add_row(name, pool, *_pool(model[pool]))
        requests.add_row(name, *_requests(name, now, before))
    cache = now.status["cache"]
    words = "Redis does not answer"
    if cache["reachable"]:
        share = f" of {cache['max_bytes'] / 1e6:,.0f}" if cache["max_bytes"] else ""
        words = (
            f"cache: {cache['keys']} keys, {cache['used_bytes'] / 1e6:,.0f}{share} MB, {cache['evicted_keys']} evicted"
        )
    return Group(pools, requests, words)


def _pool(pool: dict[str, Any]) -> tuple[str, str, str]:
    stats = pool["stats"]
    replicas = " ".join(f"{number} {state.lower()}" for state, number in pool["replicas"].items()) or "none"
    if "kv_cache_usage" in stats:
        work = f"{stats['running']:.0f} running, {stats['waiting']:.0f} waiting"
        return replicas, work, f"KV cache {stats['kv_cache_usage']:.0%}"
    if "waiting_patches" in stats:
        return replicas, f"{stats['in_work']:.0f} images", f"{stats['waiting_patches']:.0f} patches waiting"
    return replicas, "?", "?"


def _requests(model: str, now: Sight, before: Sight | None) -> list[str]:
    asked = traffic(model, now, before)
    return [
        f"{asked.requests:.1f}",
        f"{asked.errors:.1f}",
        *("" if seconds is None else f"≤ {seconds:g} s" for seconds in (asked.median, asked.slowest)),
        f"{asked.images:.1f}",
        "" if asked.cached is None else f"{asked.cached:.0%}",
    ]


def top(
    url: Annotated[str, typer.Option(help="A running service.")] = "http://127.0.0.1:8000",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print, and end.")] = False,
) -> None:
    """Show pools, rates and cache of a running service until Ctrl-C; without a terminal, as lines of key=value."""
    console, key = Console(), os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=10, trust_env=False) as client:
            if not console.is_terminal:
                _print_lines(client, every, once)
            elif once:
                console.print(view(*next(_looks(client, every))))
            else:
                with Live(view(look(client), None), console=console, screen=True) as live:
                    for now, before in _looks(client, every):
                        live.update(view(now, before), refresh=True)
    except KeyboardInterrupt:
        return
    except LookonceError as error:
        Console(stderr=True).print(f"[red]error:[/] {error.message}", highlight=False)
        raise typer.Exit(1) from error


def _looks(client: httpx.Client, every: float) -> Iterator[tuple[Sight, Sight]]:
    """A look and the one before it, for ever."""
    before = look(client)
    while True:
        time.sleep(every)
        now = look(client)
        yield now, before
        before = now


def _print_lines(client: httpx.Client, every: float, once: bool) -> None:
    """For whatever reads a pipe, as soon as they are there; ends when nobody reads any more."""
    for now, before in _looks(client, every):
        at = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        try:
            print("\n".join(lines(now, before, at)), flush=True)
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes again at its end
            return
        if once:
            return
