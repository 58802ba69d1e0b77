"""A verifier of Kimi-K2.5's shape, built from nothing in seconds, that speaks a small language of its own.

    python tests/kimi_tiny.py OUT [--shards 64] [--int4] [--seed 0]

Writes a complete model folder that vLLM serves with --language-model-only --trust-remote-code: config
nesting, tensor names, shards, tokenizer, chat template and processor as the real checkpoint has them (MLA
512 + 64, a dense first layer, routed and shared experts, yarn), 8 layers of width 256. Nothing is trained:
all follows from the seed.

The language. The next token is a function of the last token and of three digits that the context holds:

    mode (0-3), d2 (0-5), d3 (0-5) = fixed hashes of the tokens 2, 3 and 4 places before the latest role
    marker (<|im_user|>, <|im_system|>, <|im_assistant|>): in an answer, the last three tokens of the
    message answered.

Each mode chains the same 26 thinking words in an order of its own, then says </think>, then walks through
its own list of answer words (modes 0 and 1: everyday words in two orders; 2: code words, which prompts
ending in code or digits select; 3: Chinese, which prompts ending in Chinese select), then <|im_end|>. d2
says where the thinking starts, d3 where the answer starts: 144 different answers of 18 to 62 tokens, none
of which loops. A last token that is no word of the language counts as one fixed word, so even text sampled
off the path runs to its end.

How the layers compute it (in a plain basis; the stored weights are rotated by one random orthogonal matrix,
and the norm weights are random with their inverse folded into the matrices that read, so states are dense,
norms matter):

    embedding   T: one-hot of the word; E: the token's hashes; a constant; role marker or not; a random
                rest
    layer 0     three heads look exactly 2, 3 and 4 tokens back and copy E to P
    layer 1     one head finds the latest role marker (yarn positions give recency) and copies its P to D
    layers 1-7  D routes to the two experts of its mode, which hold its word table by halves; each layer
                replaces the word in O: after 8 layers it is the next token, after 5, 4 and 2 the words
                two, three and four steps ahead, after 1, 3, 6 and 7 words that mean nothing. The dense
                layer and the shared experts keep a runner-up in O. Other heads and units are random
                noise.
    head        reads O; the rows of tokens outside the language are small and random

So every layer changes the top token (a state taken one layer early names another word with the same
confidence), and the default auxiliary layers 2, 4, 5 hold, linearly, what a three-step draft needs, while
its token alone leaves four modes open. Run on CPU: a draft trained for 3 min on the recipe's 287 answers was
served at 3.94 tokens a step (3 draft tokens, 24 held-out chats); margins are 5 nats or more in fp32 and bf16.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import random
import sys
from pathlib import Path

FILES = Path(__file__).resolve().parent / "kimi_tiny_files"


def listed(text: str) -> list[str]:
    return text.split()


THINK = listed(
    "okay first consider check maybe since then compare recall simple pattern number value both"
    " sides again verify case small large left right holds follows therefore done"
)
GENERAL = listed(
    "the river stone maple bridge lantern harbor winter garden silver copper meadow signal engine"
    " window forest island market planet ribbon shadow thunder velvet whisper yellow anchor basket"
    " candle desert ember falcon glacier hollow orchard"
)
CODE = listed("def return while index array print assert lambda import yield tuple async")
CHINESE = listed("山水 河流 石桥 枫叶 灯笼 港口 冬天 花园 银色 铜钱 草地 信号 引擎 窗户")
WORDS = [
    " " + w for w in THINK + GENERAL + CODE
] + CHINESE  # as tokens: Latin words carry their leading space

BASE_VOCAB = 896  # 256 bytes and 640 merges
VOCAB = 1152
VOCAB_FILE = "kimi_tiny.tiktoken"
SPECIAL = {  # offset from the end of the byte-level vocabulary, as in the real one
    "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11, "<|tool_calls_section_end|>": 12, "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14, "<|tool_call_end|>": 15, "<|im_middle|>": 17, "<|media_begin|>": 18,
    "<|media_content|>": 19, "<|media_end|>": 20, "<|media_pad|>": 21, "<think>": 22, "</think>": 23,
    "[UNK]": 254, "[PAD]": 255,
}  # fmt: skip
ID = {name: BASE_VOCAB + offset for name, offset in SPECIAL.items()}
PLAIN = {
    "<think>",
    "</think>",
    *(name for name in SPECIAL if name.startswith("<|tool_call")),
}  # kept when decoding

LAYERS, HIDDEN, Q_RANK, KV_RANK, ROPE = 8, 256, 48, 512, 64
# Heads, and the non-rotary and value size of each. GPUs have prefill kernels for the real sizes only (vLLM
# 0.26 on an H200: "No valid MLA prefill backend found" for 16 and 80). They would cost a CPU most of its
# time: with more than one query position a step (extraction, speculation) vLLM's CPU MLA expands the whole
# context by kv_b_proj (8 heads x 128, 31 requests: 10 s a step, run).
GPU_HEADS, CPU_HEADS = (8, 128, 128), (4, 16, 80)
EXPERTS, TOP_K, DENSE, MOE, SCALING = 8, 2, 256, 128, 2.827
MODES, DIGITS, AHEAD = 4, 6, {2: 4, 4: 3, 5: 2, 8: 1}  # layer id -> how many steps ahead its word is
ROPE_PARAMETERS = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "rope_theta": 50000.0, "rope_type": "yarn", "type": "yarn",
}  # fmt: skip

TOP_LOGIT, RUNNER_UP, OFF_LOGIT = 13.0, 0.35, -2.0
TEXT = "language_model."  # prefix of the text model's tensors
VERIFIER_TENSORS = [TEXT + n for n in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")]


# --- vocabulary ---------------------------------------------------------------------------------------------


def byte_pair_ranks() -> dict[bytes, int]:
    """256 bytes, then BPE merges learnt from the language's words and the words of the prompts."""
    corpus = {tuple(bytes([b]) for b in w.encode()): 1000 for w in WORDS}
    corpus |= {tuple(bytes([b]) for b in w.encode()): 500 for w in SCHEMA_WORDS}
    for text in PROMPT_WORDS:
        for piece in (text, " " + text) if text.isascii() else (text,):
            corpus.setdefault(tuple(bytes([b]) for b in piece.encode()), 10)
    ranks = {bytes([b]): b for b in range(256)}
    words = [(list(word), count) for word, count in corpus.items()]
    pairs: dict[tuple[bytes, bytes], int] = {}
    places: dict[tuple[bytes, bytes], set[int]] = {}

    def count_word(i: int, sign: int) -> None:
        word, count = words[i]
        for pair in zip(word, word[1:]):
            pairs[pair] = pairs.get(pair, 0) + sign * count
            places.setdefault(pair, set()).add(i)

    for i in range(len(words)):
        count_word(i, 1)
    while len(ranks) < BASE_VOCAB:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if pairs[best] <= 0:
            raise ValueError(f"the corpus gives only {len(ranks)} tokens, {BASE_VOCAB} wanted")
        ranks[best[0] + best[1]] = len(ranks)
        for i in places[best]:
            count_word(i, -1)
            word, at = words[i][0], 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = [best[0] + best[1]]
                at += 1
            count_word(i, 1)
    return ranks


