"""Records out of local files, folders and hub data sets, one at a time, each with the place it came from.

Local JSONL and JSON are read by our own reader: a loader that guesses column types from the first block of a
file stops when a field that was null for long becomes a string, and names no line when a file is broken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import chats
from eagle3.contract import ROOT, ConfigError, StageError
from eagle3.record import file_sha256

if TYPE_CHECKING:
    from eagle3.config import Source

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


@dataclass
class Record:
    """One raw row; `where` is "file:number": line of JSONL, element of JSON or row of parquet, from 1."""

    where: str
    value: Any
    bytes: int = 0  # of the input that were read for it, 0 where unknown


@dataclass
class Place:
    """A recipe source with its files found.

    Attributes:
        label: short name, unique within a run, without a folder of this machine; it begins every row id.
        files: (name, path), in reading order; empty for a hub data set.
    """

    label: str
    source: Source
    files: list[tuple[str, Path]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of input, 0 for a hub data set."""
        return sum(path.stat().st_size for _, path in self.files)

    def records(self) -> Iterator[Record]:
        """All rows in order.

        Raises:
            StageError: a file can't be read; file and line are named.
        """
        if self.source.hub:
            yield from read_hub(self.source, self.label)
        for name, path in self.files:
            yield from read_file(path, name)

    def identity(self, known: dict[str, dict]) -> dict[str, Any]:
        """What the rows are: content hashes of files, or hub id and revision.

        Args:
            known: name -> {"bytes", "mtime_ns", "sha256"} of an earlier run; a file whose size and time of
                change are still the same is not read again.
        """
        if self.source.hub:
            wanted = ("hub", "revision", "subset", "split")
            return {key: getattr(self.source, key) for key in wanted}
        return {name: stamp(path, known.get(name))["sha256"] for name, path in self.files}


def stamp(path: Path, known: dict | None = None) -> dict[str, Any]:
    """Size, time of change and sha256 of a file; the hash is taken from `known` if the other two agree."""
    stat = path.stat()
    now = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if known and all(known.get(k) == v for k, v in now.items()):
        return known
    return {**now, "sha256": file_sha256(path)}


def find_path(given: str, what: str) -> Path:
    """A path of the recipe: as given (from the working directory), else below the repository.

    Raises:
        ConfigError: not there; `what` names the setting.
    """
    path = Path(given).expanduser()
    for candidate in (path, ROOT / path):
        if candidate.exists():
            return candidate
    raise ConfigError(f"{what}: {given} is not there")


def find_places(sources: list[Source], what: str) -> list[Place]:
    """Find the files of every source before anything is read.

    Args:
        what: the recipe key, for messages ("data.sources").

    Raises:
        ConfigError: a path that is missing, of an unknown kind, or a folder without data files.
    """
    places, labels = [], set()
    for number, source in enumerate(sources):
        key = f"{what}[{number}]"
        if source.hub:
            place = Place(source.hub.rstrip("/").rpartition("/")[2], source)
        else:
            path = find_path(source.path, key)
            place = Place(path.name, source, files_of(path, key))
        base, copies = place.label, 1
        while place.label in labels:
            copies += 1
            place.label = f"{base}({copies})"
        labels.add(place.label)
        # Names of files begin with the label, so that two sources never make the same row id.
        place.files = [(place.label + name[len(base) :], path) for name, path in place.files]
        places.append(place)
    return places


def files_of(path: Path, what: str) -> list[tuple[str, Path]]:
    """The data files of a file or folder, sorted; each name starts with the last part of `path`."""
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise ConfigError(f"{what}: {path} is none of {', '.join(SUFFIXES)}")
        return [(path.name, path)]
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    found = [p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts)]
    if not found:
        raise ConfigError(f"{what}: folder {path} holds no {', '.join(SUFFIXES)}")
    return [(f"{path.name}/{p.relative_to(path).as_posix()}", p) for p in found]


def read_file(path: Path, name: str) -> Iterator[Record]:
    """Rows of one file by its suffix.

    Raises:
        StageError: unreadable or empty; names the file and, where there is one, the line.
    """
    reader = {".parquet": read_parquet, ".json": read_json_file}.get(path.suffix.lower(), read_lines)
    empty = True
    for record in reader(path, name):
        empty = False
        yield record
    if empty:
        raise StageError(f"{path}: no samples in it")


def read_lines(path: Path, name: str) -> Iterator[Record]:
    """JSON Lines: UTF-8 with or without byte-order mark, any line end and length; blank lines are skipped."""
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            text = decode(line, path, number)
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except ValueError as err:
                cut = not line.endswith(b"\n")
                what = "the last line is cut off" if cut else "not valid JSON"
                raise StageError(f"{path}:{number}: {what} ({err})") from None
            yield Record(f"{name}:{number}", value, len(line))


