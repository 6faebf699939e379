"""Text as it arrives: any tokens, any split into pushes, stop strings anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tandemkv.base.errors import RequestError
from tandemkv.serve import text as text_module
from tandemkv.serve.text import Detokenizer, StopStrings, TextStream

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then the dog sleeps",
    "def stop(): return 'STOP' # STOP here, and stop there\n\n\n",
    "你好 世界。你好你好 今天天气很好。",
    "naïve café, smörgåsbord, Ελληνικά, русский текст",
    "🙂🙃 emoji 👩‍👩‍👧 family 🇫🇷",
]


@cache
def byte_level(vocab_size: int = 420) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges cut through characters; every byte string has tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>", "<pad>", "<unnamed>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


@cache
def word_level() -> PreTrainedTokenizerFast:
    """As SentencePiece tokenizers: spaces before words, bytes for what has no token."""
    pieces = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += [*"▁abcdefghijklmnopqrstuvwxyz.,", "▁the", "▁dog", "▁st", "▁sto", "op", "▁fox"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁s", "t"), ("▁st", "o"), ("o", "p")]
    vocab.setdefault("▁s", len(vocab))
    merges.insert(0, ("▁", "s"))
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def whole(tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def split(tokens: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    out, rest = [], list(tokens)
    for size in sizes:
        out.append(rest[:size])
        rest = rest[size:]
    return [*out, rest]


def stream(
    tokenizer, pushes: Sequence[Sequence[int]], stop: Sequence[str] = (), **kwargs
) -> tuple[str, int, list[str]]:
    """(text, tokens kept, the text released with each push)."""
    watch, kept, parts = TextStream(tokenizer, stop, **kwargs), 0, []
    for tokens in pushes:
        stopped = watch.push(tokens)
        kept += len(tokens) if stopped is None else stopped
        parts.append(watch.take())
        if stopped is not None:
            break
    parts.append(watch.finish())
    return "".join(parts), kept, parts


def bytes_of(tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    table = dict(zip(byte_order(), range(256), strict=True))
    alphabet = {table[ord(c)]: c for c in pre_tokenizers.ByteLevel.alphabet()}
    return [tokenizer.convert_tokens_to_ids(alphabet[b]) for b in data]


def byte_order() -> list[int]:
    """The character that stands for byte b in a byte-level vocabulary, for b = 0..255."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    return [b if b in plain else next(other) for b in range(256)]


# ------------------------------------------------------------------ detokenisation

any_tokens = st.lists(st.integers(0, 419), max_size=60)
sizes = st.lists(st.integers(0, 5), max_size=30)


@settings(max_examples=120)
@given(any_tokens, sizes)
def test_any_tokens_in_any_pushes_give_the_text_of_the_whole(tokens, sizes):
    tokenizer = byte_level()
    tokens = [t for t in tokens if t < len(tokenizer)]
    assert stream(tokenizer, split(tokens, sizes))[0] == whole(tokenizer, tokens)


@settings(max_examples=120)
@given(st.binary(max_size=120), sizes)
@example(b"\xff" * 120, [])
@example(b"\x80\xe4\xbd" * 40, [1, 2])
@example("你".encode()[:2] * 50, [])
@example(b"\xf0\x9f\x99" * 30 + b"\x82", [])
def test_any_bytes_a_token_each_give_the_text_of_the_whole(data, sizes):
    tokenizer = byte_level()
    tokens = bytes_of(tokenizer, data)
    assert whole(tokenizer, tokens) == data.decode("utf-8", "replace")
    assert stream(tokenizer, split(tokens, sizes))[0] == whole(tokenizer, tokens)


@settings(max_examples=120)
@given(st.text(st.sampled_from("abst op.the dog你好🙂é�\n"), max_size=60), sizes)
@example("你好你好你好你好你好", [])
def test_a_tokenizer_with_words_and_byte_fallback_gives_the_text_of_the_whole(text, sizes):
    tokenizer = word_level()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert stream(tokenizer, split(tokens, sizes))[0] == whole(tokenizer, tokens)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 290), max_size=60), sizes)
def test_with_byte_fallback_the_split_never_shows_even_for_garbage(tokens, sizes):
    tokenizer = word_level()
    tokens = [t for t in tokens if t < len(tokenizer)]
    at_once = stream(tokenizer, [tokens])[0]
    assert stream(tokenizer, split(tokens, sizes))[0] == at_once
    assert stream(tokenizer, [[t] for t in tokens])[0] == at_once


