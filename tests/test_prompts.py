"""The prompts in configs/data: the right shape, varied, and nothing of the held-out set in training.

**Own words.** What a prompt says itself, without the material it hands over: text in double quotes,
and every line after the first where the first line that is left ends in a colon. All user turns count.

**Frame.** Two kinds, and both have to hold:
- *sentence frame*: a sentence of the own words, lower-cased, in which every word that is neither a
  function word (FUNCTION) nor an instruction verb (INSTRUCTION) becomes a slot `_`, neighbouring slots
  become one, and the first FRAME_LENGTH places are kept. "Write a poem about winter rain." and "Write
  a short story about love, with a sad end." are both `write a _ about _`: other names, nouns,
  adjectives or numbers don't make another frame, and neither does another ending. Every sentence of a
  prompt is counted, not only the first, because the instruction often comes last. A statement that
  keeps fewer than three words ("My cat sleeps.": `my _`) is all content and has no frame; a question
  or a sentence with an instruction verb always has one.
- *prefix frame*: the first four words (all, if there are fewer) as they stand. It catches what
  different middles let through: "What are the odds of rain?", "What are the odds that it rains?".
At most MAX_SHARE prompts, training and held-out together, share a frame of either kind, and no
frame of a held-out prompt occurs in training.

**Subject.** The stems of a prompt's words (material included, it is part of the subject), without
function words, instruction verbs and GENERIC words: a fixed list, so that a popular subject can't
become "generic" by being popular. A stem is a word without its ending, cut to six letters: volcano,
volcanoes and volcanic are one subject. No subject stem of a held-out prompt occurs anywhere in
training, and every held-out prompt has at least one. Code words and numbers follow the same rule,
except single letters and numbers below 100.
"""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parent.parent / "configs" / "data"
MIN_TRAIN, MIN_TRAIN_PER_DOMAIN = 2040, 170
MIN_HELDOUT, MIN_HELDOUT_PER_DOMAIN = 120, 10
MAX_BYTES = 500_000
MAX_SHARE = 5
FRAME_LENGTH = 5  # places of a sentence frame
NEAR_DUPLICATE = 0.7  # common share of two prompts' content stems


def vocabulary(text):
    return set(text.split())


DOMAINS = [
    *("chat", "explaining", "code", "maths", "writing", "lists"),
    *("advice", "rewriting", "planning", "facts", "extraction", "roleplay"),
]

FUNCTION = vocabulary(
    """
a an the this that these those such some any each every all both either neither no none not another other
one ones few many much more most less least several enough own same so too very quite just only even also
i me my mine myself you your yours yourself he him his himself she her hers herself it its itself we us our
ours ourselves they them their theirs themselves someone somebody anyone anybody everyone everybody no-one
nobody something anything everything nothing somewhere anywhere everywhere nowhere
who whom whose which what when where why how whatever whoever whenever wherever however
be am is are was were been being do does did done doing have has had having will would shall should can could
may might must ought cannot
don't doesn't didn't isn't aren't wasn't weren't won't wouldn't can't couldn't shouldn't haven't hasn't hadn't
i'm i've i'd i'll you're you've you'd you'll he's she's it's we're we've we'd we'll they're they've they'd
they'll that's there's here's what's who's where's how's let's
and or but nor yet if then else than as because since while although though unless until whether once before
after about above across against along among around at behind below beneath beside besides between beyond by
down during except for from in inside into like near of off on onto out outside over past per through
throughout to toward towards under up upon via with within without
there here now again ever never always often sometimes still already ahead away back instead rather almost
really actually please thanks thank yes ok okay well oh hi hey hello dear
"""
)

INSTRUCTION = vocabulary(
    """
write explain describe give list tell make create name help show define summarise summarize rewrite rephrase
translate compare suggest plan find solve calculate compute draft compose imagine pretend act play turn
extract classify convert fix shorten outline recommend need want know think say put get take use let work
answer ask design come teach identify label sort pick choose decide state prepare invent set walk provide
offer go see look try keep guess start begin read add change condense merge halve
"""
)

