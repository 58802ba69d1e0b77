"""eagle3.sources and eagle3.dedup: files of every kind, and what counts as the same prompt."""

from __future__ import annotations

import json
import random

import pytest

from eagle3 import dedup, sources
from eagle3.config import Source
from eagle3.contract import ConfigError, StageError

ROWS = [{"prompt": f"question {i}", "note": None} for i in range(5)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


def values(path) -> list:
    return [record.value for record in sources.read_file(path, path.name)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plain.jsonl", JSONL),
        ("bom.jsonl", "\ufeff" + JSONL),
        ("crlf.jsonl", JSONL.replace("\n", "\r\n")),
        ("blank.jsonl", JSONL.replace("\n", "\n\n")),
        ("no-newline.jsonl", JSONL.rstrip()),
        ("array.json", json.dumps(ROWS, indent=1)),
        ("bom.json", "\ufeff" + json.dumps(ROWS)),
        ("wrapped.json", json.dumps({"data": ROWS})),
        ("lines.json", JSONL),
    ],
)
def test_files_of_every_kind(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    assert values(tmp_path / name) == ROWS


def test_places_are_named_by_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text(JSONL.replace("\n", "\n\n"))
    assert [r.where for r in sources.read_file(tmp_path / "a.jsonl", "a.jsonl")][1] == "a.jsonl:3"


def test_a_very_long_line(tmp_path):
    """Fault 10: 30 MB in one line."""
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 30_000_000}) + "\n" + JSONL)
    assert [len(v["prompt"]) for v in values(tmp_path / "long.jsonl")] == [30_000_000] + [10] * 5


def test_a_field_that_was_null_for_long(tmp_path):
    """Fault 9: 25 MB of null before the first string."""
    row = json.dumps({"prompt": "x" * 10_000, "note": None}) + "\n"
    (tmp_path / "a.jsonl").write_text(row * 2_500 + json.dumps({"prompt": "last", "note": "a string"}) + "\n")
    assert values(tmp_path / "a.jsonl")[-1] == {"prompt": "last", "note": "a string"}


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.json", b'[{"prompt": "x"},\n{"prompt": ]', r"a\.json:2: not valid JSON"),
        ("a.json", b'[{"prompt": "x"},\n{"prompt": "caf\xe9"}]', r"a\.json:2: byte 0xe9"),
        ("a.parquet", b"PAR1 not really", r"a\.parquet: not readable as parquet"),
        ("a.jsonl", b"\n\n", r"a\.jsonl: no samples in it"),
        ("a.json", b"[]", r"a\.json: no samples in it"),
    ],
)
def test_broken_files(tmp_path, name, content, wanted):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StageError, match=wanted):
        values(tmp_path / name)


