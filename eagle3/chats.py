"""Chats as people store them -> messages as a server takes them -> token ids as that server would make them.

Formats (`Source.format`; `auto` decides by the first row of each file: `detect`)
  messages  {"messages": [{"role", "content", ...}]}; a row that is itself such a list counts too
  sharegpt  {"conversations": [{"from", "value"}]}
  prompt    a string under one of PROMPT_FIELDS, its answer under one of ANSWER_FIELDS
  tokens    {"prompt_ids": [int], "response_ids": [int] | null}
`role`/`from` and `content`/`value` are interchangeable. `tools` (or `functions`) and `system` of the row are
kept.

Rows that can't be used raise BadRow with a reason; nothing is guessed. A role outside ROLES is such a fault.

Rendering is the server's: tool-call arguments become objects, null content becomes "", `developer` becomes
`system` unless the template knows it, reasoning is passed under both of its names, then the tokenizer's own
`apply_chat_template`. An answer's ids are what that rendering has behind the prompt's rendering, through the
verifier's end token. Two things that templates do are undone, because the model never generates them so:
  - an empty thinking block that the template puts before an answer without reasoning belongs to the prompt;
  - reasoning that it strips from the answer itself, as if it were history already, is put back.

History in the verifier's own words (`history: own`)
  Such a row has `"history": {"messages", "tools", "kwargs", "answers"}`: the chat up to the supervised
  answer, in which every earlier assistant turn without tool calls has content null (`answers` of them), and
  `prompt_ids` is only the prompt of the first of those. 03 asks for them in order:
      answers = []
      for _ in range(row["history"]["answers"]):
          answers.append(generate(next_prompt(renderer, row["history"], answers)))   # end token included
      prompt_ids = next_prompt(renderer, row["history"], answers)                    # the row's real prompt
  next_prompt renders anew each time, so that the template treats an earlier answer as it would in a served
  chat (its thinking stripped, for example). 01 has checked the length with the data set's answers; 03 checks
  again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3.contract import ConfigError

# Field spellings, in order of preference. `input` is Alpaca's: it follows the instruction.
PROMPT_FIELDS = ("prompt", "instruction", "question", "query", "problem", "turns")
INPUT_FIELD = "input"
ANSWER_FIELDS = ("response", "output", "answer", "completion", "solution", "chosen")
SYSTEM_FIELDS = ("system", "system_prompt")

# Role as found (lower case, blanks stripped) -> role of the chat template. Anything else is a fault.
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",  # its text is a tool call
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
CALL_ROLES = ("function_call", "tool_call")
# Variables by which templates switch thinking; a template ignores one that it does not know.
THINKING = ("thinking", "enable_thinking")
INLINE_THINKING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
PROBE = "\u2042"  # a character that no chat starts with


class BadRow(Exception):
    """One row's fault.

    Attributes:
        reason: one of few texts, counted in the summary.
        detail: what is particular to this row.
        fault: whether the data are wrong; not so for a row left out by choice (too long, a duplicate).
    """

    def __init__(self, reason: str, detail: str = "", fault: bool = True):
        super().__init__(reason)
        self.reason, self.detail, self.fault = reason, detail, fault


@dataclass
class Chat:
    """A conversation, or ready-made ids."""

    messages: list[dict] = field(default_factory=list)
    tools: list[dict] | None = None
    domain: str | None = None
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None

    def words_of(self, *roles: str) -> list[str]:
        """Texts of the turns with one of these roles."""
        return [m["content"] for m in self.messages if m["role"] in roles and m["content"]]


# ---- formats -----------------------------------------------------------------------------------------------


def detect(value: Any) -> str:
    """The format of a row: tokens before messages or sharegpt before prompt (data sets often carry a chat
    and, beside it, its first prompt).

    Raises:
        BadRow: it fits none, or both kinds of chat at once.
    """
    if isinstance(value, list):
        return "messages"
    if not isinstance(value, dict):
        raise BadRow("not an object", type(value).__name__)
    has = {k for k, v in value.items() if v is not None}
    if "prompt_ids" in has:
        return "tokens"
    if {"messages", "conversations"} <= has:
        raise BadRow("both `messages` and `conversations`", "set `format` of the source")
    for name, fields in (
        ("messages", ("messages",)),
        ("sharegpt", ("conversations",)),
        ("prompt", PROMPT_FIELDS),
    ):
        if has.intersection(fields):
            return name
    raise BadRow("no known field", f"fields: {', '.join(sorted(map(str, value))) or 'none'}")


def parse(value: Any, fmt: str) -> Chat:
    """A raw row as a chat.

    Args:
        value: the row as JSON gave it.
        fmt: "messages", "sharegpt", "prompt" or "tokens".

    Raises:
        BadRow: with the reason.
    """
    if isinstance(value, list):
        value = {"messages": value}
        fmt = "messages"
    if not isinstance(value, dict):
        raise BadRow("not an object", type(value).__name__)
    domain = value.get("domain") if isinstance(value.get("domain"), str) else None
    if fmt == "tokens":
        return Chat(
            domain=domain,
            prompt_ids=id_list(value, "prompt_ids"),
            response_ids=None if value.get("response_ids") is None else id_list(value, "response_ids"),
        )
    raw = (
        from_fields(value)
        if fmt == "prompt"
        else value.get({"sharegpt": "conversations"}.get(fmt, "messages"))
    )
    if raw is None:
        raise BadRow(f"no {'`conversations`' if fmt == 'sharegpt' else '`messages`'} in the row")
    if not isinstance(raw, list):
        raise BadRow("the chat is not a list", type(raw).__name__)
    if not raw:
        raise BadRow("empty chat")
    messages = [message(item) for item in raw]
    system = next(
        (value[k] for k in SYSTEM_FIELDS if isinstance(value.get(k), str) and value[k].strip()), None
    )
    if system and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    if not any(m["role"] in ("user", "tool") for m in messages):
        raise BadRow("no user turn", f"roles: {', '.join(m['role'] for m in messages)}")
    return Chat(messages, tool_list(value), domain)


def id_list(value: dict, key: str) -> list[int]:
    """Token ids of a ready-made row, as integers; their range is checked by Renderer.check_ids."""
    ids = value[key]
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise BadRow(f"{key} is not a list of integers")
    return ids


def from_fields(value: dict) -> list:
    """A row of single fields as a list of turns. `turns` (MT-Bench) are user turns to be answered."""
    name = next((k for k in PROMPT_FIELDS if value.get(k)), None)
    if name is None:
        raise BadRow("no prompt in the row", f"none of {', '.join(PROMPT_FIELDS)}")
    prompt = value[name]
    answer = next((value[k] for k in ANSWER_FIELDS if value.get(k)), None)
    if isinstance(prompt, list):
        if len(prompt) == 1 and isinstance(prompt[0], list):  # BFCL: a list of chats, one in practice
            prompt = prompt[0]
        if not all(isinstance(turn, str) for turn in prompt):
            return [*prompt, *(answer if isinstance(answer, list) else [])]
        turns = [
            [{"role": "user", "content": text}, {"role": "assistant", "content": None}] for text in prompt
        ]
        return [turn for pair in turns for turn in pair][:-1]
    if name == "instruction" and isinstance(value.get(INPUT_FIELD), str) and value[INPUT_FIELD].strip():
        prompt = f"{prompt}\n\n{value[INPUT_FIELD]}"
    turns = [{"role": "user", "content": prompt}]
    if isinstance(answer, str):
        turns.append({"role": "assistant", "content": answer})
    return turns


def message(item: Any) -> dict:
    """One turn in the form that a server hands to the template.

    Raises:
        BadRow: not an object, unknown role, content that is no text.
    """
    if not isinstance(item, dict):
        raise BadRow("a turn is not an object", type(item).__name__)
    found = item.get("role", item.get("from"))
    key = found.strip().lower() if isinstance(found, str) else found
    if not isinstance(key, str) or key not in ROLES:
        raise BadRow(f"unknown role {str(found)[:40]!r}" if found is not None else "a turn has no role")
    role = ROLES[key]
    text = plain_text(item.get("content", item.get("value")), role)
    out: dict[str, Any] = {"role": role, "content": text}
    if role == "assistant":
        calls = tool_calls(item)
        if key in CALL_ROLES:
            calls, out["content"] = calls_in_text(text), ""
        if calls:
            out["tool_calls"] = calls
            out["content"] = out["content"] or ""
        names = ("reasoning_content", "reasoning", "thinking")
        found = [item[k] for k in names if isinstance(item.get(k), str) and item[k]]
        if found:
            out["reasoning"] = out["reasoning_content"] = found[0]
            out["content"] = out["content"] or ""
    elif not text and role == "user":
        raise BadRow("a user turn has no text")
    else:
        out["content"] = text or ""
    for key in ("name", "tool_call_id"):
        if isinstance(item.get(key), str):
            out[key] = item[key]
    return out


def plain_text(content: Any, role: str) -> str | None:
    """Content as text; parts are joined as the server joins them."""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in content]
        if other := next((str(p.get("type")) for p in parts if not isinstance(p.get("text"), str)), None):
            raise BadRow(f"content of type {other[:40]} in a chat", f"{role} turn")
        content = "\n".join(part["text"] for part in parts)
    if content is not None and not isinstance(content, str):
        raise BadRow("content is not text", f"{role} turn: {type(content).__name__}")
    try:
        (content or "").encode()
    except UnicodeEncodeError:
        raise BadRow("half of a surrogate pair in the text", f"{role} turn") from None
    return content


def tool_calls(item: dict) -> list[dict]:
    """`tool_calls` (or the older `function_call`) with arguments as objects, as the server passes them on."""
    calls = item.get("tool_calls") or ([item["function_call"]] if item.get("function_call") else [])
    if not isinstance(calls, list):
        raise BadRow("tool_calls is not a list", type(calls).__name__)
    return [tool_call(call) for call in calls]


def tool_call(call: Any) -> dict:
    """One tool call; {"name", "arguments"} without the OpenAI envelope is wrapped."""
    call = call if isinstance(call, dict) else {}
    function = call.get("function") if isinstance(call.get("function"), dict) else call
    if not isinstance(function.get("name"), str):
        raise BadRow("a tool call has no function name")
    arguments = function.get("arguments", function.get("parameters")) or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise BadRow("arguments of a tool call are not JSON", function["name"]) from None
    out = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**out, "id": call["id"]} if isinstance(call.get("id"), str) else out


def calls_in_text(text: str | None) -> list[dict]:
    """A function_call turn's text: JSON of one call or of a list of calls."""
    try:
        value = json.loads(text or "")
    except ValueError:
        raise BadRow("a function_call turn is not JSON") from None
    return [tool_call(call) for call in (value if isinstance(value, list) else [value])]


