"""Slow byte-level tokenizer over tiktoken ranks, in the manner of Kimi's own: code in the model folder only.

transformers knows no class of this name, so AutoTokenizer has to run this file. The ranks are not in a file
called tiktoken.model, as Kimi's are: transformers 5 finds that one without trust_remote_code and makes a
tokenizer of its own from it, without a word, so a path that forgets the flag would go unnoticed.
"""

import base64
import shutil
from pathlib import Path

import tiktoken
from transformers import PreTrainedTokenizer

# Runs of Han characters first, as Kimi splits them; then words with their leading space, digits by threes.
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def byte_alphabet() -> dict[int, str]:
    """A printable character for each byte, so that any token can be written as a string (the GPT-2 table)."""
    keep = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in keep}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(keep))
    return table


class KimiTinyTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "kimi_tiny.tiktoken"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self, vocab_file, bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]", pad_token="[PAD]", **kwargs
    ):
        self.vocab_file = str(vocab_file)
        # Not tiktoken.load: it caches by path, so a folder built anew at the same path would get stale ranks.
        ranks = {}
        for line in Path(vocab_file).read_text(encoding="ascii").splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        self.model = tiktoken.Encoding("kimi_tiny", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        to_char = byte_alphabet()
        self._to_byte = {char: byte for byte, char in to_char.items()}
        self._id_to_token = {rank: "".join(to_char[b] for b in token) for token, rank in ranks.items()}
        self._token_to_id = {token: rank for rank, token in self._id_to_token.items()}
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(
            bos_token=bos_token, eos_token=eos_token, unk_token=unk_token, pad_token=pad_token, **kwargs
        )

    @property
    def vocab_size(self) -> int:
        return len(self._id_to_token)

    def get_vocab(self) -> dict[str, int]:
        return {**self._token_to_id, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        return [self._id_to_token[i] for i in self.model.encode_ordinary(text)]

    def _convert_token_to_id(self, token):
        return self._token_to_id.get(token, self.unk_token_id)

    def _convert_id_to_token(self, index):
        return self._id_to_token.get(index, self.unk_token)

    def convert_tokens_to_string(self, tokens):
        out = bytearray()
        for token in tokens:
            if token in self._token_to_id:
                out += bytes(self._to_byte[char] for char in token)
            else:
                out += token.encode()
        return out.decode("utf-8", errors="replace")

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return token_ids_0 + (token_ids_1 or [])  # nothing is added: the chat template writes every marker

    def save_vocabulary(self, save_directory, filename_prefix=None):
        out = Path(save_directory) / (
            (filename_prefix + "-" if filename_prefix else "") + self.vocab_files_names["vocab_file"]
        )
        if out.resolve() != Path(self.vocab_file).resolve():
            shutil.copyfile(self.vocab_file, out)
        return (str(out),)
