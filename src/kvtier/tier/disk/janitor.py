"""Keeps a shared root within bounds: by age, by size, the least worth first; and sweeps up after writers that died.

Safe beside running engines and other janitors, without a lock between them: a file is removed by its name alone, readers that have it open keep it, others find a
miss; names that are gone already are nobody's error; what is younger than `grace_s` is never touched, so that a record being stored is not taken apart. Several
janitors at once rank records alike and so remove the same ones.

What belongs together goes together: the parts of one key on all ranks, its commit marker first, so that nobody is told that a record is there of which a part
is gone. A record's time of use is its newest part's mtime, which readers renew about hourly. Its value, seconds of recompute for each byte, is an extended
attribute that the writer left where the filesystem keeps such; records without one count as worth `default_value`. With equal values the longest unused go first:
what is ranked is value divided by the time since the last use.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from kvtier.errors import StoreUnavailableError
from kvtier.tier.disk.shared_layout import COMMITTED, RANK_NAME, TEMPORARY_NAME, is_part


@dataclass(frozen=True, slots=True)
class JanitorRules:
    """What is too much.

    Attributes:
        bytes_max: total of the parts' files below the root, None for no bound.
        age_max_s: time since the last use, None for no bound.
        orphan_age_s: temporary files older than this belong to a dead writer.
        grace_s: younger files are left alone.
        low_water: a sweep by size goes down to this fraction of `bytes_max`.
        default_value: worth of a record whose writer left none, in seconds for each byte.
    """

    bytes_max: int | None = None
    age_max_s: float | None = None
    orphan_age_s: float = 3600.0
    grace_s: float = 60.0
    low_water: float = 0.95
    default_value: float = 1e-9


@dataclass(slots=True)
class JanitorReport:
    """What a sweep found and did. Bytes are file lengths."""

    records: int = 0
    files: int = 0
    bytes_found: int = 0
    orphans_removed: int = 0
    records_removed_by_age: int = 0
    records_removed_by_size: int = 0
    bytes_removed: int = 0
    bytes_left: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Record:
    """One key of one model and generation, over all ranks."""

    name: str
    size_bytes: int = 0
    used_s: float = 0.0
    newest_s: float = 0.0
    value: float = 0.0
    files: list[str] = field(default_factory=list)
    markers: list[str] = field(default_factory=list)


def sweep(
    root: Path,
    rules: JanitorRules,
    *,
    now_s: float,
    dry_run: bool = False,
    value_of: Callable[[str], float] | None = None,
) -> JanitorReport:
    """One sweep over everything below `root`.

    Args:
        root: the shared directory.
        rules: the bounds.
        now_s: the time, in seconds since the epoch as file times are.
        dry_run: report, and remove nothing.
        value_of: a file's worth in seconds for each byte, 0 where unknown; by default its extended attribute.

    Raises:
        StoreUnavailableError: `root` is not a directory that can be listed.
    """
    if not root.is_dir():
        raise StoreUnavailableError(
            f"{root} {'is not a directory' if root.exists() else 'does not exist'}: name the shared root"
        )
    report = JanitorReport()
    records: dict[str, _Record] = {}
    for folder, file in _walk(str(root), report):
        try:
            status = file.stat(follow_symlinks=False)
        except OSError:
            continue  # another janitor, or its writer, was faster
        if TEMPORARY_NAME.fullmatch(file.name):
            if _layout_place(folder) >= 0 and now_s - status.st_mtime > rules.orphan_age_s:
                report.orphans_removed += _remove(file.path, report, dry_run=dry_run)
        elif is_part(folder, file.name) and _layout_place(folder) >= 0:
            report.files += 1
            _add(records, folder, file, status, value_of or _value_attribute)
    report.records = len(records)
    report.bytes_found = sum(record.size_bytes for record in records.values())
    _remove_too_many(list(records.values()), rules, report, now_s, dry_run=dry_run)
    report.bytes_left = report.bytes_found - report.bytes_removed
    return report


def _walk(folder: str, report: JanitorReport) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All files below `folder`, with the directory each is in. Directories that vanish or refuse are passed over."""
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except FileNotFoundError:
        return
    except OSError as exception:
        report.errors.append(f"{folder}: {exception.strerror}")
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, report)
        elif entry.is_file(follow_symlinks=False):
            yield folder, entry