class Language:
    """What the verifier says: `next_token(ids)`, and `answer(prompt_ids)` up to and with <|im_end|>."""

    def __init__(self, seed: int = 0):
        ranks = byte_pair_ranks()
        self.ranks, self.ids = ranks, {w: ranks[w.encode()] for w in WORDS}
        self.end, self.think, self.unthink = ID["<|im_end|>"], ID["<think>"], ID["</think>"]
        self.markers = {ID["<|im_user|>"], ID["<|im_system|>"], ID["<|im_assistant|>"]}
        rng = random.Random(f"kimi-tiny-{seed}")
        token_bytes = {rank: token for token, rank in ranks.items()}

        def mode_of(token: int) -> int:
            raw = token_bytes.get(token, b"")
            if any(b > 127 for b in raw):
                return 3
            if raw and (
                raw.strip() in {w.encode() for w in CODE} or set(raw) & set(b"(){}[]=;_<>`0123456789")
            ):
                return 2
            return {b"?": 0, b".": 1}.get(raw, rng.randrange(2))

        draws = [(mode_of(v), rng.randrange(DIGITS), rng.randrange(DIGITS)) for v in range(VOCAB)]
        self.hashes: list[tuple[int, int, int]] = draws
        think, general, code, chinese = (
            [self.ids[w] for w in group]
            for group in (
                [" " + w for w in THINK],
                [" " + w for w in GENERAL],
                [" " + w for w in CODE],
                CHINESE,
            )
        )
        lists = [general, general, code + general[:14], chinese + general[-8:]]
        self.words = think + general + code + chinese
        self.think_words = set(think)
        self.known = [self.think, self.unthink, *self.words]  # tokens with a place of their own in T
        self.alias = {v: v if v in self.known else rng.choice(self.words) for v in range(VOCAB)}
        # follow[mode][token] = next token, or six of them by digit (1 = d2, 2 = d3)
        self.follow: list[dict[int, int | tuple[int, list[int]]]] = []
        for mode in range(MODES):
            thoughts, answer = rng.sample(think, len(think)), rng.sample(lists[mode], len(lists[mode]))
            table: dict = dict(zip(thoughts, [*thoughts[1:], self.unthink]))
            table |= dict(zip(answer, [*answer[1:], self.end]))
            table |= {w: rng.choice(answer) for w in self.words if w not in table}
            starts = [rng.randrange(3 * i, 3 * i + 3) for i in range(DIGITS)]  # 9 to 26 thinking words
            table[self.think] = (1, [thoughts[i] for i in starts])
            step = int(0.6 * len(answer)) // DIGITS
            starts = [rng.randrange(step * i, step * i + step) for i in range(DIGITS)]
            table[self.unthink] = (2, [answer[i] for i in starts])
            self.follow.append(table)
        other = [*self.words, self.unthink, self.end]
        # Words that mean nothing, for the layers in between, and the runner-up of dense and shared experts.
        self.noise = {
            k: [{t: rng.choice(other) for t in self.known} for _ in range(MODES)] for k in (3, 6, 7)
        }
        self.runner_up = [{t: rng.choice(other) for t in self.known} for _ in range(LAYERS + 1)]
        self.first = {t: rng.choice(other) for t in self.known}
        for mode in range(MODES):  # a layer early must never be right by chance
            for token, word in self.noise[7][mode].items():
                reachable = self.options(mode, token, 8)
                while word in reachable:
                    word = rng.choice(other)
                self.noise[7][mode][token] = word

    def step(self, token: int, digits: tuple[int, int, int]) -> int:
        if token == self.end:
            return self.end
        nxt = self.follow[digits[0]][token]
        return nxt if isinstance(nxt, int) else nxt[1][digits[nxt[0]]]

    def word(self, layer: int, token: int, digits: tuple[int, int, int]) -> int:
        """The word in O after `layer` layers, at a position whose token is `token`."""
        if layer in AHEAD:
            for _ in range(AHEAD[layer]):
                token = self.step(token, digits)
            return token
        return self.first[token] if layer == 1 else self.noise[layer][digits[0]][token]

    def options(self, mode: int, token: int, layer: int) -> set[int]:
        every = range(DIGITS)
        return {self.word(layer, token, (mode, d2, d3)) for d2 in every for d3 in every}

    def digits(self, ids: list[int]) -> tuple[int, int, int]:
        """What the context holds: hashes of the tokens 2, 3 and 4 before the latest role marker."""
        at = max(i for i, token in enumerate(ids) if token in self.markers)
        # Near the start, the head whose place lies before the text settles on the first token.
        mode, d2, d3 = (self.hashes[ids[max(at - back, 0)]][i] for i, back in enumerate((2, 3, 4)))
        return mode, d2, d3

    def next_token(self, ids: list[int]) -> int:
        return self.step(self.alias[ids[-1]], self.digits(ids))

    def answer(self, prompt_ids: list[int]) -> list[int]:
        """The greedy answer, <|im_end|> included."""
        digits, token, out = self.digits(prompt_ids), self.alias[prompt_ids[-1]], []
        while not out or out[-1] != self.end:
            token = self.step(token, digits)
            out.append(token)
        return out


