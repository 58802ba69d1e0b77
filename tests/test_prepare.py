"""01_prepare by its command line: rows, splits, growth, refusals, and what bad input gets."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter

import pytest
import yaml
from conftest import ROOT, load_stage

WORDS = [f"w{i}" for i in range(58)]
END = 5  # id of <end> in the toy vocabulary
stage01 = load_stage("01_prepare.py")


def chat(*texts: str, **more) -> dict:
    """A chat whose turns are user and assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)], **more}


def turns(*items: str) -> list[dict]:
    """Turns written as "role text"."""
    return [dict(zip(("role", "content"), item.split(" ", 1))) for item in items]


def text(number: int, words: int = 10) -> str:
    """Words that differ from number to number."""
    return " ".join(random.Random(number).choices(WORDS[:50], k=words))


def lines(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Prepare:
    """One run directory and a recipe for it."""

    def __init__(self, folder, verifier, capsys):
        self.folder, self.capsys = folder, capsys
        self.run, self.out = folder / "run", folder / "run" / "01_prepare"
        self.recipe = {
            "verifier": {"model": str(verifier), "max_model_len": 256},
            "draft": {
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "intermediate_size": 64,
                "rms_norm_eps": 1e-6,
                "vocab_size": 16,
            },  # fmt: skip
            "data": {"sources": [], "max_prompt_tokens": 64},
            "answers": {"max_tokens": 32},
            "train": {"tokens_per_step": 64, "epochs": 1, "lr": 1e-3},
            "evaluate": {"max_tokens": 16},
        }

    def sources(self, *items: dict) -> None:
        self.recipe["data"]["sources"] = list(items)

    def __call__(self, *args: str) -> int:
        file = self.folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(self.recipe), encoding="utf-8")
        self.capsys.readouterr()
        code = stage01.main(["--recipe", str(file), "--run-dir", str(self.run), *args])
        self.said = self.capsys.readouterr().err
        return code

    def rows(self, split: str = "train") -> list[dict]:
        return read(self.out / f"{split}.jsonl")

    def all_rows(self) -> dict[str, dict]:
        """Training and validation rows by id."""
        return {row["id"]: row for split in ("train", "val") for row in self.rows(split)}

    def reasons(self) -> Counter:
        return Counter(row["reason"] for row in self.rows("rejected"))

    @property
    def record(self) -> dict:
        return json.loads((self.out / "stage.json").read_text())