# Everyday words that don't say what a prompt is about: kinds of text, people, time, units, languages to
# program in, feelings, common verbs and adjectives. Nothing that could be a prompt's subject belongs here.
GENERIC = vocabulary(
    """
poem story tale letter email message note text paragraph sentence line word page title headline list item
bullet point step example reason idea tip question answer reply summary version tone style way thing kind
sort part piece detail name topic subject fact term phrase opening ending scene speech script essay article
review report post caption description explanation instruction checklist schedule plan code function program
method value number total result
day week month year hour minute second time morning afternoon evening night today tomorrow yesterday tonight
weekend monday tuesday wednesday thursday friday saturday sunday january february march april may june july
august september october november december spring summer autumn winter date old new young recent recently
last next first second third final early late later soon long short
zero two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen twenty
thirty forty fifty sixty seventy eighty ninety hundred thousand half quarter dozen double single couple pair
person people man woman men women child children kid boy girl friend family mother father mum dad mom parent
brother sister son daughter wife husband partner neighbour colleague boss manager teacher student customer
guest beginner adult everyone reader user
good bad better best worse worst great nice fine big small large little tiny huge high low full empty easy
hard simple plain difficult right wrong true false real sure clear different similar special common main
important useful possible ready able free cheap expensive quick slow fast strong weak warm cold hot cool dark
light bright quiet loud happy sad angry afraid tired busy funny serious polite friendly kind gentle formal
casual strange ordinary usual normal whole only extra entire exact exactly roughly several various
think say said want like love hate feel felt become became seem mean meant happen work need start stop begin
end finish keep leave left bring send sent call ask show give given take taken put turn move run walk stand
sit stay live wait hold carry follow lose lost win buy sell pay spend cost meet talk speak hear listen watch
learn understand remember forget know try help change open close cut break build fall grow pass reach set
include contain mention allow cause matter happen handle choose decide guess wonder hope wish enjoy prefer
place home house room street town city country world side top bottom middle front end edge area
amount size level rest bit lot money price work job life problem trouble mistake chance choice need case
toddler teenager grandfather grandmother cousin novice
novel fable haiku monologue limerick synonym adjective verb passive active ingredient routine
itinerary timetable positive negative mixed query request complaint claim comment trick python javascript git
percent dollar pound euro cm km metre litre foot feet gram mile
truly finally together beforehand begun curious purpose silly wise rude far wide got going goes gone went came
ran made gave found heard born tried wanted using arrive appear receive return order check suppose belong
avoid insist practise organise draw map sketch divide lay lead hand pull wear eat attach condense merge
halve loosen soften welcome silent sensible realistic stuck
"""
)


def words(text):
    return re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", text.lower().replace("’", "'"))


def stem(word):
    """volcano, volcanoes, volcanic -> volcan; running -> run. Crude on purpose: it errs towards 'same'."""
    word = word.removesuffix("'s").replace("'", "")
    if len(word) > 4 and word.endswith("ies"):
        word = word[:-3] + "y"
    elif len(word) > 4 and word.endswith(("ses", "xes", "zes", "ches", "shes", "oes")):
        word = word[:-2]
    elif len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    if len(word) > 5 and word.endswith("ing"):
        word = word[:-3]
    elif len(word) > 4 and word.endswith("ed"):
        word = word[:-2]
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
        word = word[:-1]
    if len(word) > 3 and word.endswith("e"):
        word = word[:-1]
    return word[:6]


NO_SUBJECT = {stem(w) for w in FUNCTION | INSTRUCTION | GENERIC}


def user_text(row):
    return "\n".join(m["content"] for m in row["messages"] if m["role"] == "user")


def own_words(text):
    """The text without quoted material and without the lines that a first line ending in ':' hands over."""
    text = re.sub(r'"[^"]*"|“[^”]*”|`[^`]*`', " ", text).strip()
    first = text.partition("\n")[0]
    return first if first.rstrip().endswith(":") else text


def sentence_frame(sentence):
    kept = [w if w in FUNCTION or w in INSTRUCTION else "_" for w in words(sentence)]
    frame = [w for i, w in enumerate(kept) if w != "_" or i == 0 or kept[i - 1] != "_"]
    fixed = [w for w in frame if w != "_"]
    asks = sentence.rstrip().endswith("?") or any(w in INSTRUCTION for w in fixed)
    return " ".join(frame[:FRAME_LENGTH]) if fixed and (asks or len(fixed) >= 3) else None