def tool_list(value: dict) -> list[dict] | None:
    """The tools a chat offers: list or JSON text, bare functions wrapped."""
    tools = value.get("tools") or value.get("functions")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise BadRow("`tools` is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise BadRow("`tools` is not a list of objects")
    return [t if "function" in t else {"type": "function", "function": t} for t in without_null(tools)]


def without_null(value: Any) -> Any:
    """Drop null entries: a parquet column gives every row the fields of all rows."""
    if isinstance(value, dict):
        return {k: without_null(v) for k, v in value.items() if v is not None}
    return [without_null(v) for v in value] if isinstance(value, list) else value


# ---- which turns -------------------------------------------------------------------------------------------


def supervised_turns(messages: list[dict], answers: str, turns: str, history: str = "dataset") -> list[int]:
    """Where answers begin: index i means that the prompt is messages[:i].

    answers "dataset": every assistant turn after the first user turn (one that opens the chat is context).
    answers "own": every place at which the chat waits for an answer, whatever the data set has there.
    turns "last" keeps the last of them. With history "dataset" nothing behind an answer that the data set
    does not have (content null, no tool call) can be asked.

    Raises:
        BadRow: there is none.
    """
    asked = next((i for i, m in enumerate(messages) if m["role"] in ("user", "tool")), len(messages))
    places, end = [], len(messages)
    if history == "dataset":
        end = next((i for i, m in enumerate(messages) if m["content"] is None), end)
    for i in range(asked + 1, end + 1):
        is_answer = i < len(messages) and messages[i]["role"] == "assistant"
        if answers == "dataset":
            if is_answer and messages[i]["content"] is not None:
                places.append(i)
        elif (is_answer or i == len(messages)) and messages[i - 1]["role"] != "assistant":
            places.append(i)
    if not places:
        raise BadRow("no answer in the row" if answers == "dataset" else "no user turn")
    return places if turns == "all" else places[-1:]


def cut_oldest(messages: list[dict]) -> list[dict] | None:
    """The chat without its oldest exchange: up to the next user turn. System and developer turns stay.

    Returns:
        None if only the last exchange is left.
    """
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    first = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), 0)
    start = next((i for i in users if i > first), None)
    if start is None:
        return None
    return [m for i, m in enumerate(messages) if i >= start or m["role"] in ("system", "developer")]