@pytest.fixture(autouse=True)
def clean_process(monkeypatch):
    """Stages set signal handlers and read variables; neither may leak."""
    for name in ("RECIPE", "RECIPE_SET", "RUN_DIR", "SAMPLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PROFILE", "cpu-smoke")
    before = {s: signal.getsignal(s) for s in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def prepare(tmp_path, toy_verifier, capsys) -> Prepare:
    return Prepare(tmp_path, toy_verifier, capsys)


@pytest.fixture
def many(prepare, tmp_path) -> Prepare:
    """200 chats of one turn each."""
    rows = [chat(text(i), text(i + 1)) for i in range(200)]
    prepare.sources({"path": lines(tmp_path / "many.jsonl", rows)})
    return prepare


# ---- rows --------------------------------------------------------------------------------------------------


def test_own_answers_are_left_to_the_verifier(prepare, tmp_path):
    rows = [chat("w1 w2", "w3", domain="maths"), chat("w4"), chat("w5 w6", "w7", "w8", "w9")]
    prepare.sources({"path": lines(tmp_path / "a.jsonl", rows)})
    assert prepare() == 0, prepare.said
    got = prepare.all_rows()
    assert list(got["a.jsonl:1#1"]) == ["id", "source", "domain", "prompt_ids", "response_ids"]
    assert (got["a.jsonl:1#1"]["domain"], got["a.jsonl:2#1"]["domain"]) == ("maths", "a")
    assert all(row["response_ids"] is None for row in got.values())
    # <user> w1 w2 <end> <assistant>; the answer that the data set has is not in the prompt, earlier ones are.
    assert got["a.jsonl:1#1"]["prompt_ids"] == [1, 7, 8, END, 2]
    assert got["a.jsonl:3#3"]["prompt_ids"] == [1, 11, 12, END, 2, 13, END, 1, 14, END, 2]


def test_given_answers_are_exactly_the_assistant_tokens(prepare, tmp_path):
    """Fault 1: a template without generation markers; never all, never nothing."""
    rows = [chat(f"w{i} w1", "w2 w3", "w4", f"w{i + 10} w5") for i in range(3)]
    prepare.sources({"path": lines(tmp_path / "a.jsonl", rows), "answers": "dataset"})
    assert prepare() == 0, prepare.said
    got = prepare.all_rows()
    assert len(got) == 3
    for i in range(3):
        row = got[f"a.jsonl:{i + 1}#3"]
        assert row["response_ids"] == [6 + i + 10, 11, END]
        assert row["prompt_ids"] == [1, 6 + i, 7, END, 2, 8, 9, END, 1, 10, END, 2]


def test_every_turn_is_a_row_and_the_factor_is_printed(prepare, tmp_path):
    rows = [chat(f"w{i}", "w2 w3", f"w{i + 1}", "w5", f"w{i + 2}") for i in range(3)]
    prepare.sources({"path": lines(tmp_path / "a.jsonl", rows), "answers": "dataset", "turns": "all"})
    assert prepare() == 0, prepare.said
    got = prepare.all_rows()
    assert sorted(got) == sorted(f"a.jsonl:{n}#{t}" for n in (1, 2, 3) for t in (1, 3))
    tokens = {
        t: len(got[f"a.jsonl:1#{t}"]["prompt_ids"] + got[f"a.jsonl:1#{t}"]["response_ids"]) for t in (1, 3)
    }
    assert f"{(tokens[1] + tokens[3]) / tokens[3]:.2f} times the tokens" in prepare.said


def test_opening_assistant_turn_and_trailing_blanks(prepare, tmp_path):
    """Fault 2: the opening turn is context, and nothing of the next user turn is in the answer."""
    opening = {"messages": [{"role": "assistant", "content": "w1"}, *chat("w2", "w3 \n \n ")["messages"]]}
    rows = [opening, chat("w4", "w5 \n\n  ", "w6", "w7")]
    prepare.sources({"path": lines(tmp_path / "a.jsonl", rows), "answers": "dataset", "turns": "all"})
    assert prepare() == 0, prepare.said
    got = prepare.all_rows()
    assert got.keys() == {"a.jsonl:1#2", "a.jsonl:2#1", "a.jsonl:2#3"}
    assert got["a.jsonl:1#2"]["prompt_ids"] == [2, 7, END, 1, 8, END, 2]
    assert got["a.jsonl:1#2"]["response_ids"] == [9, END]
    assert got["a.jsonl:2#1"]["response_ids"] == [11, END]


def test_ready_made_ids_must_be_in_the_vocabulary(prepare, tmp_path):
    """Fault 31: an id at or above the vocabulary, -1, and what is no id at all."""
    good = [{"prompt_ids": [1, 7, i, 5, 2], "response_ids": [9, END]} for i in range(10, 16)]
    bad = [
        {"prompt_ids": [1, 64], "response_ids": [9, END]},
        {"prompt_ids": [1, 2], "response_ids": [-1, END]},
        {"prompt_ids": [1, 2.5], "response_ids": [9]},
        {"prompt_ids": [], "response_ids": [9]},
        {"prompt_ids": [1, True], "response_ids": [9]},
    ]
    prepare.sources({"path": lines(tmp_path / "ids.jsonl", good + bad), "answers": "dataset"})
    assert prepare() == 0, prepare.said
    assert len(prepare.all_rows()) == 6
    rejected = {row["id"]: row for row in prepare.rows("rejected")}
    assert rejected["ids.jsonl:7"]["detail"] == "id 64, vocabulary 64"
    assert rejected["ids.jsonl:8"]["detail"] == "id -1, vocabulary 64"
    assert [rejected[f"ids.jsonl:{n}"]["reason"] for n in (9, 10, 11)] == [
        "prompt_ids is not a list of integers"
    ] * 3


# ---- lengths -----------------------------------------------------------------------------------------------


def test_prompts_that_leave_no_room_are_dropped_and_counted(prepare, tmp_path):
    """Fault 3: never a row without its answer."""
    long = [chat(f"w{i} " + text(i, 200), "w1 w2 w3 w4") for i in range(4)]
    short = [chat(text(i), "w1 w2 w3 w4") for i in range(4)]
    prepare.sources({"path": lines(tmp_path / "mixed.jsonl", long + short), "answers": "dataset"})
    assert prepare() == 0, prepare.said
    assert {len(row["response_ids"]) for row in prepare.all_rows().values()} == {5}
    assert prepare.reasons() == {"prompt longer than data.max_prompt_tokens 64": 4}


def test_nothing_left_is_an_error_that_names_the_window(prepare, tmp_path):
    """Fault 3."""
    prepare.sources({"path": lines(tmp_path / "long.jsonl", [chat(text(i, 200), "w1") for i in range(3)])})
    assert prepare() == 1
    assert "no training row is left" in prepare.said and "data.max_prompt_tokens 64: 3" in prepare.said
    assert not prepare.out.exists()


def test_prompts_at_the_limit(prepare, tmp_path):
    """Fault 16: 63 and 64 tokens fit a window of 64, 65 don't; 3 tokens are the template's."""
    prepare.sources({"path": lines(tmp_path / "a.jsonl", [chat(text(n, n - 3)) for n in (63, 64, 65)])})
    assert prepare() == 0, prepare.said
    assert sorted(len(row["prompt_ids"]) for row in prepare.all_rows().values()) == [63, 64]
    assert prepare.rows("rejected")[0]["detail"] == "65 tokens"


def test_limits_are_compared_up_front(prepare, tmp_path):
    prepare.sources({"path": lines(tmp_path / "a.jsonl", [chat("w1")])})
    prepare.recipe["verifier"]["max_model_len"] = 64
    assert prepare() == 2
    assert "= 96 exceeds verifier.max_model_len 64" in prepare.said and not prepare.run.exists()


def test_cutting_drops_the_oldest_turns_and_keeps_system_text(prepare, tmp_path):
    turns = chat(text(1, 20), text(2, 20), text(3, 20), text(4, 20), text(5, 20))["messages"]
    row = {"messages": [{"role": "system", "content": "w7 w8"}, *turns]}
    prepare.sources({"path": lines(tmp_path / "a.jsonl", [row, chat("w1"), chat(text(6, 80))])})
    prepare.recipe["data"]["overlong"] = "cut"
    assert prepare() == 0, prepare.said
    ids = prepare.all_rows()["a.jsonl:1#6"]["prompt_ids"]
    assert ids[:4] == [3, 13, 14, END] and ids[4] == 1
    assert (
        len(ids) == 4 + 2 + 20 + 1
    )  # of five turns the last fits with nothing before it but the system text
    assert ids[-22:-2] == [6 + int(w[1:]) for w in text(5, 20).split()]
    assert prepare.reasons() == {"prompt longer than data.max_prompt_tokens 64": 1}  # one turn can't be cut


@pytest.mark.parametrize(("rule", "lengths", "rejected"), [("keep", [4, 32], 0), ("drop", [4], 1)])
def test_given_answers_above_the_limit(prepare, tmp_path, rule, lengths, rejected):
    rows = [chat("w1", "w2 w3 w4"), chat("w5", text(1, 50))]
    prepare.sources({"path": lines(tmp_path / "a.jsonl", rows), "answers": "dataset"})
    prepare.recipe["answers"]["at_limit"] = rule
    assert prepare() == 0, prepare.said
    assert sorted(len(row["response_ids"]) for row in prepare.all_rows().values()) == lengths
    assert prepare.reasons().total() == rejected


# ---- order, splits, growth ---------------------------------------------------------------------------------


def test_growing_keeps_the_rows_and_their_split(many):
    assert many("--set", "data.samples=10") == 0, many.said
    small = {split: many.rows(split) for split in ("train", "val")}
    assert len(small["train"]) == 10 and len(small["val"]) >= 2
    assert many("--set", "data.samples=100") == 0, many.said
    assert "growing from 10 to 100" in many.said
    grown = {split: many.rows(split) for split in ("train", "val")}
    assert len(grown["train"]) == 100
    for split in ("train", "val"):
        assert grown[split][: len(small[split])] == small[split]
    assert many() == 0, many.said
    assert len(many.all_rows()) == 200 and many.rows("train")[:100] == grown["train"]
    share = len(many.rows("val")) / 200
    assert 0.02 < share < 0.09
    assert many("--set", "data.samples=5000") == 0 and "done already" in many.said  # there are no more


def test_fewer_samples_than_there_are_refused(many):
    assert many("--set", "data.samples=20") == 0
    assert many("--set", "data.samples=10") == 2
    assert "20 training rows and 10 are asked for" in many.said and "RUN_DIR" in many.said
    assert len(many.rows()) == 20


def test_growth_refuses_rows_that_changed(many):
    assert many("--set", "data.samples=5") == 0
    file = many.out / "train.jsonl"
    file.write_text(file.read_text().replace("many.jsonl:1#1", "many.jsonl:1#0"))
    assert many("--set", "data.samples=6") == 2
    assert "train.jsonl:1: more samples would change this row" in many.said
    assert len(many.rows()) == 5 and not list(many.out.glob(".*"))


def test_growing_equals_making_at_once(many):
    assert many("--set", "data.samples=7") == 0 and many("--set", "data.samples=70") == 0
    grown = {p.name: p.read_bytes() for p in many.out.glob("*.jsonl")}
    assert many("--set", "data.samples=70", "--force") == 0
    assert grown == {p.name: p.read_bytes() for p in many.out.glob("*.jsonl")}


def test_skip_check_refuse_and_force(many, tmp_path):
    assert many("--check") == 1
    assert many() == 0
    before = (many.out / "stage.json").read_bytes()
    assert many("--check") == 0 and many() == 0 and "done already" in many.said
    assert (many.out / "stage.json").read_bytes() == before
    assert many("--set", "data.max_prompt_tokens=50") == 2
    assert "data.max_prompt_tokens: was 64, now 50" in many.said
    assert many("--check", "--set", "data.max_prompt_tokens=50") == 2
    assert many("--set", "data.max_prompt_tokens=50", "--force") == 0
    with open(tmp_path / "many.jsonl", "a") as f:
        f.write(json.dumps(chat("w1 w2")) + "\n")
    assert many("--set", "data.max_prompt_tokens=50") == 2 and "files.many.jsonl" in many.said


def test_a_finished_stage_skips_without_loading_a_tokenizer(many):
    assert many() == 0
    code = (
        "import sys, runpy; sys.argv = ['01_prepare.py', *sys.argv[1:]]\n"
        "try: runpy.run_path('01_prepare.py', run_name='__main__')\n"
        "except SystemExit as err: assert err.code == 0\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'datasketch'} & sys.modules.keys()))"
    )
    args = ["--recipe", str(many.folder / "recipe.yaml"), "--run-dir", str(many.run)]
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_run_directory_may_move(many, tmp_path):
    """Nothing absolute in the identity: other folders, same names, same content."""
    assert many() == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "many.jsonl").rename(tmp_path / "elsewhere" / "many.jsonl")
    many.run.rename(tmp_path / "moved")
    many.run = tmp_path / "moved"
    many.sources({"path": str(tmp_path / "elsewhere" / "many.jsonl")})
    assert many() == 0 and "done already" in many.said
    assert str(tmp_path) not in json.dumps(
        json.loads((many.run / "01_prepare/stage.json").read_text())["identity"]
    )