def frames(row):
    """Every frame of a prompt's user turns: sentence frames, and the first four words of each turn."""
    found = set()
    for message in row["messages"]:
        if message["role"] != "user":
            continue
        own = own_words(message["content"])
        found |= {f for s in re.split(r"(?<=[.!?:])\s+", own) if (f := sentence_frame(s))}
        if start := words(own)[:4]:
            found.add("^" + " ".join(start))
    return found


def content_stems(row):
    return {stem(w) for w in words(user_text(row)) if w not in FUNCTION and w not in INSTRUCTION}


def subject(row):
    stems = {stem(part) for w in words(user_text(row)) for part in w.split("-")}
    return {s for s in stems - NO_SUBJECT if len(s) > 1 and not (s.isdigit() and int(s) < 100)}


def overused_frames(rows):
    """frame -> ids, for every frame that more than MAX_SHARE prompts share."""
    users = defaultdict(list)
    for row in rows:
        for frame in frames(row):
            users[frame].append(row["id"])
    return {frame: ids for frame, ids in users.items() if len(ids) > MAX_SHARE}


def leaked_frames(train, heldout):
    """(held-out id, frame) for every held-out frame that occurs in training."""
    seen = set().union(*map(frames, train))
    return [(row["id"], frame) for row in heldout for frame in sorted(frames(row) & seen)]


def leaked_subjects(train, heldout):
    """(held-out id, stem, training ids) for every held-out subject that occurs in training."""
    where = defaultdict(list)
    for row in train:
        for s in subject(row):
            where[s].append(row["id"])
    return [(row["id"], s, where[s]) for row in heldout for s in sorted(subject(row)) if s in where]


def near_duplicates(rows):
    """Pairs of ids with the same normalised text, or with NEAR_DUPLICATE of their content stems in common."""
    pairs, texts, stems, having = [], {}, [], defaultdict(list)  # having: stem -> rows so far that have it
    for i, row in enumerate(rows):
        text = " ".join(words(user_text(row)))
        if text in texts:
            pairs.append((texts[text], row["id"]))
        texts.setdefault(text, row["id"])
        stems.append(content_stems(row))
        common = Counter(j for s in stems[i] for j in having[s])
        for j, n in common.items():
            if n >= NEAR_DUPLICATE * len(stems[i] | stems[j]):
                pairs.append((rows[j]["id"], row["id"]))
        for s in stems[i]:
            having[s].append(i)
    return pairs


def shape_faults(row):
    """What is wrong with one row's form."""
    if set(row) != {"id", "domain", "messages"}:
        return [f"keys are {sorted(row)}"]
    faults = []
    if row["domain"] not in DOMAINS:
        faults.append(f"unknown domain {row['domain']}")
    turns = row["messages"]
    roles = [m["role"] for m in turns]
    without_system = roles[1:] if roles[:1] == ["system"] else roles
    if len(without_system) % 2 == 0 or any(
        role != ("user", "assistant")[i % 2] for i, role in enumerate(without_system)
    ):
        faults.append(f"roles are {roles}: expected user and assistant in turn, a user turn last")
    for m in turns:
        if set(m) != {"role", "content"}:
            faults.append(f"message keys are {sorted(m)}")
        elif not m["content"].strip() or m["content"] != m["content"].strip():
            faults.append("a message is empty or has white space around it")
        elif re.search(r"[^\S\n]$", m["content"], re.MULTILINE):
            faults.append("white space at the end of a line")
    if not 3 <= len(words(user_text(row))) <= 160:
        faults.append(f"{len(words(user_text(row)))} words of user text")
    return faults


def unbalanced_prefix(rows, n):
    """Domain counts of the first n rows if any two domains differ by more than one prompt, else None."""
    counts = Counter(row["domain"] for row in rows[:n])
    spread = [counts[d] for d in DOMAINS]
    return dict(counts) if max(spread) - min(spread) > 1 else None


