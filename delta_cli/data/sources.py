"""Rows of a data set, one mapping each: from a local file, a folder laid out like a hub repository, or the hub."""

from __future__ import annotations

import csv
import difflib
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from delta_cli.data.problem import DataRow
from delta_cli.errors import NotFetchedError, UserError, first_line

LocatedRows = Iterator[tuple[str, DataRow]]  # where a row is, for messages; the row

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
HUB_EXTRA = "run: pip install 'delta-rlvr[hub]'"


def rows(source: str, config: str | None, split: str, columns: set[str], files: str | None = None) -> LocatedRows:
    """The rows of ``source`` with at least ``columns``; where the format has columns, no others are read.

    ``files`` names the JSON files of a hub repository that are read without its loading script. Raises
    UserError that names the file, the line and the reason.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return _hub_rows(str(path), config, split, columns)
    if source.endswith(SUFFIXES):
        if not path.is_file():
            raise UserError(f"data.source: {source}: no such file{_beside(path)}")
        return _file_rows(path, columns)
    if path.is_file():
        raise UserError(f"data.source: {source}: unknown kind of file; use one of {', '.join(SUFFIXES)}")
    if files is not None and source.count("/") == 1:
        return _script_rows(source, files, columns)
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise UserError(f"data.source: {source}: no such file or folder")
    return _hub_rows(source, config, split, columns)


def first_rows(source: str, count: int) -> list[DataRow]:
    """The first rows of a local file, with every column. Raises UserError as ``rows`` does."""
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(f"{source}: no such file{_beside(path)}")
    if not source.endswith(SUFFIXES):
        raise UserError(f"{source}: unknown kind of file; use one of {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        return [row for _, row in islice(_parquet_rows(path, set(_parquet_columns(path))), count)]
    read = {".json": _json_rows, ".csv": _csv_rows}.get(path.suffix, json_lines)
    return [row for _, row in islice(read(path), count)]


def _parquet_columns(path: Path) -> list[str]:
    from pyarrow import ArrowException, parquet

    try:
        return list(parquet.read_schema(path).names)
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({first_line(error)})") from error


def _beside(path: Path) -> str:
    """A hint at a file with a similar name."""
    folder = path.parent
    names = [file.name for file in folder.iterdir() if file.name.endswith(SUFFIXES)] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"; did you mean {folder / close[0]}?" if close else ""


def _file_rows(path: Path, columns: set[str]) -> LocatedRows:
    if path.suffix == ".parquet":
        return _parquet_rows(path, columns)
    read = {".json": _json_rows, ".csv": _csv_rows}.get(path.suffix, json_lines)
    return _with_columns(read(path), columns)


def _with_columns(located: LocatedRows, columns: set[str]) -> LocatedRows:
    """Only these columns; the first row must have them all, a later one that lacks some has None there."""
    for index, (where, row) in enumerate(located):
        if index == 0:
            _check_columns(where, columns, list(row))
        yield where, {column: row.get(column) for column in columns}


def json_lines(path: Path) -> LocatedRows:
    """The objects in a .jsonl or .jsonl.gz file. Raises UserError that names the line that is none."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(_lines(path, file), start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, _record(where, _parse(where, line))


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from file
    except (OSError, EOFError, zlib.error) as error:  # what a damaged gzip file raises
        raise UserError(f"{path}: cannot be read ({error})") from error


def _json_rows(path: Path) -> LocatedRows:
    """A list of records, or an object with one list in it, as in {"data": [...]}."""
    value = _parse(str(path), path.read_bytes())
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise UserError(f"{path}: holds no list of records; write [{{…}}, …], or one record a line as .jsonl")
    for index, record in enumerate(value):
        where = f"{path}: record {index + 1}"
        yield where, _record(where, record)


def _csv_rows(path: Path) -> LocatedRows:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(f"{path}:{reader.line_num}: not as many cells as the header has columns")
                yield f"{path}:{reader.line_num}", row
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}:{reader.line_num + 1}: not a CSV row in UTF-8 ({error})") from error


def _parquet_rows(path: Path, columns: set[str]) -> LocatedRows:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"{path}: reading Parquet needs pyarrow; {HUB_EXTRA}") from error
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(str(path), columns, file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(columns=sorted(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({first_line(error)})") from error


def _hub_library(name: str) -> Any:
    """The package datasets. Raises UserError if it is not installed."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"data.source: {name}: data sets of the hub need the package datasets; {HUB_EXTRA}") from error
    return datasets


def _hub_rows(name: str, config: str | None, split: str, columns: set[str]) -> LocatedRows:
    datasets = _hub_library(name)
    try:
        builder = datasets.load_dataset_builder(name, config)
        if builder.info.features is not None:  # known from the card, before anything is fetched
            _check_columns(name, columns, list(builder.info.features))
        if hasattr(builder.config, "columns"):  # Parquet: the others are not even read from the file
            table = datasets.load_dataset(name, config, split=split, columns=sorted(columns))
        else:
            table = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        where = f"{name} ({config}, {split})" if config else f"{name} ({split})"
        kind = UserError if Path(name).is_dir() else NotFetchedError
        raise kind(f"data.source: {where}: cannot be loaded: {_reason(error)}") from error
    _check_columns(name, columns, table.column_names)
    selected: Iterable[DataRow] = table.select_columns(sorted(columns))
    for number, row in enumerate(selected, start=1):
        yield f"{name} ({split}): row {number}", row


def _script_rows(name: str, files: str, columns: set[str]) -> LocatedRows:
    """JSON files of a hub repository that has a loading script, which nobody runs any more."""
    datasets = _hub_library(name)
    try:
        table = datasets.load_dataset("json", data_files=f"hf://datasets/{name}/{files}", split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise NotFetchedError(f"data.source: {name} ({files}): cannot be loaded: {_reason(error)}") from error
    _check_columns(name, columns, table.column_names)
    for number, row in enumerate(table.select_columns(sorted(columns)), start=1):
        yield f"{name} ({files}): row {number}", row


def _check_columns(where: str, wanted: set[str], present: list[str]) -> None:
    missing = sorted(wanted - set(present))
    if missing:
        raise UserError(f"{where}: no column '{missing[0]}'; the columns are {', '.join(present)}")


def _parse(where: str, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error
    except (ValueError, RecursionError) as error:  # other encodings, numbers of thousands of digits, deep nesting
        raise UserError(f"{where}: not JSON in UTF-8 ({error})") from error


def _record(where: str, value: Any) -> DataRow:
    if not isinstance(value, dict):
        raise UserError(f"{where}: holds a {type(value).__name__}, not an object with fields")
    return value


def _reason(error: BaseException) -> str:
    """The library wraps what went wrong in an error that says only that something did."""
    cause = error.__cause__
    return first_line(error) if cause is None else f"{first_line(error)} ({first_line(cause)})"