def test_sources_are_mixed_by_weight_at_every_length(prepare, tmp_path):
    for name, start in (("a", 0), ("b", 300)):
        lines(tmp_path / f"{name}.jsonl", [chat(text(start + i, 12)) for i in range(60)])
    prepare.sources(
        {"path": str(tmp_path / "a.jsonl"), "weight": 3}, {"path": str(tmp_path / "b.jsonl"), "weight": 1}
    )
    assert prepare("--set", "data.samples=40") == 0, prepare.said
    got = Counter(row["source"] for row in prepare.rows()[:20])
    assert abs(got["a.jsonl"] - 15) <= 2 and abs(got["b.jsonl"] - 5) <= 2
    prepare.recipe["data"]["sources"][0]["limit"] = 10
    assert prepare("--force") == 0
    both = Counter(row["source"] for row in prepare.all_rows().values())
    assert both == {"a.jsonl": 10, "b.jsonl": 60}


def test_turns_of_one_conversation_stay_in_one_split(prepare, tmp_path):
    rows = [chat(text(i), text(i + 70), text(i + 140), text(i + 9)) for i in range(40)]
    prepare.sources({"path": lines(tmp_path / "a.jsonl", rows), "turns": "all"})
    prepare.recipe["data"] |= {"val_share": 0.3, "near_duplicate": 1.0}
    assert prepare() == 0, prepare.said
    split = {s: {row["id"].partition("#")[0] for row in prepare.rows(s)} for s in ("train", "val")}
    assert len(split["train"] | split["val"]) == 40 and not split["train"] & split["val"]
    assert len(split["val"]) > 4 and len(prepare.all_rows()) == 80