# --- weights ------------------------------------------------------------------------------------------------


def yarn_frequencies() -> list[float]:
    p, dim = ROPE_PARAMETERS, ROPE

    def dim_of(rotations: float) -> float:
        turns = p["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(p["rope_theta"]))

    low, high = max(math.floor(dim_of(p["beta_fast"])), 0), min(math.ceil(dim_of(p["beta_slow"])), dim - 1)
    out = []
    for i in range(dim // 2):
        frequency = p["rope_theta"] ** (-2 * i / dim)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(frequency / p["factor"] * ramp + frequency * (1 - ramp))
    return out


class Space:
    """The plain basis of the residual stream: slices of its dimensions, and the rotation to disk."""

    def __init__(self, language: Language, generator):
        import torch

        self.targets = [*language.words, language.unthink, language.end]
        sizes = {
            "T": len(language.known), "O": len(self.targets),
            "E": MODES + 2 * DIGITS, "P": MODES + 2 * DIGITS, "D": MODES + 2 * DIGITS, "one": 1, "marker": 1,
        }  # fmt: skip
        self.at, start = {}, 0
        for name, size in sizes.items():
            self.at[name] = range(start, start + size)
            start += size
        self.rest = range(start, HIDDEN)
        self.t = {token: self.at["T"][i] for i, token in enumerate(language.known)}
        self.o = {token: self.at["O"][i] for i, token in enumerate(self.targets)}
        self.one, self.marker = self.at["one"][0], self.at["marker"][0]
        self.groups = [
            range(0, MODES),
            range(MODES, MODES + DIGITS),
            range(MODES + DIGITS, MODES + 2 * DIGITS),
        ]
        normal = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
        self.rotation = torch.linalg.qr(normal)[0]


class Builder:
    """All tensors of the text model, from a language and a seed."""

    def __init__(self, language: Language, seed: int, heads: tuple[int, int, int] = CPU_HEADS):
        import torch

        self.torch, self.language, self.heads = torch, language, heads
        self.generator = torch.Generator().manual_seed(seed)
        self.space = Space(language, self.generator)
        self.tensors: dict = {}
        # Noise stays out of these: the marker's score of 600 must be right within a nat, digits open gates.
        self.clean = [d for name in ("T", "E", "P", "D", "one", "marker") for d in self.space.at[name]]
        # Squared length of the residual stream: T, E, the constant, the rest; then P, D and what O holds.
        self.word_size = [0.0] + [1.0 + 0.25 * k for k in range(LAYERS)]

    def normal(self, *shape, std=1.0):
        return self.torch.randn(*shape, generator=self.generator, dtype=self.torch.float64) * std

    def zeros(self, *shape):
        return self.torch.zeros(*shape, dtype=self.torch.float64)

    def gain(self, size: int):
        """Random norm weights, whose inverse goes into the matrix that reads the normed vector."""
        raw = self.torch.rand(size, generator=self.generator, dtype=self.torch.float64)
        return (0.6 + 0.9 * raw).to(self.torch.bfloat16).to(self.torch.float64)

    def put(self, name: str, tensor, dtype=None) -> None:
        self.tensors[TEXT + name] = tensor.to(dtype or self.torch.bfloat16).contiguous()

    def unit(self, layer: int, attended: bool) -> float:
        """A component of size 1 in the residual stream, as the norm before the attention or MLP shows it."""
        copied = (3.0 if layer > 0 or attended else 0.0) + (
            3.0 if layer > 1 or (layer == 1 and attended) else 0.0
        )
        return math.sqrt(HIDDEN / (6.0 + copied + self.word_size[layer] ** 2 * (1 + RUNNER_UP**2)))

    def reads(self, matrix, gain):
        return (matrix @ self.space.rotation) / gain

    def writes(self, matrix):
        return self.space.rotation.T @ matrix

    def build(self) -> dict:
        self.embedding()
        for layer in range(LAYERS):
            name = f"model.layers.{layer}."
            gain = self.gain(HIDDEN)
            self.put(name + "input_layernorm.weight", gain)
            self.attention(name + "self_attn.", layer, gain)
            gain = self.gain(HIDDEN)
            self.put(name + "post_attention_layernorm.weight", gain)
            if layer == 0:
                self.dense(name + "mlp.", gain)
            else:
                self.experts(name + "mlp.", layer, gain)
        self.head()
        return self.tensors

    def embedding(self) -> None:
        space, language = self.space, self.language
        table = self.zeros(VOCAB, HIDDEN)
        rest = self.normal(VOCAB, len(space.rest))
        table[:, list(space.rest)] = rest / rest.norm(dim=1, keepdim=True)
        for token in range(VOCAB):
            table[token, space.t[language.alias[token]]] = 1.0
            for group, digit in zip(space.groups, language.hashes[token]):
                table[token, space.at["E"][group[digit]]] = 1.0
            table[token, space.one] = 1.0
            if token in language.markers:  # in place of the rest, so that all embeddings are equally long
                table[token, list(space.rest)] = 0.0
                table[token, space.marker] = 1.0
        self.put("model.embed_tokens.weight", table @ space.rotation)

    def attention(self, name: str, layer: int, gain) -> None:
        """Random heads everywhere; in layers 0 and 1 the first heads are the ones the language needs."""
        space, (heads, nope, v_dim) = self.space, self.heads
        unit = self.unit(layer, False)
        quiet = layer < 2  # positions and digits must come out clean there
        q_a = self.normal(Q_RANK, HIDDEN, std=(0.02 if quiet else 0.4) / 16)
        q_a[0] = 0.0
        q_a[0, space.one] = 1.0 / unit
        kv_a = self.normal(KV_RANK + ROPE, HIDDEN, std=(0.005 if quiet else 1.0) / 16)
        q_b = self.normal(heads, nope + ROPE, Q_RANK, std=0.5 / math.sqrt(Q_RANK))
        kv_b = self.normal(heads, nope + v_dim, KV_RANK, std=(0.3 if quiet else 1.0) / math.sqrt(KV_RANK))
        o = self.normal(HIDDEN, heads, v_dim, std=(0.1 if quiet else 0.5) / math.sqrt(HIDDEN * heads * v_dim))
        o[self.clean] = 0.0
        if quiet:
            # The key's rotary part is the same for all tokens: pairs (4, 0), turned by the position alone.
            kv_a[KV_RANK:] = 0.0
            kv_a[KV_RANK::2, space.one] = 4.0 / unit
            source, size = ("E", 3) if layer == 0 else ("P", 5)  # how many ones the latent vector holds
            for i, dim in enumerate(space.at[source]):
                kv_a[i] = 0.0
                kv_a[i, dim] = 1.0 / unit
            digits = len(space.at[source])
            if layer == 1:
                kv_a[digits : digits + 2] = 0.0
                kv_a[digits, space.marker] = 1.0 / unit
                kv_a[digits + 1, space.one] = 1.0 / unit
            latent = math.sqrt(KV_RANK / size)  # what a one becomes under the latent's norm
            constant = math.sqrt(Q_RANK)  # what the query's constant becomes under its norm
            scale = (nope + ROPE) ** -0.5 * (0.1 * math.log(ROPE_PARAMETERS["factor"]) + 1) ** 2
            if layer == 0:
                needed = [(self.exactly(back), space.groups[i]) for i, back in enumerate((2, 3, 4))]
            else:
                needed = [(self.recency(), range(digits))]
            for head, (turned, group) in enumerate(needed):
                q_b[head], kv_b[head], o[:, head] = 0.0, 0.0, 0.0
                q_b[head, nope:, 0] = turned / (scale * 4.0 * constant)
                if layer == 1:
                    q_b[head, 0, 0] = 30.0 / constant
                    kv_b[head, 0, digits] = 620.0 / (30.0 * scale * latent)  # beats any difference in recency
                for i, digit in enumerate(group):
                    kv_b[head, nope + i, digit] = 1.0 / latent
                    o[space.at["P" if layer == 0 else "D"][digit], head, i] = 1.0
        q_gain, kv_gain = self.gain(Q_RANK), self.gain(KV_RANK)
        self.put(name + "q_a_proj.weight", self.reads(q_a, gain))
        self.put(name + "q_a_layernorm.weight", q_gain)
        self.put(name + "q_b_proj.weight", q_b.reshape(-1, Q_RANK) / q_gain)
        self.put(name + "kv_a_proj_with_mqa.weight", self.reads(kv_a, gain))
        self.put(name + "kv_a_layernorm.weight", kv_gain)
        self.put(name + "kv_b_proj.weight", kv_b.reshape(-1, KV_RANK) / kv_gain)
        self.put(name + "o_proj.weight", self.writes(o.reshape(HIDDEN, -1)))

    def exactly(self, back: int):
        """Rotary query that scores highest exactly `back` tokens ago, by 12 nats over its neighbours."""
        turned = self.zeros(ROPE)
        for i, frequency in enumerate(yarn_frequencies()[:16]):
            turned[2 * i] = 12.5 * math.cos(frequency * back)
            turned[2 * i + 1] = -12.5 * math.sin(frequency * back)
        return turned

    def recency(self):
        """Rotary query whose score falls with the distance: by 1.4 a token at first, then logarithmically."""
        torch = self.torch
        frequencies = torch.tensor(yarn_frequencies()[:20], dtype=torch.float64)
        distance = torch.arange(4096, dtype=torch.float64)
        wanted = -100.0 * torch.log1p(distance / 100.0)
        wanted = wanted - wanted[-1] / 2
        weight = torch.where(distance < 200, 3.0, torch.where(distance < 1200, 1.0, 0.3)).double()
        angles = distance[:, None] * frequencies
        design = torch.cat([angles.cos(), angles.sin()], 1) * weight[:, None]
        normal = design.T @ design + torch.eye(2 * len(frequencies), dtype=torch.float64)
        found = torch.linalg.solve(normal, design.T @ (wanted * weight))
        turned = self.zeros(ROPE)
        turned[0 : 2 * len(frequencies) : 2] = 1.4 * found[: len(frequencies)]
        turned[1 : 2 * len(frequencies) : 2] = -1.4 * found[len(frequencies) :]
        return turned

    def change(self, words: dict[int, float]):
        """A column that adds these amounts to the words in O."""
        column = self.zeros(HIDDEN)
        for word, amount in words.items():
            column[self.space.o[word]] += amount
        return column

    def mlp(self, name: str, units: list, width: int, gain, unit: float, noise: float) -> None:
        """A gated MLP; a unit is ({dim: amount}, threshold, dim let through, column added), others noise."""
        gate, up = self.normal(width, HIDDEN, std=1 / 16), self.normal(width, HIDDEN, std=1 / 16)
        down = self.normal(HIDDEN, width, std=noise / math.sqrt(HIDDEN * width) / 0.4)
        down[self.clean] = 0.0
        for i, (when, threshold, passes, column) in enumerate(units):
            gate[i], up[i] = 0.0, 0.0
            for dim, amount in when.items():
                gate[i, dim] += amount / unit
            gate[i, self.space.one] -= threshold / unit
            up[i, passes] = 1.0 / unit
            down[:, i] = column / 8.0  # an open gate is 8
        assert len(units) <= width, f"{name}: {len(units)} units in a width of {width}"
        self.put(name + "gate_proj.weight", self.reads(gate, gain))
        self.put(name + "up_proj.weight", self.reads(up, gain))
        self.put(name + "down_proj.weight", self.writes(down))

    def dense(self, name: str, gain) -> None:
        space, language, size = self.space, self.language, self.word_size[1]
        units = []
        for token in language.known:
            dim = space.t[token]
            column = self.change({language.first[token]: size}) + self.change(
                {language.runner_up[1][token]: size * RUNNER_UP}
            )
            units.append(({dim: 8.0}, 0.0, dim, column))
        self.mlp(name, units, DENSE, gain, self.unit(0, True), 0.15)

    def experts(self, name: str, layer: int, gain) -> None:
        """Layer index `layer` turns O after `layer` layers into O after `layer` + 1."""
        torch, space, language = self.torch, self.space, self.language
        unit, old, new = self.unit(layer, True), self.word_size[layer], self.word_size[layer + 1]
        router = self.normal(EXPERTS, HIDDEN, std=0.02 / 16)
        modes = [space.at["D"][i] for i in space.groups[0]]
        for expert in range(EXPERTS):
            router[expert, modes] = -3.0 / unit
            router[expert, modes[expert // 2]] = 5.0 / unit
        self.put(name + "gate.weight", self.reads(router, gain))
        bias = self.normal(EXPERTS, std=0.02)
        self.put(name + "gate.e_score_correction_bias", bias, torch.float32)
        shared = []
        for token in language.known:
            before, after = language.runner_up[layer][token], language.runner_up[layer + 1][token]
            column = self.change({after: new * RUNNER_UP}) - self.change({before: old * RUNNER_UP})
            shared.append(({space.t[token]: 8.0}, 0.0, space.t[token], column))
        self.mlp(name + "shared_experts.", shared, MOE, gain, unit, 0.1)
        for expert in range(EXPERTS):
            mode, half = divmod(expert, 2)
            units = []
            for token in language.known[half::2]:
                units += self.word_units(layer, token, mode, old, new)
            # Two experts share a weight of SCALING, and only one of them holds the token.
            units = [(when, low, passes, column * 2 / SCALING) for when, low, passes, column in units]
            self.mlp(f"{name}experts.{expert}.", units, MOE, gain, unit, 0.1)

    def word_units(self, layer: int, token: int, mode: int, old: float, new: float) -> list:
        """Units that replace a token's old word by its new one; one for each digit the word hangs on."""
        space, language, dim, out = self.space, self.language, self.space.t[token], []
        always = self.zeros(HIDDEN)
        for which, size in ((layer, -old), (layer + 1, new)):
            by_digit = {}
            for group in (1, 2):
                digits = [[mode, 0, 0] for _ in range(DIGITS)]
                for d in range(DIGITS):
                    digits[d][group] = d
                by_digit[group] = [language.word(which, token, tuple(d)) for d in digits]
            varying = [group for group, words in by_digit.items() if len(set(words)) > 1]
            assert len(varying) < 2, "a word may hang on one digit only"
            if not varying:
                always += self.change({by_digit[1][0]: size})
                continue
            for d, word in enumerate(by_digit[varying[0]]):
                both = {dim: 16.0, space.at["D"][space.groups[varying[0]][d]]: 16.0}
                out.append((both, 24.0, dim, self.change({word: size})))
        return [({dim: 8.0}, 0.0, dim, always), *out]

    def head(self) -> None:
        space, gain = self.space, self.gain(HIDDEN)
        unit = math.sqrt(HIDDEN / (12.0 + self.word_size[LAYERS] ** 2 * (1 + RUNNER_UP**2)))
        rows = self.normal(VOCAB, HIDDEN, std=1 / 16)
        rows[:, list(space.at["O"])] *= 0.3
        rows[:, space.one] += OFF_LOGIT / unit
        for token, dim in space.o.items():
            rows[token] *= 0.5
            rows[token, dim] += TOP_LOGIT / (unit * self.word_size[LAYERS])
            rows[token, space.one] -= 0.5 * OFF_LOGIT / unit
        self.put("model.norm.weight", gain)
        self.put("lm_head.weight", self.reads(rows, gain))


def vision_tensors(seed: int, decoys: bool) -> dict:
    """Vision tower and projector under the real names; decoys end like the text model's, in their shapes."""
    import torch

    generator = torch.Generator().manual_seed(seed + 1)
    width, mlp, patch, merged = 32, 64, 14, 4 * 32
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, *shape: int) -> None:
        shapes[name + ".weight"], shapes[name + ".bias"] = shape, shape[:1]

    linear("vision_tower.patch_embed.proj", width, 3, patch, patch)
    shapes["vision_tower.patch_embed.pos_emb.weight"] = (8, 8, width)
    for block in range(2):
        name = f"vision_tower.encoder.blocks.{block}."
        linear(name + "norm0", width)
        linear(name + "norm1", width)
        linear(name + "wqkv", 3 * width, width)
        linear(name + "wo", width, width)
        linear(name + "mlp.fc0", mlp, width)
        linear(name + "mlp.fc1", width, mlp)
    linear("vision_tower.encoder.final_layernorm", width)
    linear("mm_projector.pre_norm", width)
    linear("mm_projector.proj.0", merged, merged)
    linear("mm_projector.proj.2", HIDDEN, merged)
    if decoys:
        shapes["vision_tower.norm.weight"] = (HIDDEN,)
        shapes["vision_tower.encoder.norm.weight"] = (HIDDEN,)
        shapes["vision_tower.model.norm.weight"] = (HIDDEN,)
        shapes["vision_tower.embed_tokens.weight"] = (VOCAB, HIDDEN)
        shapes["vision_tower.model.embed_tokens.weight"] = (VOCAB, HIDDEN)
        shapes["vision_tower.lm_head.weight"] = (VOCAB, HIDDEN)
    return {n: (torch.randn(*s, generator=generator) * 0.02).to(torch.bfloat16) for n, s in shapes.items()}


def pack_int4(weight) -> dict:
    """compressed-tensors' pack-quantized form: groups of 32 along the input, symmetric, eight to an int32."""
    import torch

    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // 32, 32)
    scale = (groups.abs().amax(-1) / 7.5).clamp_min(1e-8).to(torch.bfloat16)
    values = (groups / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int64) + 8
    values = values.reshape(rows, columns // 8, 8)
    packed = (values << (4 * torch.arange(8))).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }


def unpack_int4(packed, scale):
    import torch

    values = ((packed.to(torch.int64)[..., None] >> (4 * torch.arange(8))) & 15) - 8
    rows = packed.shape[0]
    return (values.reshape(rows, -1, 32).float() * scale.float()[..., None]).reshape(rows, -1)


# --- the folder ---------------------------------------------------------------------------------------------

QUANTIZATION = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip


def config(int4: bool, heads: tuple[int, int, int]) -> dict:
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": ID["[BOS]"],
        "eos_token_id": ID["[EOS]"],
        "pad_token_id": ID["[PAD]"],
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": DENSE,
        "kv_lora_rank": KV_RANK,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": MOE,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": heads[0],
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": heads[0],
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": Q_RANK,
        "qk_nope_head_dim": heads[1],
        "qk_rope_head_dim": ROPE,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {k: v for k, v in ROPE_PARAMETERS.items() if k not in ("rope_theta", "rope_type")},
        "rope_theta": ROPE_PARAMETERS["rope_theta"],
        "routed_scaling_factor": SCALING,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "v_head_dim": heads[2],
        "vocab_size": VOCAB,
    }
    if int4:
        text["quantization_config"] = QUANTIZATION  # in the text config only, as in the real file
    vision = {
        # The names of the checkpoint's own code, then those of transformers' class; both readers are in use.
        "init_pos_emb_height": 8, "init_pos_emb_time": 4, "init_pos_emb_width": 8,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool", "mm_hidden_size": 32, "mm_projector_type": "patchmerger", "patch_size": 14,
        "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05,
        "text_hidden_size": HIDDEN, "video_attn_type": "spatial_temporal", "vt_hidden_size": 32,
        "vt_intermediate_size": 64, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 2,
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
        "pos_emb_height": 8, "pos_emb_time": 4, "pos_emb_width": 8,
    }  # fmt: skip
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_tiny.KimiTinyConfig"},
        "bos_token_id": ID["[BOS]"],
        "dtype": "bfloat16",
        "eos_token_id": ID["[EOS]"],
        "ignore_index": -100,
        "image_token_id": ID["<|media_pad|>"],
        "media_placeholder_token_id": ID["<|media_pad|>"],
        "model_type": "kimi_k25",
        "pad_token_id": ID["[PAD]"],
        "text_config": text,
        "tie_word_embeddings": True,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": vision,
    }


def write_tokenizer(out: Path, language: Language, vocab_file: str) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in language.ranks.items()]
    (out / vocab_file).write_text("".join(lines), encoding="ascii")
    names = {offset: name for name, offset in SPECIAL.items()}
    added = {}
    for offset in range(VOCAB - BASE_VOCAB):
        name = names.get(offset, f"<|reserved_token_{BASE_VOCAB + offset}|>")
        added[str(BASE_VOCAB + offset)] = {
            "content": name, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": name not in PLAIN,
        }  # fmt: skip
    write_json(
        out / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            "additional_special_tokens": [n for n in SPECIAL if n.startswith("<|im_")] + ["[EOT]"],
            "auto_map": {"AutoTokenizer": ["tokenization_kimi_tiny.KimiTinyTokenizer", None]},
            "bos_token": "[BOS]",
            "clean_up_tokenization_spaces": False,
            "eos_token": "[EOS]",
            "model_max_length": 262144,
            "pad_token": "[PAD]",
            "tokenizer_class": "KimiTinyTokenizer",
            "unk_token": "[UNK]",
        },
    )


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def shard_names(tensors: dict, shards: int) -> dict[str, int]:
    """Which shard (from 0) holds which tensor: layers, then embedding, norm and head, projector, tower."""

    def place(name: str) -> tuple:
        part = name.removeprefix(TEXT).split(".")
        if name.startswith(TEXT) and part[1] == "layers":
            return 0, int(part[2]), name
        return (1 if name.startswith(TEXT) else 2 if name.startswith("mm_projector.") else 3), 0, name

    order = sorted(tensors, key=place)
    if not 1 <= shards <= len(order):
        raise ValueError(f"{shards} shards for {len(order)} tensors: each needs at least one")
    if shards < 4:
        return {name: i * shards // len(order) for i, name in enumerate(order)}
    layers = [name for name in order if place(name)[0] == 0]
    text, projector, tower = ([n for n in order if place(n)[0] == kind] for kind in (1, 2, 3))
    spread = min(shards - 3, len(layers))
    out = {name: i * spread // len(layers) for i, name in enumerate(layers)}
    spare = shards - spread - 3  # more shards than layer tensors: the tower's are spread too
    out |= dict.fromkeys(text, spread) | dict.fromkeys(projector, spread + 1)
    out |= {name: spread + 2 + min(i, spare) for i, name in enumerate(tower)}
    if len(set(out.values())) != shards:
        return {name: i * shards // len(order) for i, name in enumerate(order)}
    return out


def build(
    out: Path,
    shards: int = 64,
    int4: bool = False,
    seed: int = 0,
    *,
    heads: tuple[int, int, int] | None = None,
    decoys: bool = True,
    drop: tuple[str, ...] = (),
    extra: dict | None = None,
    outer: dict | None = None,
    text: dict | None = None,
    vocab_file: str = VOCAB_FILE,
) -> Path:
    """Build the model folder. `heads`: how many, and the non-rotary and value size of each; by default what
    the machine at hand can run (see GPU_HEADS). For fault cases: leave tensors out (`drop`), add or replace
    some (`extra`, name -> tensor), and change keys of the outer (`outer`) or text config (`text`); None
    removes one. vocab_file="tiktoken.model" is the real name, which transformers 5 reads without
    trust_remote_code.
    """
    from safetensors.torch import save_file

    if heads is None:
        import torch

        heads = GPU_HEADS if torch.cuda.is_available() else CPU_HEADS
    language = Language(seed)
    tensors = Builder(language, seed, heads).build()
    if int4:
        for name in [n for n in tensors if ".mlp.experts." in n]:
            stem = name.removesuffix("weight")
            tensors |= {stem + key: value for key, value in pack_int4(tensors.pop(name)).items()}
    tensors |= vision_tensors(seed, decoys)
    tensors |= extra or {}
    for name in drop:
        del tensors[name]

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("model-*-of-*.safetensors"), out / "model.safetensors.index.json"):
        old.unlink(missing_ok=True)
    shard_of = shard_names(tensors, shards)
    files = [f"model-{i + 1:05d}-of-{shards:06d}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        save_file(
            {n: tensors[n] for n, s in shard_of.items() if s == i}, out / file, metadata={"format": "pt"}
        )
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    weight_map = {name: files[shard_of[name]] for name in sorted(tensors)}
    write_json(
        out / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map}
    )

    settings = config(int4, heads)
    for target, changes in ((settings, outer or {}), (settings["text_config"], text or {})):
        for key, value in changes.items():
            if value is None:
                target.pop(key, None)
            else:
                target[key] = value
    write_json(out / "config.json", settings)
    write_json(
        out / "generation_config.json",
        {"bos_token_id": ID["[BOS]"], "eos_token_id": [ID["<|im_end|>"], ID["[EOS]"]], "max_length": 262144},
    )
    write_json(
        out / "preprocessor_config.json",
        {
            "auto_map": {"AutoImageProcessor": "image_processing_kimi_tiny.KimiTinyImageProcessor"},
            "image_processor_type": "KimiTinyImageProcessor",
            "media_proc_cfg": {
                "in_patch_limit": 256, "patch_size": 14,
                "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
                "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 64,
                "in_patch_limit_each_frame": 64, "in_patch_limit_video": None, "sample_fps": 2.0,
                "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4,
                "timestamp_mode": "hh:mm:ss.fff",
                "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
            },
        },
    )  # fmt: skip
    write_tokenizer(out, language, vocab_file)
    for file in FILES.iterdir():
        if file.suffix in (".py", ".jinja"):
            content = file.read_text(encoding="utf-8").replace(VOCAB_FILE, vocab_file)
            (out / file.name).write_text(content, encoding="utf-8")
    return out


def load_text_model(folder: Path, dtype=None):
    """transformers' DeepseekV3ForCausalLM on the folder's text weights (INT4 experts unpacked)."""
    import torch
    from safetensors import safe_open
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    dtype = dtype or torch.bfloat16
    folder = Path(folder)
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    text.pop("quantization_config", None)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    stored = {}
    for file in sorted({f for n, f in index.items() if n.startswith(TEXT)}):
        with safe_open(folder / file, "pt") as shard:
            names = [n for n in shard.keys() if n.startswith(TEXT)]  # noqa: SIM118, it is no dict
            stored |= {n.removeprefix(TEXT): shard.get_tensor(n) for n in names}
    for name in [n for n in stored if n.endswith(".weight_packed")]:
        stem = name.removesuffix("_packed")
        stored[stem] = unpack_int4(stored.pop(name), stored.pop(stem + "_scale"))
        del stored[stem + "_shape"]
    settings = DeepseekV3Config(**text)
    for layer in range(settings.first_k_dense_replace, settings.num_hidden_layers):
        stem = f"model.layers.{layer}.mlp.experts."
        parts = {
            p: [stored.pop(f"{stem}{e}.{p}_proj.weight") for e in range(EXPERTS)]
            for p in ("gate", "up", "down")
        }
        stored[stem + "gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], 1)
        stored[stem + "down_proj"] = torch.stack(parts["down"])
    model = DeepseekV3ForCausalLM(settings)
    model.load_state_dict(stored)
    bias = {n: b.clone() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    model = model.to(dtype).eval()
    for name, value in bias.items():
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = value
    return model


# --- chats --------------------------------------------------------------------------------------------------

PROMPT_WORDS = listed(
    "please explain describe list write show how what why where which does into from with about"
    " between after before cloud paper train clock music salt violin letter orange castle doctor"
    " summer bicycle mirror kitchen painter ocean pencil tiger ladder pocket village camera blanket"
    " sailor question answer story price weather travel history plan number sum minus times equals"
    " total city temperature 请 解释 描述 为什么 怎么 什么 写 一个 关于 的 故事 天气 北京 上海 计算"
    " 数字 朋友 问题 今天 明天 喜欢 学习"
)

# What JSON schemas and calls of tools are made of.
SCHEMA_WORDS = [
    *listed("type function name parameters object properties string city temperature functions tool declare"),
    *(" Return", " of", "get", "user", "assistant", "system", "##", "_"),
    *('[{"', '":', ' "', '",', ' {"', '"}}', '"}', "}}]", '"}}}}]', '{"'),
]


def prompts(n: int, seed: int = 0) -> list[dict]:
    """`n` chats: {"id", "domain", "messages"}, "tools" where there are some. A larger n starts the same.

    The assistant turns are stand-ins (the verifier answers on-policy); what matters is each chat's shape.
    """
    out = []
    for i in range(n):
        rng = random.Random(f"kimi-tiny-prompts-{seed}-{i}")
        domain = ("chat", "zh", "code", "maths", "tools", "multi-turn", "thinking", "system")[i % 8]
        row = {"id": f"kimi-tiny-{seed}-{i:04d}", "domain": domain, **chat(domain, rng)}
        out.append(row)
    return out


def chat(domain: str, rng: random.Random) -> dict:
    english = [w for w in PROMPT_WORDS if w.isascii()]
    chinese = [w for w in PROMPT_WORDS if not w.isascii()]
    names = THINK + GENERAL

    def ask() -> str:
        words = [rng.choice(english if rng.random() < 0.6 else names) for _ in range(rng.randint(6, 16))]
        return " ".join(words).capitalize() + rng.choice(("?", ".", "", "!"))

    def ask_zh() -> str:
        return "".join(rng.choice(chinese) for _ in range(rng.randint(5, 11))) + rng.choice(("？", "。", ""))

    def say() -> str:
        return " ".join(rng.sample(GENERAL, rng.randint(3, 9)))

    def turn(role: str, content: str | None, **more) -> dict:
        return {"role": role, "content": content, **more}

    if domain == "zh":
        answer = "".join(rng.sample(CHINESE, 4))
        return {"messages": [turn("user", ask_zh()), turn("assistant", answer)]}
    if domain == "code":
        names = rng.sample(GENERAL, 3)
        head = f"def {names[0]}_{names[1]}({names[2]}, n={rng.randint(2, 99)}):"
        body = f"{head}\n    return [{rng.choice(english)}]"
        tail = rng.choice(("", f"\nprint({names[0]}_{names[1]}({rng.randint(100, 999)}))", "\n```"))
        return {"messages": [turn("user", f"{ask()}\n{body}{tail}"), turn("assistant", f"return {say()}")]}
    if domain == "maths":
        a, b, c = (rng.randint(2, 9999) for _ in range(3))
        text = f"{ask()} {a} {rng.choice('+-*')} {b} = {rng.choice(('', str(c), '?'))}".strip()
        return {"messages": [turn("user", text), turn("assistant", str(a + b))]}
    if domain == "tools":
        city, name = rng.choice(english), "get_" + rng.choice(GENERAL)
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        call = {
            "id": f"functions.{name}:0",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps({"city": city})},
        }
        result = json.dumps({"city": city, "temperature": rng.randint(-20, 40)})
        return {
            "tools": [{"type": "function", "function": {"name": name, "parameters": schema}}],
            "messages": [
                turn("user", ask()),
                turn("assistant", None, reasoning_content=say(), tool_calls=[call]),
                turn("tool", result, tool_call_id=call["id"], name=name),
                turn("assistant", say(), reasoning_content=say()),
            ],
        }
    if domain == "multi-turn":
        messages = []
        for _ in range(rng.randint(2, 4)):
            messages += [turn("user", rng.choice((ask, ask, ask_zh))()), turn("assistant", say())]
        return {"messages": messages}
    if domain == "thinking":
        messages = []
        for _ in range(rng.randint(1, 3)):
            messages += [turn("user", ask()), turn("assistant", say(), reasoning_content=say())]
        return {"messages": messages}
    if domain == "system":
        return {"messages": [turn("system", ask()), turn("user", ask()), turn("assistant", say())]}
    return {"messages": [turn("user", ask()), turn("assistant", say())]}


def write_prompts(folder: Path) -> None:
    """The recipe's data: 300 chats to train on, 24 others to measure with."""
    for file, n, seed in (("kimi-tiny.jsonl", 300, 0), ("kimi-tiny-heldout.jsonl", 24, 1)):
        rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in prompts(n, seed)]
        (Path(folder) / file).write_text("".join(rows), encoding="utf-8")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to fill")
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument(
        "--int4", action="store_true", help="routed experts packed as the real checkpoint has them"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--heads", type=int, nargs=3, help="number, non-rotary and value size; default: by machine"
    )
    args = parser.parse_args(argv)
    print(build(args.out, args.shards, args.int4, args.seed, heads=args.heads and tuple(args.heads)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
