"""What may be captioned: folders and globs of pictures, lists, tables, tars, data sets on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path

from llm_service.captioning.rows import Source
from llm_service.captioning.sources.files import PICTURES, folder_source, list_source, pictures_below, pictures_source
from llm_service.captioning.sources.tables import TABLES, table_source
from llm_service.captioning.sources.tars import tar_source
from shared.errors import ConfigError

TARS = frozenset({".tar", ".tgz"})
LISTS = frozenset({".txt", ".lst"})
ARROW = ".arrow"


@dataclass(frozen=True)
class Columns:
    """Which columns of a table matter; None for what is found by itself.

    Attributes:
        image: holds bytes, paths or URLs.
        id: unique name of each row.
    """

    image: str | None = None
    id: str | None = None


def open_source(spec: str, columns: Columns | None = None) -> Source:
    """Finds out what a person points at.

    Args:
        spec: a folder, a file, or a glob (``**`` goes into subfolders).
        columns: for tables.

    Raises:
        ConfigError: nothing there, or nothing that can be captioned; says what can.
    """
    columns = columns or Columns()
    source = _find(spec, columns)
    if (columns.image or columns.id) and not any(_kind(Path(name)) == "tables" for name in source.files):
        raise ConfigError("columns are for tables (JSONL, CSV, Parquet, Arrow); this source has none")
    where = str(Path(spec).expanduser().absolute())
    return replace(source, identity={"source": where, "image_column": columns.image, "id_column": columns.id})


def _find(spec: str, columns: Columns) -> Source:
    path = Path(spec).expanduser()
    if path.is_dir():
        found = _inside(path)
        return folder_source(path) if found is None else _of_files(found, columns, path)
    if path.is_file():
        return _of_files([path], columns, path.parent)
    if has_magic(spec):
        files = sorted(Path(name) for name in glob(str(path), recursive=True) if Path(name).is_file())  # noqa: PTH207
        if not files:
            raise ConfigError(f"nothing matches {spec}")
        return _of_files(files, columns, _fixed_part(path))
    if "://" in spec:
        raise ConfigError(f"{spec}: lists and tables may name URLs; a URL itself is no source")
    raise ConfigError(f"there is no {spec}")


def _of_files(files: list[Path], columns: Columns, root: Path) -> Source:
    kinds = {_kind(path) for path in files}
    if len(kinds) > 1:
        raise ConfigError(f"files of several kinds at once ({', '.join(sorted(kinds))}); name one kind")
    match kinds.pop():
        case "pictures":
            return pictures_source(files, root)
        case "tables":
            return table_source(files, root, columns.image, columns.id)
        case "tars":
            return tar_source(files, root)
        case "lists":
            return list_source(files)
        case _:
            known = sorted({*PICTURES, *TABLES, *TARS, *LISTS, ARROW})
            raise ConfigError(f"{files[0]} is of no kind that can be captioned; known: {', '.join(known)}")


def _kind(path: Path) -> str:
    name = path.name.lower()
    suffix = ".tgz" if name.endswith(".tar.gz") else path.suffix.lower()
    if suffix in PICTURES:
        return "pictures"
    if suffix in TABLES or suffix == ARROW:
        return "tables"
    if suffix in TARS:
        return "tars"
    return "lists" if suffix in LISTS else "others"


def _inside(folder: Path) -> list[Path] | None:
    """Files of a data set that a folder holds instead of pictures; None for a folder of pictures."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in folder.iterdir() if (entry / "state.json").is_file())
        raise ConfigError(f"{folder} holds several splits; name one: {', '.join(str(folder / s) for s in splits)}")
    if (folder / "state.json").is_file():  # written by datasets.save_to_disk
        return sorted(folder.glob("*.arrow"))
    if next(pictures_below(folder), None) is not None:
        return None
    kinds: dict[str, list[Path]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if (kind := _kind(path)) in ("tables", "tars"):
            kinds.setdefault(kind, []).append(path)
    if len(kinds) > 1:
        raise ConfigError(f"{folder} holds tables and tars; name one kind, as '{folder}/**/*.tar'")
    return next(iter(kinds.values()), None)


def _fixed_part(pattern: Path) -> Path:
    """The folder before the first wildcard: ids relative to it stay the same, whatever files come and go."""
    return next(parent for parent in pattern.absolute().parents if not has_magic(str(parent)))