# ---- duplicates and evaluation sets ------------------------------------------------------------------------


def test_duplicates_and_near_duplicates_go_and_the_earlier_one_stays(prepare, tmp_path):
    base = text(3, 40)
    near = base.replace(base.split()[20], "w57", 1)
    rows = [chat(base), chat(text(8)), chat(f"  {base.upper()}. "), chat(near), chat("w1 w2"), chat("w1 w3")]
    prepare.sources({"path": lines(tmp_path / "a.jsonl", rows)})
    assert prepare() == 0, prepare.said
    assert prepare.all_rows().keys() == {f"a.jsonl:{n}#1" for n in (1, 2, 5, 6)}
    rejected = [(r["id"], r["reason"], r["detail"]) for r in prepare.rows("rejected")]
    assert rejected == [
        ("a.jsonl:3", "duplicate", "of a.jsonl:1"),
        ("a.jsonl:4", "near-duplicate", "of a.jsonl:1"),
    ]


def test_held_out_and_excluded_prompts_are_kept_out_of_training(prepare, tmp_path):
    held, other = text(5, 20), text(6, 20)
    hidden = chat(f"{text(7, 6)} {held} {text(8, 6)}")  # inside a longer prompt
    rows = [chat(held), hidden, chat(f"{other} w1"), chat("w9 w9"), *(chat(text(i)) for i in range(20, 24))]
    prepare.sources({"path": lines(tmp_path / "a.jsonl", rows)})
    prepare.recipe["data"]["heldout"] = [
        {"path": lines(tmp_path / "held.jsonl", [chat(held), chat("W9 w9?")])}
    ]
    prepare.recipe["data"]["exclude"] = [lines(tmp_path / "bench.jsonl", [{"turns": [other, "w1 w2"]}])]
    assert prepare() == 0, prepare.said
    assert prepare.reasons() == {"overlaps an evaluation set": 4}
    assert [row["detail"] for row in prepare.rows("rejected")] == [
        "with held.jsonl:1", "with held.jsonl:1", "with bench.jsonl:1", "with held.jsonl:2",
    ]  # fmt: skip
    assert [row["id"] for row in prepare.rows("heldout")] == ["held.jsonl:1#1", "held.jsonl:2#1"]
    assert len(prepare.all_rows()) == 4


