"""``lookonce cache``: what stands in the cache, whether it is good, and out with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shared.cache.inventory import Entry, Inventory, model_of
from shared.cache.local import Usage, folder_of, usage_of
from shared.config import ImageSettings, Settings, load_settings
from shared.errors import ConfigError, LookonceError, RequestError
from shared.keys import Namespace, alias_key, bytes_digest, image_digest, is_digest, tenant_tag
from shared.records import decode_record

FAILED = 1

app = typer.Typer(no_args_is_help=True, help=__doc__)
out = Console()
err = Console(stderr=True)

Config = Annotated[Path, typer.Option("--config", "-c", help="YAML file whose cache.url and tenants to use.")]
Url = Annotated[str | None, typer.Option("--redis", help="URL of a Redis, instead of cache.url.")]
Model = Annotated[str | None, typer.Option(help="Of this model only.")]
Tenant = Annotated[str | None, typer.Option(help="Of this tenant only, by its name in access.tenants.")]
Salt = Annotated[str | None, typer.Option(help="Of the tenant with this salt; for stock vLLM, a cache_salt.")]
DEFAULT_CONFIG = Path("configs/demo.yaml")


@contextmanager
def _opened(config: Path, url: str | None) -> Iterator[Inventory]:
    """The inventory; what goes wrong ends the command with a sentence.

    Raises:
        typer.Exit: with code 1.
    """
    try:
        if url is None and (url := load_settings(config).cache.url) is None:
            raise ConfigError(f"{config} names no Redis (a private one ends with its service); pass --redis URL")
        inventory = Inventory(url)
        try:
            yield inventory
        finally:
            inventory.close()
    except LookonceError as error:
        err.print(f"[red]error:[/] {escape(error.message)}", highlight=False)
        raise typer.Exit(FAILED) from error


@app.command()
def ls(
    config: Config = DEFAULT_CONFIG,
    redis: Url = None,
    model: Model = None,
    tenant: Tenant = None,
    salt: Salt = None,
    limit: Annotated[int, typer.Option(min=1, help="Entries to list.")] = 100,
) -> None:
    """List embeddings: key, shape, size, age."""
    table = Table("key", "embedding", "MB", "idle s", "expires s", title_justify="left")
    more = False
    with _opened(config, redis) as inventory:
        for number, key in enumerate(inventory.embeddings(model=model, tag=_tag(config, tenant, salt))):
            if more := number >= limit:
                break
            if (entry := inventory.entry(key)) is not None:
                table.add_row(escape(key), _embedding(entry), f"{entry.nbytes / 1e6:.3f}", *_ages(entry))
    out.print(table, soft_wrap=True)
    if more:
        err.print(f"only the first {limit}; --limit lists more", highlight=False)


@app.command()
def show(key: str, config: Config = DEFAULT_CONFIG, redis: Url = None) -> None:
    """Show what is known about one embedding, without its values. Exit code 1: it is not there, or damaged."""
    with _opened(config, redis) as inventory:
        if (entry := inventory.entry(key)) is None:
            raise RequestError(f"no entry {key}")
        rows: dict[str, object] = {"key": key, "bytes": entry.nbytes}
        try:
            place = Namespace.of(key)
            rows |= {"model": place.model, "tower": place.tower, "preprocess": place.preprocess}
        except ValueError:
            rows["model"] = "? (not a key of the service)"
        if (header := entry.header) is not None:
            rows |= {"shape": f"[{header.tokens}, {header.width}]", "dtype": str(header.dtype).removeprefix("torch.")}
            rows |= {"patch grid": f"{header.grid.height} × {header.grid.width}", "merge": header.merge}
        idle, life = _ages(entry)
        rows |= {"idle, s": idle, "expires, s": life, "state": entry.fault or "header is good"}
        for name, value in rows.items():
            out.print(f"{name:12} {value}", highlight=False, markup=False, soft_wrap=True)
    if entry.fault:
        raise typer.Exit(FAILED)


@app.command()
def get(
    key: str,
    out_file: Annotated[Path, typer.Option("--out", "-o", help="safetensors file to write.")],
    config: Config = DEFAULT_CONFIG,
    redis: Url = None,
) -> None:
    """Write one embedding to a safetensors file, after all checks."""
    from safetensors.torch import save

    from shared.durable import replacing

    with _opened(config, redis) as inventory:
        if (record := inventory.record(key)) is None:
            raise RequestError(f"no entry {key}")
        try:
            header, embedding = decode_record(record, key)
        except ValueError as error:
            raise RequestError(f"{key} is damaged ({error}); lookonce cache verify --delete removes it") from error
        about = {"key": key, "grid": f"{header.grid.height}x{header.grid.width}", "merge": str(header.merge)}
        with replacing(out_file) as file:
            file.write(save({"embedding": embedding.clone()}, about))
    out.print(f"[{header.tokens}, {header.width}] in {out_file}", highlight=False, markup=False)


@app.command()
def verify(
    config: Config = DEFAULT_CONFIG,
    redis: Url = None,
    model: Model = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete what is damaged.")] = False,
) -> None:
    """Read every embedding and check all of it. Exit code 1: something is damaged and still there."""
    good, damaged = 0, []
    with _opened(config, redis) as inventory:
        for key in inventory.embeddings(model=model):
            if fault := inventory.fault(key):
                damaged.append(key)
                err.print(f"damaged: {key}: {fault}", highlight=False, markup=False, soft_wrap=True)
            else:
                good += 1
        deleted = inventory.delete(damaged) if delete else 0
    out.print(f"{good} good, {len(damaged)} damaged, {deleted} deleted", highlight=False)
    if len(damaged) > deleted:
        raise typer.Exit(FAILED)


@app.command()
def purge(
    config: Config = DEFAULT_CONFIG,
    redis: Url = None,
    image: Annotated[list[str] | None, typer.Option(help="A file, or a picture's digest; repeatable.")] = None,
    model: Model = None,
    tenant: Tenant = None,
    salt: Salt = None,
    everything: Annotated[bool, typer.Option("--all", help="Every embedding and alias.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete embeddings: of images, of a model, of a tenant, or all. Several conditions narrow each other."""
    if not (image or model or tenant or salt or everything):
        err.print("[red]error:[/] say what: --image, --model, --tenant, --salt or --all")
        raise typer.Exit(FAILED)
    with _opened(config, redis) as inventory:
        tag = _tag(config, tenant, salt)
        if image:
            secret = _salt(config, tenant, salt)
            limits = load_settings(config).images if config.exists() else ImageSettings()
            found = {key for one in image for key in _of_image(inventory, one, secret, limits, model)}
        else:
            found = set(inventory.embeddings(model=model, tag=tag))
            if model is None:  # an alias belongs to no model
                found |= set(inventory.aliases(tag=tag))
        if found and not yes:
            typer.confirm(f"delete {len(found)} entries?", abort=True)
        out.print(f"{inventory.delete(found)} deleted", highlight=False)


