"""Prompts that a draft is measured on: 01's held-out rows, or local files of well-known evaluation sets.

A set is `heldout`, a file, or a name: `gsm8k` is configs/data/gsm8k.jsonl. A row's layout is told by its
fields. Answers in the files are not used: the verifier answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from eagle3 import chats, sources
from eagle3.contract import ROOT, ConfigError, RunDir, StageError, read_jsonl
from eagle3.measure import balanced
from eagle3.record import file_sha256

HELDOUT = "heldout"


def _user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def _mt_bench(row: dict):
    # The second turn needs an answer to the first; measured on the first alone.
    return _user(row["turns"][0]), None, str(row.get("category") or "")


def _humaneval(row: dict):
    text = f"Complete this Python function. Answer with the whole function.\n\n```python\n{row['prompt']}```"
    return _user(text), None, ""


def _ceval(row: dict):
    options = "\n".join(f"{letter}. {row[letter]}" for letter in "ABCD")
    return _user(f"以下是单项选择题，请选出正确答案并说明理由。\n\n{row['question']}\n{options}"), None, ""


def _bfcl(row: dict):
    turns = row["question"][0] if isinstance(row["question"][0], list) else row["question"]
    functions = row["function"] if isinstance(row["function"], list) else [row["function"]]
    tools = [{"type": "function", "function": _json_schema(f)} for f in functions]
    return turns, tools, ""


def _json_schema(value):
    """BFCL writes Python's names of types; templates and servers want JSON schema's."""
    names = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
    if isinstance(value, list):
        return [_json_schema(v) for v in value]
    if not isinstance(value, dict):
        return value
    out = {k: _json_schema(v) for k, v in value.items()}
    if isinstance(out.get("type"), str):
        out["type"] = names.get(out["type"], out["type"])
    return out


# Layout -> (fields that tell it, row -> messages, tools, domain). The first that fits is taken.
LAYOUTS: dict[str, tuple[set[str], Callable]] = {
    "MT-Bench": ({"question_id", "turns"}, _mt_bench),
    "HumanEval": ({"task_id", "prompt", "entry_point"}, _humaneval),
    "C-Eval": ({"question", "A", "B", "C", "D"}, _ceval),
    "BFCL": ({"question", "function"}, _bfcl),
    "MATH500": (
        {"problem", "answer"},
        lambda row: (_user(row["problem"]), None, str(row.get("subject") or "")),
    ),
    "GSM8K": ({"question", "answer"}, lambda row: (_user(row["question"]), None, "")),
}
ACCEPTED = (
    "heldout, a name of configs/data/NAME.jsonl, or a .jsonl, .json or .parquet file in one of the layouts "
    + ", ".join(f"{name} ({', '.join(sorted(fields))})" for name, (fields, _) in LAYOUTS.items())
    + ", chats ({messages} or {conversations}), prompts ({prompt}), ids ({prompt_ids})"
)


def find_set(name: str, run: RunDir) -> Path:
    """The file of a set.

    Raises:
        StageError: 01's held-out rows are missing.
        ConfigError: no such file; what is accepted is listed.
    """
    if name == HELDOUT:
        path = run.rows(HELDOUT)
        if not path.is_file():
            raise StageError(f"{path} is not there: run 01_prepare.py")
        return path
    given = Path(name).expanduser()
    for path in (given, ROOT / given, ROOT / "configs" / "data" / f"{name}.jsonl"):
        if path.is_file():
            return path
    raise ConfigError(f"evaluate.sets: no file {name!r}. Accepted: {ACCEPTED}")


def set_digests(names: list[str], run: RunDir) -> dict[str, str]:
    """sha256 of every set's file, for the identity of 06; a file's folder is no part of its name.

    Raises:
        ConfigError: a missing file, or two sets of one name.
    """
    found = {Path(name).stem: file_sha256(find_set(name, run)) for name in names}
    if len(found) < len(names):
        raise ConfigError(f"evaluate.sets: two of {', '.join(names)} have the same name")
    return found


def load_sets(
    names: list[str],
    run: RunDir,
    verifier,
    limit: int | None,
    max_tokens: int,
    max_len: int,
    stored: dict[str, list[int]],
) -> tuple[list[dict], dict[str, int]]:
    """Tokenized prompts of all sets.

    Args:
        verifier: an open verifier; its tokenizer is loaded only for sets that are not tokenized yet.
        max_tokens, max_len: of an answer, and of a whole request; a prompt that leaves no room is skipped.
        limit: prompts taken of each set, from its domains in turn.
        stored: prompt ids that 03 asked, by id: held-out rows whose history the verifier wrote need them.

    Returns:
        rows {"id", "set", "domain", "prompt_ids"}, and how many were skipped, by reason.

    Raises:
        StageError: an unreadable file (with its line), or no prompt left.
        ConfigError: a row in no known layout.
    """
    rows, skipped, renderer = [], Counter(), None
    for name in names:
        path = find_set(name, run)
        if name == HELDOUT:
            found = _heldout(path, stored, skipped)
        else:
            renderer = renderer or chats.Renderer(verifier.tokenizer(), verifier.path, verifier.vocab_size)
            found = _foreign(path, renderer, skipped)
        fitting = []
        for row in found:
            if len(names) > 1:
                row["domain"] = f"{row['set']}/{row['domain']}" if row["domain"] != row["set"] else row["set"]
                row["id"] = f"{row['set']}/{row['id']}"
            if len(row["prompt_ids"]) + max_tokens > max_len:
                skipped[f"prompt + {max_tokens} tokens exceed max_model_len {max_len}"] += 1
            else:
                fitting.append(row)
        rows += balanced(fitting, limit)
    if not rows:
        why = ", ".join(f"{n} x {reason}" for reason, n in skipped.items()) or "the files are empty"
        raise StageError(f"no prompt to measure in {', '.join(names)}: {why}")
    return rows, dict(skipped)


def _heldout(path: Path, stored: dict[str, list[int]], skipped: Counter):
    for row in read_jsonl(path):
        prompt = row["prompt_ids"]
        if row.get("history"):
            prompt = stored.get(row["id"])
        if prompt is None:
            skipped["history was never answered in 03"] += 1
            continue
        yield {"id": row["id"], "set": HELDOUT, "domain": row.get("domain") or HELDOUT, "prompt_ids": prompt}


def _foreign(path: Path, renderer, skipped: Counter):
    name = path.stem
    for number, record in enumerate(sources.read_file(path, path.name)):
        try:
            messages, tools, domain, prompt = _read(record.value)
            if prompt is None:
                prompt = renderer.prompt([chats.message(m) for m in messages], tools, {})
            renderer.check_ids(prompt, "prompt ids")
        except chats.BadRow as err:
            if number == 0:
                raise ConfigError(f"{record.where}: {err} {err.detail}. Accepted: {ACCEPTED}") from None
            skipped[err.reason] += 1
            continue
        yield {"id": str(number), "set": name, "domain": domain or name, "prompt_ids": prompt}


def _read(value) -> tuple[list[dict], list[dict] | None, str, list[int] | None]:
    """One raw row as (messages, tools, domain, ready-made prompt ids)."""
    if isinstance(value, dict):
        has = {k for k, v in value.items() if v is not None}
        for fields, convert in LAYOUTS.values():
            if fields <= has:
                return *convert(value), None
    chat = chats.parse(value, chats.detect(value))
    messages = chat.messages
    while messages and messages[-1]["role"] == "assistant":  # its answer; the verifier gives its own
        messages = messages[:-1]
    return messages, chat.tools, chat.domain or "", chat.prompt_ids