# ---- bad input ---------------------------------------------------------------------------------------------


def test_odd_roles_and_orders(prepare, tmp_path):
    """Fault 7: mapped by the table or rejected with the role named; system text stays context."""
    odd = [
        turns("developer w1", "User w2", "GPT w3"),
        turns("user w4", "narrator w5", "assistant w6"),
        turns("user w7", "user w8", "assistant w9"),
        turns("system w10"),
        [],
        ["w11", "w12"],
        [{"content": "w13"}],
        turns("user w14", "observation w15", "model w16"),
        "w17",
    ]
    prepare.sources(
        {"path": lines(tmp_path / "a.jsonl", [{"messages": m} for m in odd]), "answers": "dataset"}
    )
    prepare.recipe["data"]["max_rejected_share"] = 0.9
    assert prepare() == 0, prepare.said
    got = prepare.all_rows()
    assert got.keys() == {"a.jsonl:1#2", "a.jsonl:3#2", "a.jsonl:8#2"}
    assert got["a.jsonl:1#2"]["prompt_ids"] == [
        3,
        7,
        END,
        1,
        8,
        END,
        2,
    ]  # developer: the template has no such role
    assert got["a.jsonl:3#2"]["prompt_ids"] == [1, 13, END, 1, 14, END, 2]
    assert got["a.jsonl:8#2"]["prompt_ids"] == [1, 20, END, 4, 21, END, 2]
    assert got["a.jsonl:8#2"]["response_ids"] == [22, END]
    assert {row["id"]: row["reason"] for row in prepare.rows("rejected")} == {
        "a.jsonl:2": "unknown role 'narrator'",
        "a.jsonl:4": "no user turn",
        "a.jsonl:5": "empty chat",
        "a.jsonl:6": "a turn is not an object",
        "a.jsonl:7": "a turn has no role",
        "a.jsonl:9": "the chat is not a list",
    }
    assert prepare.record["rejected"]["unknown role 'narrator'"] == 1
    assert "unknown role 'narrator' (first: a.jsonl:2" in prepare.said


