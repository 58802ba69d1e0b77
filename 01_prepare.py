#!/usr/bin/env python3
"""01: chats -> tokenized rows, rendered as the verifier's server would render them.

Reads   the recipe's data.sources, data.heldout and data.exclude: local files, folders, hub data sets
Writes  $RUN_DIR/01_prepare/{train,val,heldout}.jsonl, rejected.jsonl (id, place, reason) and stage.json
Needs   no server; the verifier only for its tokenizer (fetched here if it is not on this machine yet)

One row is one supervised assistant turn: prompt_ids are never trained on, response_ids always are;
response_ids null: the verifier answers in 03. The order is a weighted mixture of the sources and a function
of recipe and files alone, so a larger SAMPLES keeps the rows that a smaller one had.

    SAMPLES=1000 python 01_prepare.py --run-dir runs/try
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from eagle3 import chats, dedup, sources
from eagle3.cli import Stage, run_stage, stage_parser
from eagle3.config import Source
from eagle3.contract import SPLITS, ConfigError, StageError, fsync_dir, read_json, remove_temporaries
from eagle3.progress import Progress
from eagle3.record import StageRecord, digest, file_sha256, files_of
from eagle3.verifier import Verifier, open_verifier

log = logging.getLogger("eagle3")

FILES = (*SPLITS, "rejected")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "tokenization_*.py",
    "generation_config.json",
)


def parser():
    return stage_parser("01", __doc__)


def main(argv=None) -> int:
    return run_stage(parser(), "01", body, argv)


def body(stage: Stage) -> str:
    """Decide whether there is work, do it, record it."""
    data = stage.recipe.data
    places = sources.find_places(data.sources, "data.sources")
    heldout = sources.find_places(data.heldout, "data.heldout")
    exclude = sources.find_places([Source(path=p) for p in data.exclude], "data.exclude")
    verifier = open_verifier(stage.recipe, fetch=not stage.args.check)
    known = (read_json(stage.run.prepare / "stage.json") or {}).get("files") or {}
    identity = make_identity(stage, verifier, [*places, *heldout, *exclude], known)
    record = StageRecord(stage.run, "01", identity, stage.profile.name)
    if not record.path.exists():  # nothing partial is ever left here, so an unfinished run binds nobody
        (record.folder / "identity.json").unlink(missing_ok=True)
    if stage.args.check:
        record.refuse_other_identity()
        return "done" if enough(record.done(), data.samples, record) else "todo"
    old = record.begin(
        stage.args.force, lambda folder: files_of(folder, *(f"{name}.jsonl" for name in FILES))
    )
    if enough(old, data.samples, record):
        log.info("done already: %s", summary_line(old["counts"]))
        return "skipped"
    if old:
        log.info("growing from %d to %s training rows", old["samples"]["train"], data.samples)
    try:
        prepare(stage, verifier, places, heldout, exclude, record, old)
    except BaseException:
        clean_up(record)
        raise
    return "done"


def make_identity(stage: Stage, verifier: Verifier, places: list[sources.Place], known: dict) -> dict:
    """What makes the rows what they are: tokenizer, data settings, content of the files; not `samples`."""
    recipe = stage.recipe
    rules = {"sources", "heldout", "val_share", "max_prompt_tokens", "overlong", "near_duplicate"}
    data = recipe.data.model_dump(mode="json", include=rules)
    for source in (*data["sources"], *data["heldout"]):
        del source["path"]  # the content counts, not where it lies
    tokenizer = {p.name: file_sha256(p) for p in files_of(verifier.path, *TOKENIZER_FILES) if p.is_file()}
    return {
        "verifier": {"fingerprint": verifier.fingerprint, "tokenizer": digest(tokenizer)},
        "data": data,
        "answers": {"max_tokens": recipe.answers.max_tokens, "at_limit": recipe.answers.at_limit},
        "files": {place.label: place.identity(known) for place in places},
        "seed": recipe.seed,
    }


def enough(old: dict | None, samples: int | str, record: StageRecord) -> bool:
    """Whether the finished stage has the rows asked for.

    Raises:
        ConfigError: it has more; rows are never taken away.
    """
    if old is None:
        return False
    have, asked, exhausted = (old["samples"][key] for key in ("train", "asked", "exhausted"))
    if samples == asked or (exhausted and (samples == "all" or samples >= have)):
        return True
    if samples != "all" and samples < have:
        raise ConfigError(
            f"{record.folder} has {have} training rows and {samples} are asked for: choose another RUN_DIR, "
            "or make it anew with --force"
        )
    return False


def clean_up(record: StageRecord) -> None:
    """After a failure: no temporary files, no folder that holds nothing."""
    remove_temporaries(record.folder)
    if not record.path.exists():
        (record.folder / "identity.json").unlink(missing_ok=True)
        if record.folder.is_dir() and not any(record.folder.iterdir()):
            record.folder.rmdir()


# ---- one record -> rows ------------------------------------------------------------------------------------


class RowMaker:
    """Conversations -> rows.

    Args:
        stage: recipe with lengths and rules.
        renderer: the verifier's template and tokenizer.
    """

    def __init__(self, stage: Stage, renderer: chats.Renderer):
        self.data, self.answers, self.seed = stage.recipe.data, stage.recipe.answers, stage.recipe.seed
        self.renderer = renderer

    def rows(self, chat: chats.Chat, record: sources.Record, place: sources.Place) -> Iterator[dict | tuple]:
        """One row, or (row id, BadRow), per supervised turn."""
        source = place.source
        common = {"source": place.label, "domain": source.domain or chat.domain or Path(place.label).stem}
        if chat.prompt_ids is not None:
            turns = [None]
        else:
            turns = chats.supervised_turns(chat.messages, source.answers, source.turns, source.history)
        for turn in turns:
            row_id = record.where if turn is None else f"{record.where}#{turn}"
            try:
                made = self.ready_made(chat, source) if turn is None else self.row(chat, turn, row_id, source)
                yield {"id": row_id, **common, **made}
            except chats.BadRow as bad:
                yield row_id, bad

    def ready_made(self, chat: chats.Chat, source: Source) -> dict:
        """Token ids as they were given."""
        response = chat.response_ids if source.answers == "dataset" else None
        if source.answers == "dataset" and response is None:
            raise chats.BadRow("no answer in the row")
        self.renderer.check_ids(chat.prompt_ids, "prompt_ids")
        if response:
            self.renderer.check_ids(response, "response_ids")
        if len(chat.prompt_ids) > self.data.max_prompt_tokens:
            raise self.too_long(len(chat.prompt_ids))
        return {"prompt_ids": chat.prompt_ids, "response_ids": self.limited(response)}

    def row(self, chat: chats.Chat, turn: int, row_id: str, source: Source) -> dict:
        """Render one supervised turn; `overlong: cut` drops as many of the oldest exchanges as it takes."""
        messages, given = chat.messages[:turn], source.answers == "dataset"
        answer = chat.messages[turn] if given else None
        kwargs = self.template_kwargs(row_id, source, answer)
        while True:
            if given:
                prompt, response = self.renderer.answered(
                    [*messages, answer], len(messages), chat.tools, kwargs
                )
            else:
                prompt, response = self.renderer.prompt(messages, chat.tools, kwargs), None
            if len(prompt) <= self.data.max_prompt_tokens:
                break
            messages = chats.cut_oldest(messages) if self.data.overlong == "cut" else None
            if messages is None:
                raise self.too_long(len(prompt))
        made = {"prompt_ids": prompt, "response_ids": self.limited(response)}
        if not given and source.history == "own" and (own := chats.own_history(messages, chat.tools, kwargs)):
            made |= {"prompt_ids": chats.next_prompt(self.renderer, own, []), "history": own}
        return made

    def too_long(self, tokens: int) -> chats.BadRow:
        limit = f"prompt longer than data.max_prompt_tokens {self.data.max_prompt_tokens}"
        return chats.BadRow(limit, f"{tokens} tokens", fault=False)

    def limited(self, response: list[int] | None) -> list[int] | None:
        """A given answer above answers.max_tokens ends there, as an own one would (at_limit: keep)."""
        limit = self.answers.max_tokens
        if response is None or len(response) <= limit:
            return response
        if self.answers.at_limit == "drop":
            reason = f"answer longer than answers.max_tokens {limit}"
            raise chats.BadRow(reason, f"{len(response)} tokens", fault=False)
        return response[:limit]

    def template_kwargs(self, row_id: str, source: Source, answer: dict | None) -> dict:
        """Template variables of a row. A share of thinking rows is drawn by row id, so that it never changes;
        a given answer decides for itself: thinking is on if it has some."""
        kwargs = dict(source.chat_template_kwargs)
        if source.thinking is None:
            return kwargs
        if not any(name in self.renderer.template for name in chats.THINKING):
            raise ConfigError(
                f"data.sources: thinking is set, but the {self.renderer.name} knows none of "
                f"{', '.join(chats.THINKING)}"
            )
        if answer is not None:
            on = bool(answer.get("reasoning")) or bool(chats.INLINE_THINKING.match(answer["content"] or ""))
        else:
            on = share_of(f"{self.seed}:thinking:{row_id}") < source.thinking
        return {**kwargs, **dict.fromkeys(chats.THINKING, on)}


def share_of(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


# ---- the stage's work --------------------------------------------------------------------------------------


class Output:
    """The stage's files, all under temporary names until all are whole."""

    def __init__(self, folder: Path):
        self.folder, self.counts, self.hashes = folder, Counter(), {name: hashlib.sha256() for name in FILES}
        self.temporary = {name: folder / f".{name}.jsonl.{os.getpid()}.tmp" for name in FILES}

    def __enter__(self) -> Output:
        self.files = {name: open(path, "wb") for name, path in self.temporary.items()}
        return self

    def __exit__(self, *_exc) -> None:
        for name, file in self.files.items():
            file.close()
            self.temporary[name].unlink(missing_ok=True)

    def write(self, name: str, row: dict) -> None:
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        self.files[name].write(line)
        self.hashes[name].update(line)
        self.counts[name] += 1

    def publish(self, grown: bool) -> dict[str, dict]:
        """Give the files their names.

        Args:
            grown: the files that are there must be the beginning of the new ones.

        Returns:
            outputs for the record.

        Raises:
            ConfigError: an earlier row changed; nothing is replaced then.
        """
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        if grown:
            for split in SPLITS:
                if line := first_difference(self.folder / f"{split}.jsonl", self.temporary[split]):
                    raise ConfigError(
                        f"{self.folder}/{split}.jsonl:{line}: more samples would change this row (other "
                        "versions of code or libraries?): choose another RUN_DIR, or use --force"
                    )
        for name, path in self.temporary.items():
            os.replace(path, self.folder / f"{name}.jsonl")
        fsync_dir(self.folder)
        return {f"{n}.jsonl": {"count": self.counts[n], "sha256": self.hashes[n].hexdigest()} for n in FILES}


