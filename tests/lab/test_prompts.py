"""Prompt sets: what ships can be run, and a user's file is refused by line when it cannot."""

import json
from importlib.resources import files

import pytest

from tandemkv.base.errors import ConfigError
from tandemkv.lab.prompts import BUNDLED, Conversation, PromptTokens, load


def written(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_the_bundled_set_has_two_turns_of_every_kind():
    found = load("bundled")
    assert len(found) >= 24
    assert {c.kind for c in found} == {"chat", "maths", "code", "retrieval", "copying"}
    assert all(len(c.follow_ups) == 1 for c in found)


def test_the_first_dozen_is_mixed():
    assert {c.kind for c in load("bundled", 12)} == {c.kind for c in load("bundled")}


def test_the_preset_sets_have_their_sizes():
    assert (len(load("mt_bench")), len(load("gsm8k"))) == (80, 200)


def test_no_preset_question_is_in_the_bundled_set():
    asked = {c.opening[0]["content"] for name in ("mt_bench", "gsm8k") for c in load(name)}
    assert not any(c.opening[0]["content"] in asked for c in load("bundled"))


def test_every_source_is_in_the_notice():
    data = files("tandemkv.lab") / "data"
    notice = (data / "NOTICE.md").read_text()
    for line in (data / "bundled.jsonl").read_text().split("\n")[:-1]:
        source = json.loads(line)["source"]
        for word in (source.split(": ")[-1], source.split()[0]):
            if word in notice or word.split(",")[0] in notice:
                break
        else:
            assert source.startswith("Shakespeare:"), source


def test_shipped_prompts_stay_small():
    data = files("tandemkv.lab") / "data"
    sizes = [len((data / f"{name}.jsonl").read_bytes()) for name in BUNDLED]
    assert sum(sizes) < 300_000


def test_the_three_forms_of_a_line_are_read(tmp_path):
    path = written(
        tmp_path,
        {"prompt": "one"},
        {"turns": ["one", "two", "three"]},
        {
            "messages": [
                {"role": "system", "content": "be short"},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "an old answer"},
                {"role": "user", "content": "two"},
            ]
        },
    )
    plain, turns, messages = load(path)
    assert (plain.opening, plain.follow_ups) == (({"role": "user", "content": "one"},), ())
    assert turns.follow_ups == ("two", "three")
    assert [m["role"] for m in messages.opening] == ["system", "user"]
    assert messages.follow_ups == ("two",)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ("{}", "needs one of turns, messages, prompt"),
        ('{"prompt": "a", "turns": ["b"]}', "has turns and prompt"),
        ('{"prompt": "  "}', "not empty"),
        ('{"turns": []}', "turns must be a list"),
        ('{"turns": ["a", 3]}', r"turns\[1\]"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "role of system"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "user message must come"),
        ('{"messages": [{"role": "user", "content": null}]}', "content must be text"),
        ('{"messages": ["a"]}', r"messages\[0\]"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, line, cause):
    with pytest.raises(ConfigError, match=f"line 3: .*{cause}"):
        load(written(tmp_path, {"prompt": "fine"}, "", line))


def test_invalid_utf8_is_refused_by_its_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 2: not valid UTF-8"):
        load(str(path))


@pytest.mark.parametrize("name", ["nowhere.jsonl", "."])
def test_a_file_that_is_not_there_is_refused_by_name(name):
    with pytest.raises(ConfigError, match="neither a file nor one of bundled"):
        load(name)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no conversation"):
        load(written(tmp_path, ""))


def test_equal_ids_are_told_apart(tmp_path):
    path = written(tmp_path, {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"})
    assert len({c.id for c in load(path)}) == 2


class Letters:
    """A tokenizer of characters with a chat template, small enough to read."""

    chat_template = "yes"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        turns = "".join(f"<{m['role'][0]}>{m['content']}|" for m in messages)
        return turns + "<a>" * add_generation_prompt

    def encode(self, text, **_):
        return [ord(c) for c in text]


def text(tokens):
    return "".join(map(chr, tokens))


TALK = Conversation(
    id="t", kind="", opening=({"role": "user", "content": "hi"},), follow_ups=("more",)
)


def test_a_second_turn_begins_with_the_very_ids_of_the_first():
    encode = PromptTokens(Letters(), [ord("|")])
    first = encode.first(TALK)
    output = [ord("o"), ord("k"), ord("|")]
    second = encode.second(TALK, first, output)
    assert second[: len(first) + 2] == first + output[:2]
    assert text(second) == "<u>hi|<a>ok|<u>more|<a>"


def test_an_answer_cut_short_is_closed_by_the_template():
    encode = PromptTokens(Letters(), [ord("|")])
    assert text(encode.second(TALK, encode.first(TALK), [ord("o")])) == "<u>hi|<a>o|<u>more|<a>"


def test_a_conversation_of_one_turn_has_no_second():
    talk = Conversation(id="t", kind="", opening=TALK.opening)
    assert PromptTokens(Letters()).second(talk, [1], [2]) is None