def test_too_many_faulty_rows_stop_the_stage(prepare, tmp_path):
    rows = [chat("w1"), *({"messages": [{"role": "bard", "content": "w2"}]} for _ in range(3))]
    prepare.sources({"path": lines(tmp_path / "a.jsonl", rows)})
    assert prepare() == 1
    assert (
        "3 of 4 records are faulty" in prepare.said
        and "unknown role 'bard': 3 (first: a.jsonl:2)" in prepare.said
    )
    assert not prepare.out.exists()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (
            b'{"messages": [{"role": "user", "content": "caf\xe9"}]}\n',
            ":3: byte 0xe9 at column 47 is not UTF-8",
        ),
        (b'{"messages": [{"role": "user", "con', ":3: the last line is cut off"),
        (b'{"messages": [}\n{}\n', ":3: not valid JSON"),
    ],
)
def test_broken_files_are_named_with_their_line(prepare, tmp_path, content, wanted):
    """Fault 10, and fault 13's half-made folder: none is left, and the repaired file is not refused."""
    file = tmp_path / "a.jsonl"
    good = "".join(json.dumps(chat(f"w{i}")) + "\n" for i in range(2)).encode()
    file.write_bytes(good + content)
    prepare.sources({"path": str(file)})
    assert prepare() == 1
    assert f"{file}{wanted}" in prepare.said and "Traceback" not in prepare.said
    assert not prepare.out.exists()
    file.write_bytes(good)
    assert prepare() == 0, prepare.said


def test_empty_file(prepare, tmp_path):
    """Fault 10."""
    (tmp_path / "empty.jsonl").write_bytes(b"")
    prepare.sources({"path": str(tmp_path / "empty.jsonl")})
    assert prepare() == 1 and "empty.jsonl: no samples in it" in prepare.said


def test_unclear_format_names_the_line(prepare, tmp_path):
    prepare.sources({"path": lines(tmp_path / "a.jsonl", [{"text": "w1"}])})
    assert prepare() == 1
    assert "a.jsonl:1: format unclear: no known field (fields: text)" in prepare.said


def test_missing_source_is_a_bad_setting(prepare):
    prepare.sources({"path": "nowhere/train.jsonl"})
    assert prepare() == 2 and "data.sources[0]: nowhere/train.jsonl is not there" in prepare.said
    assert not prepare.out.exists()


def test_an_interrupt_leaves_nothing_half_made(many, monkeypatch):
    real = stage01.RowMaker.rows

    def rows(self, chat, record, place):
        if record.where.endswith(":50"):
            signal.raise_signal(signal.SIGTERM)
        return real(self, chat, record, place)

    monkeypatch.setattr(stage01.RowMaker, "rows", rows)
    assert many() == 143
    assert not many.out.exists()