def first_difference(old: Path, new: Path) -> int | None:
    """Number of the first line of `old` that differs in `new`; None if `new` begins with all of `old`."""
    with open(old, "rb") as a, open(new, "rb") as b:
        return next((n for n, line in enumerate(a, 1) if line != b.readline()), None)


class Tally:
    """What was read, kept and rejected.

    Attributes:
        seen: records of training sources and held-out sets.
        faults: of these, data faults; duplicates, overlaps and over-long rows are counted, but are none.
        tokens: split -> [prompt tokens, given answer tokens].
    """

    def __init__(self, out: Output, allowed: float):
        self.out, self.allowed, self.seen, self.faults = out, allowed, 0, 0
        self.reasons, self.examples = Counter(), {}
        self.rows = {split: Counter() for split in SPLITS}
        self.tokens = {split: [0, 0] for split in SPLITS}
        self.all_turns, self.last_turns = 0, 0

    def keep(self, split: str, row: dict) -> None:
        self.out.write(split, row)
        self.rows[split][row["domain"]] += 1
        self.tokens[split][0] += len(row["prompt_ids"])
        self.tokens[split][1] += len(row["response_ids"] or ())

    def reject(self, row_id: str, where: str, bad: chats.BadRow) -> None:
        """Write one rejected row; every now and then see whether the file as a whole makes sense."""
        self.out.write(
            "rejected",
            {
                "id": row_id,
                "place": where,
                "reason": bad.reason,
                **({"detail": bad.detail} if bad.detail else {}),
            },
        )
        self.reasons[bad.reason] += 1
        self.examples.setdefault(bad.reason, f"{where}, {bad.detail}" if bad.detail else where)
        self.faults += bad.fault
        if self.faults % 10_000 == 9_999:
            self.check_share()

    def check_share(self) -> None:
        """Raises StageError if more records are faulty than data.max_rejected_share allows."""
        if self.faults > self.allowed * self.seen:
            raise StageError(
                f"{self.faults} of {self.seen} records are faulty, more than data.max_rejected_share "
                f"{self.allowed}: {self.why()}"
            )

    def why(self) -> str:
        """The most frequent reasons with a first example each."""
        top = self.reasons.most_common(5)
        return (
            "; ".join(f"{reason}: {n} (first: {self.examples[reason]})" for reason, n in top)
            or "none rejected"
        )

    def report(self) -> None:
        for split in SPLITS:
            prompt, answer = self.tokens[split]
            domains = ", ".join(f"{name} {n}" for name, n in sorted(self.rows[split].items()))
            given = f" + {answer:,} answer" if answer else ""
            total = self.rows[split].total()
            log.info(
                "%-8s %7d rows, %s prompt%s tokens: %s", split, total, f"{prompt:,}", given, domains or "-"
            )
        for reason, n in self.reasons.most_common():
            log.info("rejected %7d: %s (first: %s)", n, reason, self.examples[reason])
        if self.last_turns and self.all_turns > self.last_turns:
            log.info(
                "turns: all gives %.2f times the tokens of turns: last", self.all_turns / self.last_turns
            )