@pytest.fixture
def folder(tmp_path):
    """A folder with a JSONL and a parquet file of chats, and things that are no data."""
    import pyarrow
    import pyarrow.parquet

    root = tmp_path / "chats"
    (root / "sub").mkdir(parents=True)
    (root / "b.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "one"}]}) + "\n")
    (root / "README.md").write_text("not data")
    (root / "sub" / ".hidden.jsonl").write_text("{")
    rows = [{"messages": [{"role": "user", "content": c, "name": None}]} for c in ("two", "three")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / "sub" / "a.parquet")
    return root


def test_folders(folder):
    (place,) = sources.find_places([Source(path=str(folder))], "data.sources")
    got = [(where.where, chat.messages) for where, chat in sources.Reader(place)]
    assert got == [
        (f"chats/{name}", [{"role": "user", "content": text}])
        for name, text in (("b.jsonl:1", "one"), ("sub/a.parquet:1", "two"), ("sub/a.parquet:2", "three"))
    ]
    assert place.identity({}).keys() == {"chats/b.jsonl", "chats/sub/a.parquet"}


def test_hub_data_sets_are_read_by_the_datasets_library(folder, monkeypatch):
    """The path of hub ids, tried on a local folder, which the library loads in the same way."""
    import datasets

    place = sources.Place("chats", Source(hub=str(folder / "sub"), revision="main"))
    for offline in (False, True):
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
        got = [(raw.where, chat.messages[0]["content"]) for raw, chat in sources.Reader(place)]
        assert got == [("chats:1", "two"), ("chats:2", "three")]
    assert place.identity({}) == {
        "hub": str(folder / "sub"),
        "revision": "main",
        "subset": None,
        "split": "train",
    }


def test_a_hub_data_set_that_is_not_there(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(StageError, match=r"hub data set nobody/nothing at v1: .*set `path` instead"):
        next(sources.read_hub(Source(hub="nobody/nothing", revision="v1"), "nothing"))


def test_labels_are_unique(tmp_path):
    for sub in ("x", "y"):
        (tmp_path / sub).mkdir()
        (tmp_path / sub / "a.jsonl").write_text(JSONL)
    places = sources.find_places(
        [Source(path=str(tmp_path / s / "a.jsonl")) for s in ("x", "y")], "data.sources"
    )
    assert [p.label for p in places] == ["a.jsonl", "a.jsonl(2)"]
    assert [next(p.records()).where for p in places] == ["a.jsonl:1", "a.jsonl(2):1"]
    with pytest.raises(ConfigError, match="none of .jsonl"):
        (tmp_path / "a.txt").write_text("x")
        sources.find_places([Source(path=str(tmp_path / "a.txt"))], "data.sources")


def test_a_file_is_hashed_again_only_if_it_changed(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text(JSONL)
    known = sources.stamp(file)
    monkeypatch.setattr(sources, "file_sha256", lambda path: "read again")
    assert sources.stamp(file, known) == known
    file.write_text(JSONL + JSONL)
    assert sources.stamp(file, known)["sha256"] == "read again"


# ---- the same prompt ---------------------------------------------------------------------------------------


def with_changes(words: list[str], number: int) -> str:
    out = list(words)
    for i in random.Random(number).sample(range(1, len(out) - 1), number):
        out[i] = f"other{i}"
    return " ".join(out)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.85, 0.95])
def test_near_duplicates_follow_the_similarity(threshold):
    """Every pair at or above the threshold is found, none below it: the real Jaccard similarity decides."""
    rng = random.Random(0)
    vocabulary = [f"word{i}" for i in range(3000)]
    wrong = found = 0
    for case in range(40):
        base = rng.choices(vocabulary, k=150)
        for changes in (1, 2, 4, 8, 16, 30):
            known = dedup.Duplicates(threshold)
            assert known.find("base", " ".join(base)) is None
            other = with_changes(base, changes)
            a, b = dedup.shingles(base), dedup.shingles(other.split())
            same = len(a & b) / len(a | b) >= threshold
            found += same
            wrong += (known.find(f"{case}", other) == ("near-duplicate", "base")) != same
    assert found >= 40 and wrong <= 0.02 * found


def test_chinese_counts_by_character():
    known = dedup.Duplicates(0.8)
    text = "请用简单的语言解释为什么天空在白天是蓝色的而在傍晚变成红色和橙色"
    assert known.find("a", text) is None
    assert known.find("b", text.replace("橙色", "黄色") + "吗？") == ("near-duplicate", "a")
    assert known.find("c", "请用简单的语言解释为什么海水是咸的而河水和湖水几乎没有任何味道") is None


def test_short_prompts_are_the_same_only_if_equal():
    known = dedup.Duplicates(0.5)
    assert known.find("a", "What is 3 + 4?") is None
    assert known.find("b", "What is 3 - 4?") is None
    assert known.find("c", "what is  3 + 4") == ("duplicate", "a")
    assert known.find("d", "Hello!", "You are a pirate.") is None
    assert known.find("e", "Hello!", "You are a tutor.") is None
    assert known.find("f", "hello", "You are a pirate") == ("duplicate", "d")