@lru_cache(1)
def _layout_place(folder: str) -> int:
    """Which piece of a directory's path is a rank's directory, or the markers'; -1 for what is not of the layout, and so not ours to touch."""
    pieces = folder.split("/")
    for place in range(len(pieces) - 1, -1, -1):
        if pieces[place] == COMMITTED or RANK_NAME.fullmatch(pieces[place]):
            return place
    return -1


def _add(
    records: dict[str, _Record],
    folder: str,
    file: os.DirEntry[str],
    status: os.stat_result,
    value_of: Callable[[str], float],
) -> None:
    """Count a file with its record: the same name below any rank, or the markers' directory, of one model."""
    pieces, place = folder.split("/"), _layout_place(folder)
    is_marker = pieces[place] == COMMITTED
    pieces[place] = "*"
    name = "/".join((*pieces, file.name))
    record = records.setdefault(name, _Record(name))
    if is_marker:
        record.markers.append(file.path)
        record.newest_s = max(record.newest_s, status.st_mtime)
        return
    record.files.append(file.path)
    record.size_bytes += status.st_size
    record.used_s = max(record.used_s, status.st_mtime)
    record.newest_s = max(record.newest_s, status.st_mtime)
    record.value = max(record.value, value_of(file.path))


def _value_attribute(path: str) -> float:
    try:
        return float(os.getxattr(path, b"user.kvtier.value"))
    except (OSError, ValueError):
        return 0.0


def _remove_too_many(
    records: list[_Record], rules: JanitorRules, report: JanitorReport, now_s: float, *, dry_run: bool
) -> None:
    kept: list[tuple[float, str, _Record]] = []
    for record in records:
        if now_s - record.newest_s < rules.grace_s:
            continue
        if rules.age_max_s is not None and now_s - record.used_s > rules.age_max_s:
            report.records_removed_by_age += _remove_record(record, report, dry_run=dry_run)
            continue
        worth = (record.value or rules.default_value) / max(now_s - record.used_s, 1.0)
        kept.append((worth, record.name, record))
    if rules.bytes_max is None or report.bytes_found - report.bytes_removed <= rules.bytes_max:
        return
    target = int(rules.bytes_max * rules.low_water)
    for _, _, record in sorted(kept, key=lambda item: item[:2]):
        if report.bytes_found - report.bytes_removed <= target:
            return
        report.records_removed_by_size += _remove_record(record, report, dry_run=dry_run)


def _remove_record(record: _Record, report: JanitorReport, *, dry_run: bool) -> bool:
    """Marker first, then the parts."""
    gone = 0
    for path in (*record.markers, *record.files):
        gone += _remove(path, report, dry_run=dry_run)
    if gone < len(record.markers) + len(record.files):
        return False
    report.bytes_removed += record.size_bytes
    return True


def _remove(path: str, report: JanitorReport, *, dry_run: bool) -> bool:
    if dry_run:
        return True
    try:
        os.unlink(path)  # noqa: PTH108 - a path from scandir
    except FileNotFoundError:
        return True
    except OSError as exception:
        report.errors.append(f"{path}: {exception.strerror}")
        return False
    _remove_empty(Path(path).parent)
    return True


def _remove_empty(folder: Path) -> None:
    """Take away a later generation's directories with their last file, or each reset would leave a million. Generation 0 is py-kvcache's place, too: its stay."""
    if not any(name.startswith("generation_") for name in folder.parts):
        return
    with contextlib.suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()