def prepare(stage: Stage, verifier: Verifier, places, heldout, exclude, record: StageRecord, old) -> None:
    """Everything from the first record to stage.json."""
    data, began = stage.recipe.data, time.time()
    renderer = chats.Renderer(load_tokenizer(verifier), verifier.path, verifier.vocab_size)
    maker = RowMaker(stage, renderer)
    evaluation = dedup.Evaluation(data.near_duplicate)
    for place in exclude:
        for raw, chat in sources.Reader(place):
            if isinstance(chat, chats.BadRow):
                raise StageError(f"{raw.where} of data.exclude: {chat.reason} ({chat.detail})")
            evaluation.add(raw.where, asked_of(chat, renderer, "user"))
    with Output(record.folder) as out:
        tally = Tally(out, data.max_rejected_share)
        take_heldout(heldout, maker, tally, evaluation)
        exhausted = take_training(places, maker, tally, evaluation, data)
        tally.check_share()
        trained = tally.rows["train"].total()
        if not trained:
            raise StageError(f"no training row is left of {tally.seen} records: {tally.why()}")
        outputs = out.publish(grown=old is not None)
    tally.report()
    if exhausted and data.samples != "all" and trained < data.samples:
        log.warning("the sources hold only %d of %d training rows", trained, data.samples)
    if tally.rows["val"].total() < 2:
        log.warning("fewer than 2 validation rows: the sources hold too few conversations")
    seconds = max(time.time() - began, 1e-6)
    rows, tokens = sum(out.counts[s] for s in SPLITS), sum(sum(pair) for pair in tally.tokens.values())
    files = [item for place in (*places, *heldout, *exclude) for item in place.files]
    record.finish(
        outputs,
        {"rows_per_s": round(rows / seconds, 1), "tokens_per_s": round(tokens / seconds)},
        samples={"asked": data.samples, "train": trained, "exhausted": exhausted},
        counts={split: dict(sorted(tally.rows[split].items())) for split in SPLITS},
        tokens={split: dict(zip(("prompt", "answer"), tally.tokens[split])) for split in SPLITS},
        records=tally.seen,
        rejected=dict(tally.reasons.most_common()),
        files={name: sources.stamp(path) for name, path in files},
    )