def decode(line: bytes, path: Path, number: int) -> str:
    """One line as text; the first may start with a byte-order mark."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as err:
        raise StageError(
            f"{path}:{number}: byte {line[err.start]:#04x} at column {err.start + 1} is not UTF-8; "
            "convert the file to UTF-8"
        ) from None
    return text.removeprefix("\ufeff") if number == 1 else text


def read_json_file(path: Path, name: str) -> Iterator[Record]:
    """A .json file: an array of rows, an object with one array under data, rows or train, or in truth JSON
    Lines.

    An array is read whole (a JSON parser's memory is about 5 times the file): use JSONL for large data.
    """
    with open(path, "rb") as f:
        head = f.read(1_000_000).removeprefix(b"\xef\xbb\xbf").lstrip()
    first, newline, rest = head.partition(b"\n")
    if first.startswith(b"{") and newline and rest.strip() and is_json(first):
        yield from read_lines(path, name)
        return
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
        if not text.strip():
            return
        value = json.loads(text)
    except UnicodeDecodeError as err:
        line = raw.count(b"\n", 0, err.start) + 1
        raise StageError(f"{path}:{line}: byte {raw[err.start]:#04x} is not UTF-8") from None
    except json.JSONDecodeError as err:
        raise StageError(f"{path}:{err.lineno}: not valid JSON ({err.msg})") from None
    if isinstance(value, dict):
        lists = [value[k] for k in ("data", "rows", "train") if isinstance(value.get(k), list)]
        value = lists[0] if len(lists) == 1 else [value]
    share = len(raw) // max(1, len(value))
    for number, item in enumerate(value, 1):
        yield Record(f"{name}:{number}", item, share)


def is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def read_parquet(path: Path, name: str) -> Iterator[Record]:
    """Parquet, a batch of rows at a time."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            share = path.stat().st_size // max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(f"{name}:{number}", value, share)
    except (pyarrow.ArrowException, OSError) as err:
        first = str(err).partition("\n")[0]
        raise StageError(f"{path}: not readable as parquet after row {number} ({first})") from None


def read_hub(source: Source, label: str) -> Iterator[Record]:
    """A data set of the hub: streamed, or from the local cache where HF_HUB_OFFLINE (or its twin) is set.

    `hub` may also be a folder: the datasets library loads both in the same way.

    Raises:
        StageError: it can't be had or read; id, revision and the library's reason are named.
    """
    import datasets

    what = f"hub data set {source.hub}" + (f" at {source.revision}" if source.revision else "")
    try:
        rows = datasets.load_dataset(
            source.hub,
            source.subset,
            split=source.split,
            revision=source.revision,
            streaming=not datasets.config.HF_HUB_OFFLINE,
        )
        number = 0
        for number, value in enumerate(rows, 1):
            yield Record(f"{label}:{number}", value)
    except Exception as err:  # the library's errors have no common class
        if isinstance(err, StageError):
            raise
        reason = " ".join(str(err).split())[:300]
        raise StageError(
            f"{what}: {type(err).__name__}: {reason}. Check id, subset, split and revision, give this "
            "machine access to the hub, or download it and set `path` instead of `hub`"
        ) from None
    if number == 0:
        raise StageError(f"{what}: no samples in it")


# ---- chats out of records, sources mixed -------------------------------------------------------------------


class Reader:
    """Records of one place as conversations.

    Attributes:
        taken: rows of the mixture that came from here.
    """

    def __init__(self, place: Place):
        self.place, self.source, self.taken = place, place.source, 0
        self.records = place.records()
        self.formats: dict[str, str] = {}

    def __iter__(self) -> Iterator[tuple[Record, chats.Chat | chats.BadRow]]:
        for record in self.records:
            fmt = self.format_of(record)
            try:
                yield record, chats.parse(record.value, fmt)
            except chats.BadRow as bad:
                yield record, bad

    def format_of(self, record: Record) -> str:
        """The source's format; with `auto` that of the first row of the file.

        Raises:
            StageError: the first row fits no format, or two.
        """
        if self.source.format != "auto":
            return self.source.format
        name = record.where.rpartition(":")[0]
        if name not in self.formats:
            try:
                self.formats[name] = chats.detect(record.value)
            except chats.BadRow as bad:
                raise StageError(
                    f"{record.where}: format unclear: {bad.reason} ({bad.detail}); set `format` of this "
                    "source to messages, sharegpt, prompt or tokens"
                ) from None
        return self.formats[name]


def mixture(readers: list[Reader]) -> Iterator[tuple[Reader, Record, chats.Chat | chats.BadRow]]:
    """Interleave the sources by weight: next comes the one that lags furthest behind its share of the rows
    taken.

    The caller counts rows in `reader.taken`; every choice depends on what was taken before, never on how many
    rows are wanted in the end. A source that is empty or at its limit leaves; the others keep their
    proportions.
    """
    live = {reader: iter(reader) for reader in readers}
    while live:
        weight = sum(reader.source.weight for reader in live)
        taken = sum(reader.taken for reader in live)
        reader = max(live, key=lambda r: r.source.weight / weight * (taken + 1) - r.taken)
        if reader.source.limit is not None and reader.taken >= reader.source.limit:
            del live[reader]
            continue
        before = reader.taken
        for record, chat in live[reader]:
            yield reader, record, chat
            if reader.taken > before:
                break
        else:
            del live[reader]