def load(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def train():
    return load("train.jsonl")


@pytest.fixture(scope="module")
def heldout():
    return load("heldout.jsonl")


def prompt(content, id="x-1"):
    return {"id": id, "domain": "chat", "messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_file_form(name):
    raw = (DATA / name).read_bytes()
    assert len(raw) < MAX_BYTES
    assert raw.endswith(b"\n") and b"\r" not in raw
    for number, line in enumerate(raw.decode("utf-8").split("\n")[:-1], 1):
        assert line and line == line.strip(), f"{name}:{number}"
        assert not (faults := shape_faults(json.loads(line))), f"{name}:{number}: {faults}"


def test_counts_and_ids(train, heldout):
    assert len(train) >= MIN_TRAIN and len(heldout) >= MIN_HELDOUT
    in_train, in_heldout = (Counter(r["domain"] for r in rows) for rows in (train, heldout))
    assert set(in_train) == set(in_heldout) == set(DOMAINS)
    assert min(in_train.values()) >= MIN_TRAIN_PER_DOMAIN
    assert min(in_heldout.values()) >= MIN_HELDOUT_PER_DOMAIN
    repeated = [i for i, n in Counter(r["id"] for r in train + heldout).items() if n > 1]
    assert not repeated
    assert all(re.fullmatch(rf"{r['domain']}-\d{{4}}", r["id"]) for r in train)
    assert all(re.fullmatch(rf"heldout-{r['domain']}-\d\d", r["id"]) for r in heldout)


def test_frames_are_shared_by_few(train, heldout):
    assert not overused_frames(train + heldout)


def test_heldout_frames_are_new(train, heldout):
    assert not leaked_frames(train, heldout)
    assert all(frames(row) for row in heldout)


def test_heldout_subjects_are_new(train, heldout):
    assert not leaked_subjects(train, heldout)
    assert all(subject(row) for row in heldout)


def test_no_near_duplicates(train, heldout):
    assert not near_duplicates(train + heldout)


@pytest.mark.parametrize("n", [10, 100, 500, None])
def test_prefix_is_balanced(train, n):
    assert not unbalanced_prefix(train, n)


def test_checker_rejects_a_planted_frame(train, heldout):
    poems = [
        prompt(f"Write a poem about {x}.", f"x-{x}") for x in ("mud", "ash", "silk", "iron", "wool", "chalk")
    ]
    assert set(overused_frames(poems)) == {"write a _ about _", "^write a poem about"}
    assert not overused_frames(poems[:MAX_SHARE])
    assert leaked_frames(poems[:1], [prompt("Write a poem about old umbrellas.", "h")])
    for row in heldout:  # each held-out prompt's own frame, planted in an otherwise clean training set
        assert leaked_frames([*train[:9], row], [row]), row["id"]


def test_checker_rejects_a_planted_heldout_subject(train, heldout):
    asks = prompt("Why do volcanoes erupt?", "heldout-x")
    assert leaked_subjects([prompt("My sister slept near a volcanic crater.", "t")], [asks]) == [
        ("heldout-x", "volcan", ["t"])
    ]
    assert not leaked_subjects([prompt("My sister slept near a lake.")], [asks])
    for row in heldout:  # each held-out prompt's own subject, planted in an otherwise clean training set
        assert leaked_subjects([*train[:9], row], [row]), row["id"]


def test_checker_rejects_the_other_faults(train):
    assert near_duplicates([prompt("Is tea good for me?", "a"), prompt("Is tea good for me", "b")])
    assert near_duplicates(
        [
            prompt("Knit me a red woollen scarf pattern", "a"),
            prompt("A pattern: red woollen scarf to knit", "b"),
        ]
    )
    assert unbalanced_prefix([r for r in train if r["domain"] != "code"], 100)
    assert shape_faults(prompt("Trailing space is a fault. "))
    assert shape_faults(prompt("A fine prompt.") | {"domain": "cooking"})
    answered = prompt("Who won?")
    answered["messages"].append({"role": "assistant", "content": "We did."})
    assert shape_faults(answered)


@pytest.mark.parametrize(
    ("sentence", "frame"),
    [
        ("Write a short poem about winter rain.", "write a _ about _"),
        ("What are 12 red fruits?", "what are _"),
        ("Write a long story about two friends in a boat, please.", "write a _ about _"),
        ("My cat sleeps.", None),
        ("Define entropy.", "define _"),
    ],
)
def test_sentence_frame(sentence, frame):
    assert sentence_frame(sentence) == frame


def test_own_words_leave_material_out():
    assert own_words('Translate "Where are you?" please.').split() == ["Translate", "please."]
    assert own_words("Shorten this:\nIt was late.") == "Shorten this:"