def load_tokenizer(verifier: Verifier):
    """The verifier's tokenizer; never asks on the terminal."""
    try:
        return verifier.tokenizer()
    except (ValueError, OSError, ImportError) as err:
        reason = " ".join(str(err).split())[:300]
        if "trust_remote_code" in reason and not verifier.trust_remote_code:
            raise ConfigError(
                f"{verifier.path} runs its own Python: set verifier.trust_remote_code: true in the recipe"
            ) from None
        raise StageError(f"tokenizer of {verifier.path} does not load: {reason}") from None


def asked_of(chat: chats.Chat, renderer: chats.Renderer, *roles: str) -> list[str]:
    """What a chat asks, turn by turn; ready-made ids as their text."""
    if chat.prompt_ids is not None:
        return [renderer.tokenizer.decode(chat.prompt_ids, skip_special_tokens=True)]
    return chat.words_of(*roles)


def rows_of(raw: sources.Record, chat, place: sources.Place, maker: RowMaker, tally: Tally) -> list[dict]:
    """Rows of one record; what can't be a row is rejected."""
    tally.seen += 1
    rows = []
    try:
        if isinstance(chat, chats.BadRow):
            raise chat
        for made in maker.rows(chat, raw, place):
            if isinstance(made, dict):
                rows.append(made)
            else:
                tally.reject(made[0], raw.where, made[1])
    except chats.BadRow as bad:
        tally.reject(raw.where, raw.where, bad)
    return rows


