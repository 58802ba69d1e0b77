"""eagle3.chats: formats, and rendering as the server does it, under a Kimi-like and other templates."""

from __future__ import annotations

import json

import kimi_tiny
import pytest
from test_prepare import Prepare, chat, clean_process, lines  # noqa: F401 (clean_process is a fixture)

from eagle3 import chats

CALL = {"function": {"name": "get_river", "arguments": '{"city": "salt"}'}}
TOOLS = [{"type": "function", "function": {"name": "get_river", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="session")
def kimi_folder(tmp_path_factory):
    """The Kimi-like test verifier."""
    return kimi_tiny.build(tmp_path_factory.mktemp("kimi") / "verifier", shards=2)


@pytest.fixture(scope="session")
def kimi(kimi_folder) -> chats.Renderer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(kimi_folder, trust_remote_code=True)
    return chats.Renderer(tokenizer, kimi_folder, kimi_tiny.VOCAB)


def character_renderer(folder, template: str, end: str = "~") -> chats.Renderer:
    """One token a character, so that any template can be tried; `end` is the end token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(i): i for i in range(32, 127)} | {"\n": 1, "?": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token=end)
    fast.chat_template = template
    return chats.Renderer(fast, folder, 128)


def parsed(value) -> list[dict]:
    return chats.parse(value, chats.detect(value)).messages


def turn(role: str, content, **more) -> dict:
    return {"role": role, "content": content, **more}


def shown(renderer: chats.Renderer, messages, at: int, tools=None, **kwargs) -> tuple[str, str]:
    """Prompt and answer of messages[at] as text."""
    prompt, answer = renderer.answered(parsed({"messages": messages}), at, tools, kwargs)
    return renderer.decode(prompt), renderer.decode(answer)


# ---- formats -----------------------------------------------------------------------------------------------

ASKED = [turn("user", "why"), turn("assistant", "so")]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"messages": ASKED}, ASKED),
        (ASKED, ASKED),
        ({"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]}, ASKED),
        ({"conversations": ASKED, "id": 7}, ASKED),
        ({"prompt": "why", "response": "so"}, ASKED),
        ({"question": "why", "answer": "so"}, ASKED),
        ({"instruction": "why", "input": "", "output": "so"}, ASKED),
        ({"instruction": "why", "input": "it"}, [turn("user", "why\n\nit")]),
        ({"prompt": [turn("user", "why")], "chosen": [turn("assistant", "so")]}, ASKED),
        ({"prompt": "first of the chat", "messages": ASKED}, ASKED),
        ({"system": "be brief", "messages": ASKED}, [turn("system", "be brief"), *ASKED]),
        ({"turns": ["why", "and"]}, [turn("user", "why"), turn("assistant", None), turn("user", "and")]),
        ({"messages": [turn("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]},
         [turn("user", "a\nb")]),
    ],
)  # fmt: skip
def test_formats(value, wanted):
    assert parsed(value) == wanted


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"text": "x"}, "no known field"),
        ({"messages": ASKED, "conversations": ASKED}, "both `messages` and `conversations`"),
        (7, "not an object"),
        ({"messages": [turn("user", [{"type": "image_url"}])]}, "content of type image_url in a chat"),
        ({"messages": [turn("user", 5)]}, "content is not text"),
        ({"messages": [turn("user", "\ud800")]}, "half of a surrogate pair in the text"),
        ({"messages": [turn("user", None)]}, "a user turn has no text"),
        ({"messages": [*ASKED, turn("assistant", None, tool_calls=[{"function": {}}])]},
         "a tool call has no function name"),
        ({"messages": ASKED, "tools": "[{"}, "`tools` is not JSON"),
    ],
)  # fmt: skip
def test_rows_that_are_refused(value, reason):
    with pytest.raises(chats.BadRow) as bad:
        parsed(value)
    assert bad.value.reason == reason


def test_which_turns_wait_for_an_answer():
    messages = parsed(
        {"messages": [turn("assistant", "hi"), *ASKED, turn("user", "and"), turn("user", "more")]}
    )
    assert chats.supervised_turns(messages, "dataset", "all") == [2]
    assert chats.supervised_turns(messages, "own", "all") == [2, 5]
    assert chats.supervised_turns(messages, "own", "last") == [5]
    open_turns = parsed({"turns": ["why", "and"]})
    assert chats.supervised_turns(open_turns, "own", "all", "dataset") == [1]  # nobody answered the first
    assert chats.supervised_turns(open_turns, "own", "all", "own") == [1, 3]
    with pytest.raises(chats.BadRow, match="no answer in the row"):
        chats.supervised_turns(parsed({"prompt": "why"}), "dataset", "last")


# ---- thinking (fault 5) ------------------------------------------------------------------------------------

THOUGHT = [turn("user", "one"), turn("assistant", "A", reasoning_content="ra"),
           turn("user", "two"), turn("assistant", "B", reasoning_content="rb")]  # fmt: skip


def test_reasoning_is_trained_as_generated_and_stripped_from_history(kimi):
    prompt, answer = shown(kimi, THOUGHT, 3)
    assert answer == "rb</think>B<|im_end|>"
    assert prompt.endswith("<|im_assistant|>assistant<|im_middle|><think>")
    assert "<think></think>A<|im_end|>" in prompt and "ra" not in prompt
    assert shown(kimi, THOUGHT, 1)[1] == "ra</think>A<|im_end|>"


def test_inline_reasoning_is_the_same_as_a_field(kimi):
    inline = [turn("user", "one"), turn("assistant", "<think>ra</think>A"), turn("user", "two"),
              turn("assistant", "<think>rb</think>B")]  # fmt: skip
    assert shown(kimi, inline, 3) == shown(kimi, THOUGHT, 3)


def test_an_empty_block_of_the_template_is_prompt(kimi):
    plain = [turn("user", "one"), turn("assistant", "A")]
    assert shown(kimi, plain, 1)[1] == "A<|im_end|>"
    assert shown(kimi, plain, 1)[0].endswith("<think></think>")
    assert shown(kimi, plain, 1) == shown(kimi, plain, 1, thinking=False)
    assert shown(kimi, THOUGHT, 3, thinking=False)[1] == "B<|im_end|>"


def test_a_block_that_only_the_answer_has(tmp_path):
    """A template (Qwen's way) whose generation prompt has no block, but the last answer has."""
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}~{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    renderer = character_renderer(tmp_path, template)
    assert shown(renderer, ASKED, 1) == ("<user>why~<assistant><think></think>", "so~")
    thought = [ASKED[0], turn("assistant", "so", reasoning="r")]
    assert shown(renderer, thought, 1) == ("<user>why~<assistant>", "<think>r</think>so~")


@pytest.mark.parametrize(
    ("turns", "ask", "reason"),
    [
        ("<{{ m.role }}>{{ m.content[:1] }}~", "<assistant>", "drops or alters the answer"),
        (
            "<{{ m.role }}>{{ m.content }}",
            "<assistant>",
            "closes the answer with none of the verifier's end tokens",
        ),
        ("<{{ m.role }}>{{ m.content }}~", "<model>", "renders an answer otherwise than it asks for one"),
        (
            "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}~{% endif %}",
            "<assistant>",
            "drops system text",
        ),
    ],
)
def test_a_template_that_can_not_be_trained_on_is_named(tmp_path, turns, ask, reason):
    loop = f"{{% for m in messages %}}{turns}{{% endfor %}}"
    renderer = character_renderer(tmp_path, f"{loop}{{% if add_generation_prompt %}}{ask}{{% endif %}}")
    with pytest.raises(chats.BadRow, match=f"chat template of {tmp_path.name} {reason}"):
        shown(renderer, [turn("system", "b"), *ASKED], 2)


def test_text_behind_the_end_token_is_left_out(tmp_path):
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}~\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    renderer = character_renderer(tmp_path, template)
    assert shown(renderer, ASKED, 1) == ("<user>why~\n<assistant>", "so~")
    with pytest.raises(chats.BadRow, match="an end token inside the answer"):
        shown(renderer, [turn("user", "why"), turn("assistant", "so~ or not")], 1)


def test_prompt_and_answer_may_not_share_a_token(smol):
    """SmolLM2's newline after the role merges with a newline that begins an answer; ids stay a true split."""
    from transformers import AutoTokenizer

    renderer = chats.Renderer(AutoTokenizer.from_pretrained(smol), smol, 49152)
    messages = parsed({"messages": [turn("user", "x"), turn("assistant", "\n\ny")]})
    prompt, answer = renderer.answered(messages, 1, None, {})
    assert prompt == renderer.prompt(messages[:1], None, {})
    assert renderer.decode(answer) == "\n\ny<|im_end|>"


# ---- tools (fault 6) ---------------------------------------------------------------------------------------

AGENT = [turn("user", "river?"), turn("assistant", None, tool_calls=[CALL], reasoning_content="look"),
         turn("tool", "9 metres", name="get_river"),
         turn("assistant", "nine", reasoning_content="easy")]  # fmt: skip


def test_tool_calls_with_null_content_are_supervised(kimi):
    prompt, answer = shown(kimi, AGENT, 1, TOOLS)
    assert answer.startswith("look</think><|tool_calls_section_begin|>") and answer.endswith("<|im_end|>")
    assert "get_river" in answer and '{"city": "salt"}' in answer
    prompt, answer = shown(kimi, AGENT, 3, TOOLS)
    assert answer == "easy</think>nine<|im_end|>"
    # While the turn goes on its thinking is kept; once it is answered the template would drop it.
    assert "look</think>" in prompt and "9 metres" in prompt
    assert "None" not in prompt + answer
    assert prompt == kimi.decode(kimi.prompt(parsed({"messages": AGENT})[:3], TOOLS, {}))


def test_sharegpt_function_calls(kimi):
    row = {
        "conversations": [
            {"from": "human", "value": "river?"},
            {"from": "function_call", "value": '{"name": "get_river", "arguments": {"city": "salt"}}'},
            {"from": "observation", "value": "9 metres"},
            {"from": "gpt", "value": "nine"},
        ],
        "tools": json.dumps([TOOLS[0]["function"]]),
    }
    found = chats.parse(row, "sharegpt")
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.tools == TOOLS
    text = kimi.decode(kimi.answered(found.messages, 1, found.tools, {})[1])
    assert text.startswith("<|tool_calls_section_begin|>") and "9 metres" not in text


def test_a_template_that_drops_tool_calls_is_not_trained_on(toy_verifier):
    from transformers import AutoTokenizer

    toy = chats.Renderer(AutoTokenizer.from_pretrained(toy_verifier), toy_verifier, 64)
    with pytest.raises(chats.BadRow, match="drops or alters the answer"):
        toy.answered(
            parsed({"messages": [AGENT[0], turn("assistant", None, tool_calls=[CALL])]}), 1, TOOLS, {}
        )
    with pytest.raises(chats.BadRow, match="drops tool calls"):
        toy.prompt(parsed({"messages": AGENT})[:3], TOOLS, {})


# ---- the stage on a Kimi-like verifier ---------------------------------------------------------------------


@pytest.fixture
def prepare(tmp_path, kimi_folder, capsys) -> Prepare:
    prepare = Prepare(tmp_path, kimi_folder, capsys)
    prepare.recipe["verifier"] |= {"max_model_len": 512, "trust_remote_code": True}
    prepare.recipe["data"]["max_prompt_tokens"] = 384
    return prepare


def test_remote_code_only_if_the_recipe_says_so_and_never_a_question(prepare, tmp_path):
    """Fault 12: refused by the flag's name, obeyed with it; stdin is never read."""
    prepare.sources({"path": lines(tmp_path / "a.jsonl", kimi_tiny.prompts(16)), "turns": "all"})
    prepare.recipe["verifier"]["trust_remote_code"] = False
    assert prepare() == 2
    assert "verifier.trust_remote_code" in prepare.said
    prepare.recipe["verifier"]["trust_remote_code"] = True
    assert prepare() == 0, prepare.said
    assert len(prepare.all_rows()) > 16 and not prepare.rows("rejected")


def test_share_of_thinking_rows_is_drawn_by_row(prepare, tmp_path, kimi):
    rows = [chat(f"question {i}") for i in range(60)]
    prepare.sources({"path": lines(tmp_path / "a.jsonl", rows), "thinking": 0.5})
    assert prepare("--set", "data.samples=20") == 0, prepare.said
    few = prepare.all_rows()
    off = kimi.encode("<think></think>")
    assert prepare() == 0
    rows = prepare.all_rows()
    assert 15 < sum(row["prompt_ids"][-len(off) :] == off for row in rows.values()) < 45
    assert few.items() <= rows.items()


def test_thinking_needs_a_template_that_knows_it(tmp_path, toy_verifier, capsys):
    prepare = Prepare(tmp_path, toy_verifier, capsys)
    prepare.sources({"path": lines(tmp_path / "a.jsonl", [chat("w1")]), "thinking": 0.5})
    assert prepare() == 2 and "knows none of thinking, enable_thinking" in prepare.said


def test_history_in_the_verifiers_own_words(prepare, tmp_path, kimi):
    """03's loop: earlier answers are asked for in turn; the next prompt has them as a served chat would."""
    rows = [chat("one", "A", "two", "B", "three"), chat("four"), {"turns": ["five", "six"]}]
    places = [{"path": lines(tmp_path / f"{i}.jsonl", [row]), "history": "own"} for i, row in enumerate(rows)]
    prepare.sources(*places)
    assert prepare() == 0, prepare.said
    got = {row["source"]: row for row in prepare.all_rows().values()}
    assert "history" not in got["1.jsonl"] and got["2.jsonl"]["history"]["answers"] == 1
    row = got["0.jsonl"]
    assert row["history"]["answers"] == 2 and row["response_ids"] is None
    said, answers = ["I see</think>mine", "again</think>more"], []
    assert row["prompt_ids"] == chats.next_prompt(kimi, row["history"], [])
    asks = "<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    assert kimi.decode(row["prompt_ids"]).endswith(f"one{asks}")
    for text in said:
        prompt = kimi.decode(chats.next_prompt(kimi, row["history"], answers))
        assert prompt.count("<|im_user|>") == len(answers) + 1
        answers.append(kimi.encode(text + "<|im_end|>"))
    final = kimi.decode(chats.next_prompt(kimi, row["history"], answers))
    assert "<think></think>mine<|im_end|>" in final and "<think></think>more<|im_end|>" in final
    assert "I see" not in final and ">A<" not in final and final.endswith(f"three{asks}")