def test_half_a_character_is_never_released():
    tokenizer = byte_level()
    tokens = bytes_of(tokenizer, "a🙂b".encode())
    _, _, parts = stream(tokenizer, [[t] for t in tokens])
    assert parts == ["a", "", "", "", "🙂", "b", ""]
    naive = "".join(whole(tokenizer, [t]) for t in tokens)
    assert naive != "a🙂b"  # the check can fail


def test_a_character_left_incomplete_ends_as_a_replacement():
    tokenizer = byte_level()
    tokens = bytes_of(tokenizer, "a🙂".encode()[:-1])
    assert stream(tokenizer, [tokens]) == ("a\ufffd", 4, ["a", "\ufffd"])


def test_special_tokens_inside_a_character_do_not_part_it():
    tokenizer = byte_level()
    first, *rest = bytes_of(tokenizer, "你".encode())
    unnamed = tokenizer.convert_tokens_to_ids("<unnamed>")
    assert unnamed not in tokenizer.all_special_ids
    for special in (tokenizer.eos_token_id, unnamed):
        tokens = [first, *([special] * 2 * text_module.UNSETTLED_TOKENS), *rest]
        assert stream(tokenizer, [tokens])[0] == whole(tokenizer, tokens) == "你"


def test_words_after_many_bytes_that_are_no_text_keep_their_spaces():
    tokenizer = word_level()
    bad = tokenizer.convert_tokens_to_ids("<0xFF>")
    a, the, dog = tokenizer.convert_tokens_to_ids(["a", "▁the", "▁dog"])
    tokens = [*[bad] * 20, a, *[bad] * 17, the, dog]
    assert stream(tokenizer, [tokens])[0] == whole(tokenizer, tokens)


class Spelled:
    """A tokenizer given by the bytes of each token."""

    all_special_ids = ()

    def __init__(self, *tokens: bytes) -> None:
        self.spelling = tokens
        self.decoded = 0

    def decode(self, tokens, **kwargs) -> str:
        self.decoded += len(tokens)
        return b"".join(self.spelling[t] for t in tokens).decode("utf-8", "replace")


def test_text_that_always_ends_inside_a_character_still_flows():
    tokenizer = Spelled(b"\xe4", b"\xbd\xa0\xe4", b"\xbd\xa0!")
    text, _, parts = stream(tokenizer, [[0], *([[1]] * 200), [2]])
    assert text == "你" * 201 + "!"
    assert parts == ["", *(["你"] * 200), "你!", ""]
    assert tokenizer.decoded < 202 * text_module.UNSETTLED_TOKENS


def test_spaces_between_words_survive_and_the_first_word_follows_its_context():
    tokenizer = word_level()
    tokens = tokenizer.encode("the dog. the fox", add_special_tokens=False)
    assert stream(tokenizer, [[t] for t in tokens])[0] == "the dog. the fox"
    naive = "".join(whole(tokenizer, [t]) for t in tokens)
    assert naive != "the dog. the fox"
    assert stream(tokenizer, [tokens], context=tokens)[0] == " the dog. the fox"


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = byte_level()
    tokens = [*tokenizer.encode("the"), 0, 1, *tokenizer.encode(" dog"), 0]
    assert stream(tokenizer, [tokens])[0] == "the dog"
    everything = stream(tokenizer, [tokens], skip_special_tokens=False)[0]
    assert everything == "the<eos><pad> dog<eos>"


def decoded_per_token(data: bytes, repeats: int) -> float:
    tokenizer = Spelled(*(bytes([b]) for b in range(256)))
    stream(tokenizer, [list(data * repeats)])
    return tokenizer.decoded / (len(data) * repeats)


@pytest.mark.parametrize("data", [b"the quick fox ", "你好".encode(), b"\xff", b"\xe4\xbd"])
def test_the_work_per_token_is_bounded_whatever_the_text(data):
    assert decoded_per_token(data, 1600) <= 1.05 * decoded_per_token(data, 400)
    assert decoded_per_token(data, 1600) <= text_module.UNSETTLED_TOKENS


@pytest.mark.parametrize(
    ("bound", "data"), [("WINDOW_TOKENS", b"fox "), ("UNSETTLED_TOKENS", b"\xff")]
)
def test_a_window_that_is_never_cut_is_seen(monkeypatch, bound, data):
    before = decoded_per_token(data, 400)
    monkeypatch.setattr(text_module, bound, 10**9)
    assert decoded_per_token(data, 400) > 10 * before