def take_heldout(heldout: list[sources.Place], maker: RowMaker, tally: Tally, evaluation) -> None:
    """All held-out rows, in order; their prompts are kept out of training."""
    same = dedup.Duplicates(threshold=1.0)
    for place in heldout:
        taken = 0
        for raw, chat in sources.Reader(place):
            if place.source.limit is not None and taken >= place.source.limit:
                break
            rows = rows_of(raw, chat, place, maker, tally)
            if not rows:
                continue
            asked = asked_of(chat, maker.renderer, "user", "tool")
            if found := same.find(
                raw.where, "\n".join(asked), "\n".join(chat.words_of("system", "developer"))
            ):
                tally.reject(raw.where, raw.where, chats.BadRow(*found, fault=False))
                continue
            evaluation.add(raw.where, asked_of(chat, maker.renderer, "user"))
            for row in rows:
                tally.keep("heldout", row)
                taken += 1
        if not taken:
            raise StageError(f"no held-out row is left of {place.label}: {tally.why()}")


def take_training(places, maker: RowMaker, tally: Tally, evaluation, data) -> bool:
    """Training and validation rows out of the mixture, until there are data.samples training rows.

    Which split a conversation belongs to depends on its id and on its place among the accepted ones, never on
    how many are taken: the 2nd and the 4th are validation, so that there are two, and of all others
    data.val_share.

    Returns:
        whether the sources are used up.
    """
    same, wanted = dedup.Duplicates(data.near_duplicate), math.inf if data.samples == "all" else data.samples
    size = sum(place.size for place in places)
    accepted, beyond = 0, 0
    total, unit = (size, "B") if data.samples == "all" else (data.samples, "row")
    with Progress(total, unit, "preparing") as progress:
        for reader, raw, chat in sources.mixture([sources.Reader(place) for place in places]):
            trained = tally.rows["train"].total()
            if trained >= wanted and tally.rows["val"].total() >= 2:
                return False
            if unit == "B":
                progress.update(raw.bytes, f"{trained} rows")
            rows = rows_of(raw, chat, reader.place, maker, tally)
            if not rows or not is_new(raw, chat, maker, tally, evaluation, same):
                continue
            accepted += 1
            drawn = share_of(f"{maker.seed}:split:{raw.where}") < data.val_share
            split = "val" if accepted in (2, 4) or drawn else "train"
            if reader.source.limit is not None:
                rows = rows[: reader.source.limit - reader.taken]
            for row in rows:
                reader.taken += 1
                if split == "train" and tally.rows["train"].total() >= wanted:
                    beyond += 1  # read only to find two validation rows; a larger SAMPLES takes it
                    continue
                tally.keep(split, row)
                if unit == "row" and split == "train":
                    progress.update()
            if reader.source.turns == "all":
                sizes = [len(row["prompt_ids"]) + len(row["response_ids"] or ()) for row in rows]
                tally.all_turns += sum(sizes)
                tally.last_turns += sizes[-1]
    return not beyond


def is_new(raw: sources.Record, chat: chats.Chat, maker: RowMaker, tally: Tally, evaluation, same) -> bool:
    """Whether a conversation is neither in an evaluation set nor known; else it is rejected as a whole."""
    asked = asked_of(chat, maker.renderer, "user", "tool")
    if name := evaluation.find(asked):
        bad = chats.BadRow("overlaps an evaluation set", f"with {name}", fault=False)
    elif found := same.find(raw.where, "\n".join(asked), "\n".join(chat.words_of("system", "developer"))):
        bad = chats.BadRow(found[0], f"of {found[1]}", fault=False)
    else:
        return True
    tally.reject(raw.where, raw.where, bad)
    return False


def summary_line(counts: dict) -> str:
    return ", ".join(f"{split} {sum(counts[split].values())} rows" for split in SPLITS)


if __name__ == "__main__":
    raise SystemExit(main())