# ---- rendering ---------------------------------------------------------------------------------------------


class Renderer:
    """Text and ids of a chat under one tokenizer.

    Args:
        tokenizer: the verifier's.
        folder: the verifier's; its generation_config.json names the end tokens.
        vocab_size: ids must lie below it.
    """

    def __init__(self, tokenizer, folder: Path, vocab_size: int):
        self.tokenizer, self.folder, self.vocab_size = tokenizer, Path(folder), vocab_size
        self.name = f"chat template of {self.folder.name}"
        self._inserted: dict[str, str] = {}

    @cached_property
    def template(self) -> str:
        """The template's source; a tokenizer without one can't render chats.

        Raises:
            ConfigError: it has none.
        """
        found = getattr(self.tokenizer, "chat_template", None)
        if not found:
            raise ConfigError(
                f"the tokenizer of {self.folder} has no chat template: put chat_template.jinja there"
            )
        return found if isinstance(found, str) else "\n".join(found.values())

    @cached_property
    def end_ids(self) -> set[int]:
        """Ids at which the server stops: generation config, config and tokenizer together."""
        found = [self.tokenizer.eos_token_id]
        for name in ("generation_config.json", "config.json"):
            if (file := self.folder / name).is_file():
                config = json.loads(file.read_text(encoding="utf-8"))
                for part in (config, config.get("text_config") or {}):
                    value = part.get("eos_token_id")
                    found += value if isinstance(value, list) else [value]
        return {i for i in found if i is not None}

    def check_ids(self, ids: list[int], what: str) -> None:
        """Raises BadRow for an id that the verifier has no embedding for."""
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise BadRow(f"{what} outside the vocabulary", f"id {bad}, vocabulary {self.vocab_size}")

    def text(self, messages: list[dict], tools: list[dict] | None, kwargs: dict, ask: bool) -> str:
        """The rendered chat; `ask` adds the generation prompt.

        Raises:
            BadRow: the template refuses the chat.
        """
        known = "developer" in self.template
        try:
            return self.tokenizer.apply_chat_template(
                messages if known else as_system(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=ask,
                **kwargs,
            )
        except ConfigError:
            raise
        except Exception as err:  # templates raise whatever they like, mostly jinja2's TemplateError
            raise BadRow(f"{self.name} refuses the chat", " ".join(str(err).split())[:200]) from None

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; the template has written every special token itself."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def prompt_text(self, messages: list[dict], tools: list[dict] | None, kwargs: dict) -> str:
        """Rendering up to and including the generation prompt.

        Raises:
            BadRow: the template refuses the chat, or silently leaves out system text or tool calls.
        """
        text = self.text(messages, tools, kwargs, ask=True)
        for m in messages:
            if m["role"] in ("system", "developer") and m["content"].strip() not in text:
                raise BadRow(f"{self.name} drops system text")
            if any(call["function"]["name"] not in text for call in m.get("tool_calls", ())):
                raise BadRow(f"{self.name} drops tool calls")
        return text

    def prompt(self, messages: list[dict], tools: list[dict] | None, kwargs: dict) -> list[int]:
        """Prompt ids of a chat that waits for an answer."""
        ids = self.encode(self.prompt_text(self.prepare(messages), tools, kwargs))
        self.check_ids(ids, "prompt ids")
        return ids

    def prepare(self, messages: list[dict]) -> list[dict]:
        """Move thinking that stands inside the content to its own field, if the template knows one."""
        if "reasoning" not in self.template:
            return messages
        return [split_thinking(m) for m in messages]

    def answered(self, messages: list[dict], at: int, tools: list[dict] | None, kwargs: dict):
        """Prompt ids and response ids of the data set's answer messages[at].

        Returns:
            (prompt_ids, response_ids); the response ends with the verifier's end token.

        Raises:
            BadRow: the template does not give the answer in the form in which it would be generated.
        """
        messages = self.prepare(messages[: at + 1])
        answer, before = messages[at], messages[:at]
        thought = answer.get("reasoning") or ""
        if not (answer["content"] or thought or answer.get("tool_calls")):
            raise BadRow("the answer is empty")
        prompt = self.prompt_text(before, tools, kwargs)
        rest = self.behind_prompt(prompt, messages, tools, kwargs)
        if not thought:
            inserted = self.inserted_block(kwargs)
            if inserted and rest.startswith(inserted):
                prompt, rest = prompt + inserted, rest[len(inserted) :]
        elif thought.strip() not in rest:
            rest = self.with_thought(prompt, rest, thought)
        pieces = [answer["content"] or "", *(c["function"]["name"] for c in answer.get("tool_calls", ()))]
        if any(piece.strip() not in rest for piece in pieces):
            raise BadRow(f"{self.name} drops or alters the answer")
        prompt_ids = self.encode(prompt)
        response_ids = self.until_end(self.continuation(prompt, prompt_ids, rest))
        self.check_ids(prompt_ids + response_ids, "ids of a rendered chat")
        return prompt_ids, response_ids

    def answer_turn(self, before: list[dict], ids: list[int], tools: list[dict] | None, kwargs: dict) -> dict:
        """A generated answer (ids without the end token) as the turn that a client would send back."""
        text = self.decode(ids)
        turn = {"role": "assistant", "content": text}
        if "reasoning" not in self.template:
            return turn
        opened = re.search(r"<(\w+)>\s*$", self.text(before, tools, kwargs, ask=True))
        if not opened:
            return split_thinking(turn)
        thought, closed, content = text.partition(f"</{opened[1]}>")
        # Without a closing tag the answer ended (at its limit) while it was still thinking.
        return {
            **turn,
            "content": content if closed else "",
            "reasoning": thought,
            "reasoning_content": thought,
        }

    def behind_prompt(self, prompt: str, messages: list[dict], tools, kwargs: dict) -> str:
        """What the full rendering has behind the generation prompt.

        Mostly the prompt's rendering is a prefix of the full one. It is not where the answer changes how
        earlier turns are rendered (Kimi strips the thinking of a tool-call turn once the final answer is
        there): then the generation prompt is looked up where the last turn begins, which is before the first
        character that a rendering with another answer does not share.
        """
        full = self.text(messages, tools, kwargs, ask=False)
        if full.startswith(prompt):
            return full[len(prompt) :]
        before = self.text(messages[:-1], tools, kwargs, ask=False)
        opening = prompt[len(before) :] if prompt.startswith(before) else ""
        other = self.text([*messages[:-1], {"role": "assistant", "content": PROBE}], tools, kwargs, ask=False)
        shared = next((i for i, (a, b) in enumerate(zip(full, other)) if a != b), min(len(full), len(other)))
        start = full.rfind(opening, 0, shared) if opening else -1
        if start < 0:
            raise BadRow(f"{self.name} renders an answer otherwise than it asks for one", "no common prefix")
        return full[start + len(opening) :]

    def inserted_block(self, kwargs: dict) -> str:
        """What the template writes between the generation prompt and an answer without reasoning."""
        key = json.dumps(kwargs, sort_keys=True, default=str)
        if key not in self._inserted:
            turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": PROBE}]
            ask, full = (
                self.text(turns[:1], None, kwargs, ask=True),
                self.text(turns, None, kwargs, ask=False),
            )
            block = full[len(ask) :].partition(PROBE)[0] if full.startswith(ask) else ""
            self._inserted[key] = block
        return self._inserted[key]

    def with_thought(self, prompt: str, rest: str, thought: str) -> str:
        """`rest` with the reasoning back in the empty block that the template left of it.

        Unchanged if the prompt itself closes the block: then the answer is wanted without thinking.
        """
        if re.search(r"<(\w+)>\s*</\1>\s*$", prompt):
            return rest
        opened = re.search(r"<(\w+)>\s*$", prompt)
        if opened and re.match(rf"\s*</{opened[1]}>", rest):
            return thought + rest.lstrip()
        if block := re.match(r"(\s*<(\w+)>)\s*(</\2>)", rest):
            return block[1] + thought + rest[block.start(3) :]
        raise BadRow(f"{self.name} drops the answer's reasoning")

    def continuation(self, prompt: str, prompt_ids: list[int], rest: str) -> list[int]:
        """Ids of `rest` as generated after `prompt_ids`.

        Raises:
            BadRow: no split of the ids stands at the boundary and separate ids give another text.
        """
        whole = self.encode(prompt + rest)
        if whole[: len(prompt_ids)] == prompt_ids:
            return whole[len(prompt_ids) :]
        ids = self.encode(rest)
        if self.decode(prompt_ids + ids) != self.decode(whole):
            raise BadRow(f"{self.name}: prompt and answer share a token")
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def until_end(self, ids: list[int]) -> list[int]:
        """Response ids through the end token, without what the template writes after it.

        Raises:
            BadRow: no end token, or one in the middle of the answer.
        """
        ends = [n for n, i in enumerate(ids) if i in self.end_ids]
        if not ends:
            raise BadRow(
                f"{self.name} closes the answer with none of the verifier's end tokens",
                f"end tokens {sorted(self.end_ids)}",
            )
        if len(ends) > 1 and ends[0] != ends[-1] - len(ends) + 1:
            raise BadRow("an end token inside the answer")
        return ids[: ends[0] + 1]


def as_system(messages: list[dict]) -> list[dict]:
    """developer -> system, all system text in one first turn: vLLM's way for templates without that role."""
    if not any(m["role"] == "developer" for m in messages):
        return messages
    texts = [m["content"] for m in messages if m["role"] in ("system", "developer") and m["content"]]
    others = [m for m in messages if m["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def split_thinking(m: dict) -> dict:
    """An assistant turn whose content begins with <think>...</think>: reasoning and content apart."""
    found = (
        m["role"] == "assistant" and not m.get("reasoning") and INLINE_THINKING.fullmatch(m["content"] or "")
    )
    if not found:
        return m
    return {**m, "content": found[2], "reasoning": found[1], "reasoning_content": found[1]}


# ---- history in the verifier's own words -------------------------------------------------------------------


def own_history(messages: list[dict], tools: list[dict] | None, kwargs: dict) -> dict | None:
    """The row's `history` value: earlier answers blanked; None if there are none to be given.

    Args:
        messages: the chat up to the supervised answer.
    """
    asked = next(i for i, m in enumerate(messages) if m["role"] in ("user", "tool"))
    turns, answers = [], 0
    for i, m in enumerate(messages):
        if m["role"] == "assistant" and i > asked and not m.get("tool_calls"):
            if turns[-1].get("content") is None:  # two in a row: one answer
                continue
            m, answers = {"role": "assistant", "content": None}, answers + 1
        turns.append(m)
    return {"messages": turns, "tools": tools, "kwargs": kwargs, "answers": answers} if answers else None


def next_prompt(renderer: Renderer, history: dict, answers: list[list[int]]) -> list[int]:
    """Prompt ids of the next generation of a `history: own` row: see the module's docstring.

    Args:
        history: the row's value.
        answers: ids that the verifier has answered so far, in order.

    Raises:
        BadRow: the template refuses the chat.
    """
    left, turns = list(answers), []
    for m in history["messages"]:
        if m["content"] is None:
            if not left:
                break
            ids = left.pop(0)
            while ids and ids[-1] in renderer.end_ids:
                ids = ids[:-1]
            m = renderer.answer_turn(turns, ids, history["tools"], history["kwargs"])
        turns.append(m)
    return renderer.prompt(turns, history["tools"], history["kwargs"])
