"""Episodes and tasks in files: columns as arrays, the rest as JSON, nothing pickled. What comes back equals what went in."""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mcore_agent.state import write_atomic
from mcore_agent.types import TOKEN_COLUMNS, Episode, Feedback, RecordError, Row, Segment, Task, Turn

FORMAT = 1
PLAIN = (str, bool, int, float, type(None))


def pack(value: Any, where: str) -> Any:
    """A JSON form of nested lists, tuples, mappings with text keys, arrays and plain values. Raises RecordError for others."""
    if type(value) in PLAIN:
        return value
    if type(value) is list:
        return [pack(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if type(value) is tuple:
        return {"@": "tuple", "of": [pack(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        array = "array" if isinstance(value, np.ndarray) else "number"
        return {"@": array, "dtype": value.dtype.str, "shape": list(value.shape), "of": value.ravel().tolist()}
    if isinstance(value, Mapping) and all(type(k) is str for k in value) and "@" not in value:
        return {k: pack(v, f"{where}.{k}") for k, v in value.items()}
    raise RecordError(
        f"{where} is {type(value).__name__} {str(value)[:40]!r}, which has no form in a file; "
        "use text, numbers, lists, tuples, arrays and mappings with text keys"
    )


def unpack(value: Any) -> Any:
    """What ``pack`` was given; mappings come back as dictionaries."""
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "@" not in value:
        return {k: unpack(v) for k, v in value.items()}
    if value["@"] == "tuple":
        return tuple(unpack(v) for v in value["of"])
    array = np.array(value["of"], dtype=value["dtype"]).reshape(value["shape"])
    return array if value["@"] == "array" else array[()]


def task_record(task: Task) -> dict[str, Any]:
    """The fields of a task, to be packed."""
    return {name: getattr(task, name) for name in ("id", "domain", "messages", "spec", "gold", "relabelable", "meta")}


def task_from(packed: Mapping[str, Any]) -> Task:
    return Task(**unpack(packed))


def save_episodes(path: Path, episodes: Sequence[Episode]) -> None:
    """Writes one npz file, whole or not at all. Raises RecordError for values that have no form in a file, OSError."""
    rows = [row for e in episodes for row in e.rows]
    arrays: dict[str, np.ndarray] = {"length": np.array([len(row) for row in rows], dtype=np.int64)}
    for name, dtype in TOKEN_COLUMNS.items():
        arrays[name] = np.concatenate([np.zeros(0, dtype=dtype), *(getattr(row, name) for row in rows)])
    for i, row in enumerate(rows):
        arrays |= {f"channel/{i}/{name}": np.asarray(mask) for name, mask in row.channels.items()}
        if row.routing is not None:
            arrays[f"routing/{i}"] = row.routing
    text = json.dumps({"format": FORMAT, "episodes": [_record(e) for e in episodes]})
    arrays["json"] = np.frombuffer(text.encode(), dtype=np.uint8)
    data = io.BytesIO()
    np.savez(data, **arrays)  # type: ignore[arg-type]  # its second parameter is a flag
    write_atomic(path, data.getvalue())


def load_episodes(path: Path) -> list[Episode]:
    """Raises RecordError for a file that is no such file or is damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        tree = json.loads(arrays["json"].tobytes())
    except (zipfile.BadZipFile, EOFError, KeyError, ValueError) as e:
        raise RecordError(f"{path} holds no episodes that can be read ({e}); remove it, and its groups are played again") from e
    if tree["format"] != FORMAT:
        raise RecordError(f"{path} has format {tree['format']}, this version reads {FORMAT}; remove it, and its groups are played again")
    ends = np.cumsum(arrays["length"])
    columns = {name: np.split(arrays[name], ends[:-1]) for name in TOKEN_COLUMNS}
    episodes, r = [], 0
    for record in tree["episodes"]:
        rows = []
        for fields in record["rows"]:
            masks = {name: arrays[f"channel/{r}/{name}"] for name in fields["channels"]}
            segments = tuple(Segment(*s) for s in fields["segments"])
            routing = arrays[f"routing/{r}"] if fields["routing"] else None
            row: dict[str, Any] = {name: columns[name][r] for name in TOKEN_COLUMNS}
            rows.append(Row(**{**fields, **row, "segments": segments, "channels": masks, "routing": routing}))
            r += 1
        episodes.append(_episode(record, tuple(rows)))
    return episodes


def _record(e: Episode) -> dict[str, Any]:
    rows = [
        {
            "segments": [[s.start, s.end, s.turn, s.kind] for s in row.segments],
            "parent": row.parent,
            "prefix": row.prefix,
            "view": row.view,
            "channels": list(row.channels),
            "routing": row.routing is not None,
        }
        for row in e.rows
    ]
    plain = {name: getattr(e, name) for name in ("id", "group", "status", "reason", "branch", "seed")}
    return {
        **plain,
        "rows": rows,
        "task": pack(task_record(e.task), f"task {e.task.id}"),
        "turns": [pack(asdict(turn), f"turn {turn.index} of {e.id}") for turn in e.turns],
        "rewards": pack(e.rewards, f"rewards of {e.id}"),
    }


def _episode(record: Mapping[str, Any], rows: tuple[Row, ...]) -> Episode:
    turns = [unpack(turn) for turn in record["turns"]]
    made = {
        "rows": rows,
        "task": task_from(record["task"]),
        "turns": tuple(Turn(**{**turn, "feedback": Feedback(**turn["feedback"])}) for turn in turns),
        "rewards": unpack(record["rewards"]),
    }
    return Episode(**{**record, **made})