@app.command()
def stats(config: Config = DEFAULT_CONFIG, redis: Url = None) -> None:
    """Count embeddings and bytes by model, and tell Redis's memory, policy and hit rate, and of this node's tier."""
    numbers: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    with _opened(config, redis) as inventory:
        for key in inventory.embeddings():
            if (entry := inventory.entry(key)) is not None:
                numbers[model_of(key)] += 1
                nbytes[model_of(key)] += entry.nbytes
        aliases = sum(1 for _ in inventory.aliases())
        told = inventory.information()
        local = usage_of(folder_of(inventory.url))
    table = Table("model", "embeddings", "MB", title_justify="left")
    for name in sorted(numbers):
        table.add_row(escape(name), str(numbers[name]), f"{nbytes[name] / 1e6:.1f}")
    out.print(table)
    limit = int(str(told.get("maxmemory", 0)))
    for name, value in {
        "aliases": aliases,
        "memory": f"{int(str(told['used_memory'])) / 1e6:.1f} MB of {f'{limit / 1e6:.0f} MB' if limit else 'no limit'}",
        "policy": told.get("maxmemory_policy", "?"),
        "evicted": told.get("evicted_keys", "?"),
        "expired": told.get("expired_keys", "?"),
        "reads": f"{told.get('keyspace_hits', '?')} found, {told.get('keyspace_misses', '?')} not",
        "local": "no tier on this node" if local is None else _local(local),
    }.items():
        out.print(f"{name:8} {value}", highlight=False)


def _local(usage: Usage) -> str:
    counts = ", ".join(f"{number} {name}" for name, number in usage.counts.items())
    return f"{usage.records} embeddings, {usage.nbytes / 1e6:.1f} MB on this node; {counts}"


def _of_image(inventory: Inventory, image: str, salt: str | None, limits: ImageSettings, model: str | None) -> set[str]:
    """Entries of one picture: given as a file, also under what its alias says; or by its digest."""
    from shared.images import decode

    if is_digest(image):
        return set(inventory.embeddings(model=model, digest=image))
    try:
        data = Path(image).read_bytes()
    except OSError as error:
        raise RequestError(f"{image} is neither a file nor a digest of 64 hex digits") from error
    alias = alias_key(bytes_digest(data, salt))
    digests = {image_digest(decode(data, limits), salt), inventory.aliased(alias)}
    found = {key for digest in digests if digest for key in inventory.embeddings(model=model, digest=digest)}
    return found | (set() if inventory.record(alias) is None else {alias})


def _salt(config: Path, tenant: str | None, salt: str | None) -> str | None:
    """A tenant's salt, by its name or as given.

    Raises:
        ConfigError: no such tenant.
    """
    if tenant is None:
        return salt
    settings: Settings = load_settings(config)
    for known in settings.access.tenants:
        if known.name == tenant:
            return known.salt or known.name
    raise ConfigError(
        f"{config} has no tenant {tenant!r}; it knows {[known.name for known in settings.access.tenants]}"
    )


def _tag(config: Path, tenant: str | None, salt: str | None) -> str | None:
    secret = _salt(config, tenant, salt)
    return tenant_tag(secret) if secret else None


def _embedding(entry: Entry) -> str:
    header = entry.header
    if header is None:
        return f"damaged: {entry.fault.split(':')[0]}"
    return f"\\[{header.tokens}, {header.width}] {str(header.dtype).removeprefix('torch.')}"


def _ages(entry: Entry) -> tuple[str, str]:
    idle, life = ("" if seconds is None else f"{seconds:.0f}" for seconds in (entry.idle, entry.life))
    return idle, life
