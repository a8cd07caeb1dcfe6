"""What a record of an acceptance says is at fault. Paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dayzero.acceptance.accept.digest import verify_digest
from dayzero.acceptance.accept.record import RECORD, findings_of, read_record
from dayzero.acceptance.doctor.diagnosis import Diagnosis, Placed, Target, diagnose
from dayzero.errors import UsageError

CHANGED = "the record was changed after it was written (its digest does not fit): what it says is no evidence"


def is_record(where: Path) -> bool:
    """A folder that holds one, or a file of that name. Another ``.json`` file is a config, hence a source."""
    return (where / RECORD).is_file() or (where.name == RECORD and not where.is_dir())


def diagnose_record(where: Path) -> Diagnosis:
    """The record at ``where``, a folder or a file. UsageError when it is none."""
    return diagnosis_of(read_record(where), str(where))


def diagnosis_of(record: Mapping[str, Any], where: str) -> Diagnosis:
    """As ``diagnose_record``, of one that was read. UsageError when its stages are not as a record's are."""
    try:
        placed = [
            Placed(str(stage["name"]), finding)
            for stage in record["stages"]
            for finding in findings_of(stage["findings"])
        ]
        subject = record["subject"]
        source, url, recipe = (subject.get(key) for key in ("source", "url", "recipe"))
        warnings = [] if _sound(record) else [CHANGED]
        target = Target(where, *(str(one) if one else None for one in (source, url, recipe)))
        facts = {"profile": record["profile"], "stages": [stage["name"] for stage in record["stages"]]}
        return diagnose(target, placed, warnings, facts)
    except (KeyError, TypeError, AttributeError, AssertionError) as error:
        raise UsageError(
            f"{where}: its stages are not as an acceptance writes them ({error!r}); accept anew."
        ) from error


def _sound(record: Mapping[str, Any]) -> bool:
    try:
        return verify_digest(record)
    except (RecursionError, ValueError):
        return False