# ------------------------------------------------------------------ stop strings


def first_stop(text: str, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    """By the book: the first end at which a stop string completes, the longest of those."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


letters = st.text(st.sampled_from("abc"), max_size=30)
stops = st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=4), max_size=3)


@settings(max_examples=120)
@given(letters, stops, st.booleans(), st.lists(st.integers(0, 30), max_size=6))
def test_text_ends_at_the_first_stop_string_to_complete(text, stop, include, cuts):
    finder = StopStrings(stop, include_stop=include)
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    released = ""
    for a, b in itertools.pairwise(edges):
        released += finder.push(text[a:b])
        expected, _ = first_stop(text[:b], stop, include)
        assert expected.startswith(released)  # never taken back
        assert len(expected) - len(released) < max(map(len, stop), default=1)
    released += finder.flush()
    assert (released, finder.stopped) == first_stop(text, stop, include)


@settings(max_examples=120)
@given(st.data())
def test_the_split_into_pushes_never_shows_with_stop_strings(data):
    tokenizer = byte_level()
    text = data.draw(st.text(st.sampled_from("stop STOP the你好🙂é\n"), max_size=40))
    cut = st.tuples(st.integers(0, 40), st.integers(1, 4)).map(lambda c: text[c[0] : sum(c)])
    stop = data.draw(st.lists(cut.filter(bool), max_size=2)) if text else []
    include = data.draw(st.booleans())
    tokens = tokenizer.encode(text)
    at_once, kept, _ = stream(tokenizer, [tokens], stop, include_stop=include)
    assert at_once == first_stop(text, stop, include)[0]
    pushes = split(tokens, data.draw(sizes))
    assert stream(tokenizer, pushes, stop, include_stop=include)[:2] == (at_once, kept)
    # the last token kept is the one that completes the stop string, or all are kept
    before = [first_stop(whole(tokenizer, tokens[:i]), stop, False)[1] for i in range(kept + 1)]
    assert before[:-1] == [None] * kept
    assert before[-1] is not None or kept == len(tokens)


def test_a_stop_string_inside_an_accepted_run_ends_tokens_where_it_ends_text():
    tokenizer = byte_level()
    tokens = bytes_of(tokenizer, b"ab STOP cd")
    watch = TextStream(tokenizer, ["STOP"])
    assert watch.push(tokens[:2]) is None
    assert watch.push(tokens[2:]) == len(b" STOP")
    assert watch.stopped == "STOP"
    assert watch.finish() == "ab "
    assert watch.push(tokens) == 0
    assert watch.finish() == ""


def test_a_token_that_goes_past_the_stop_string_is_kept_and_its_text_is_not():
    tokenizer = Spelled(b"dog")
    assert stream(tokenizer, [[0, 0, 0]], ["ogd"])[:2] == ("d", 2)
    assert stream(tokenizer, [[0, 0]], ["o"], include_stop=True)[:2] == ("do", 1)


def test_what_may_begin_a_stop_string_is_held_and_released_when_it_does_not():
    tokenizer = byte_level()
    a, b, c = bytes_of(tokenizer, b"abc")
    assert stream(tokenizer, [[a], [b], [a], [b], [c]], ["abac"])[2] == [
        "",
        "",
        "",
        "ab",
        "abc",
        "",
    ]
    assert stream(tokenizer, [[a], [b], [a]], ["abac"])[2] == ["", "", "", "aba"]
    assert stream(tokenizer, [[a], [b], [a], [c], [b]], ["abac"])[:2] == ("", 4)


def test_what_is_held_at_the_end_comes_in_order_and_may_still_complete_a_stop_string():
    tokenizer = byte_level()
    tokens = bytes_of(tokenizer, b"ab\xe4")
    assert stream(tokenizer, [tokens], ["abac"])[0] == "ab\ufffd"
    assert stream(tokenizer, [tokens], ["b\ufffd"])[0] == "a"


def test_a_stop_string_before_half_a_character_in_one_token_stops_at_once():
    assert TextStream(Spelled(b"x\xe4"), ["x"]).push([0]) == 1


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3]])
def test_an_empty_stop_string_is_refused(stop):
    with pytest.raises(RequestError, match="stop strings"):
        TextStream(byte_level(), stop)


def test_without_a_detokenizer_of_its_own_a_flush_ends_the_text():
    detokenizer = Detokenizer(byte_level())
    assert detokenizer.flush() == ""
    (token,) = bytes_of(byte_level(), b"\xe4")
    assert detokenizer.push(token) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
