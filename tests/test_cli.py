"""The command line: options from the line and the file, one line per error, cheap help."""

import contextlib
import io
import json
import re
import signal
import subprocess
import sys
import urllib.request

import msgspec
import pytest

from tandemkv.base.config import EngineConfig
from tandemkv.base.errors import ConfigError
from tandemkv.cli import app, loading, options, preparing, run
from tandemkv.cli.measuring import lab_options
from tandemkv.cli.options import engine_config, speculative


@pytest.fixture
def given(monkeypatch):
    """given(*argv): the options that a command line hands to its command."""
    import typer

    def parse(*argv):
        caught = []
        probe = typer.Typer(rich_markup_mode=None)
        probe.callback()(lambda: None)
        engine = (options.MODEL, *options.ENGINE)
        from tandemkv.cli import measuring

        options.command(probe, "acceptance", *measuring._ACCEPTANCE, *engine)(caught.append)
        typer.main.get_command(probe).main(["acceptance", *argv], standalone_mode=False)
        return caught[0]

    return parse


def one_line(capsys):
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert err.startswith("tandemkv: ")
    return err


def test_help_lists_the_commands_and_imports_no_torch():
    code = (
        "import sys; from tandemkv.cli import run; status = run(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules;"
        "sys.exit(status)"
    )
    for argv in ([], ["--help"], ["acceptance", "--help"], ["train", "eagle3", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True
        )
        assert "Usage: tandemkv" in done.stdout
    assert done.stderr == ""


def test_version_is_printed(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tandemkv ")


@pytest.mark.parametrize(
    ("argv", "cause"),
    [
        (["frobnicate"], "no such command 'frobnicate'"),
        (["acceptence"], "did you mean 'acceptance'"),
        (["serve", "--drafte", "x"], "no such option: --drafte; did you mean --drafter"),
        (["serve", "--port"], "requires an argument"),
        (["serve", "--nope"], "no such option: --nope\n"),
        (["serv"], "no such command 'serv'; did you mean 'serve'?\n"),
        (["train", "eagle4"], "no such command 'eagle4'; did you mean 'eagle3'?\n"),
        (["serve", "--port", "many"], "--port must be an integer, got 'many'\n"),
        (["serve", "--grace", "-1"], "--grace must be in [0, 86400] seconds"),
        (["generate", "x", "--top-p", "much"], "--top-p must be a number, got 'much'\n"),
        (["acceptance", "--limit", "x"], "--limit must be an integer, got 'x'\n"),
        (["acceptance", "--json", "/nowhere/x.json"], "there is no directory /nowhere"),
        (["acceptance", "--json", "/"], "--json /: it is a directory"),
        (["explain", "--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["explain", "--prompt", ""], "not empty"),
        (["serve", "--port", "99999"], "--port must be in"),
        (["serve", "--block-size", "12"], "block_size must be a power of two"),
        (["serve", "--claim-policy", "lazy"], "claim_policy must be one of exact, fast, auto"),
        (["serve", "--dtype", "int3"], "dtype must be one of"),
        (["serve", "--threads", "0", "--max-running", "0"], "threads must be at least 1"),
        (["generate", " "], "the prompt is empty"),
        (["generate", "x", "--temperature", "nan"], "temperature must be a finite number"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens must be at least 1"),
        (["generate", "x", "--model", "/nowhere/at.gguf"], "/nowhere/at.gguf"),
        (["acceptance", "--drafter", "eagle"], "did you mean 'eagle3'"),
        (["acceptance", "--paths", "cold,wram"], "did you mean 'warm'"),
        (["acceptance", "--paths", ","], "--paths: no name given"),
        (["acceptance", "--preset", "mtbench"], "did you mean 'mt_bench'"),
        (["acceptance", "--fault", "flood"], "--fault: 'flood' is not one of"),
        (["acceptance", "--prompts", "nowhere"], "neither a file nor one of bundled"),
        (["acceptance", "--limit", "0"], "--limit must be at least 1"),
        (["acceptance", "--batch", "2", "--max-running", "3"], "say the same twice"),
        (["acceptance", "--num-draft-tokens", "0"], "--num-draft-tokens must be at least 1"),
        (["acceptance", "--branches", "3"], "--branches says nothing without one of --paths"),
        (["acceptance", "--shared-tokens", "9", "--paths", "warm"], "--shared-tokens says nothing"),
        (["acceptance", "--paths", "branches", "--branches", "0"], "--branches must be at least 1"),
        (["acceptance", "--paths", "branches_evict"], "did you mean 'branches_evicted'"),
        (["acceptance", "--disaggregate", "1p2d"], "1p2d: one decode worker here, as 2p1d"),
        (["acceptance", "--disaggregate", "0p1d"], "must look like 1p1d or 2p3d, got '0p1d'"),
        (
            ["acceptance", "--disaggregate", "x"],
            "--disaggregate must look like 1p1d or 2p3d, got 'x'",
        ),
        (["acceptance", "--top-p", "0.9"], "--top-p says nothing where decoding is greedy"),
        (["acceptance", "--verification", "block"], "--verification says nothing where decoding"),
        (["acceptance", "--seed", "1", "--temperature", "0"], "--seed says nothing where"),
        (["acceptance", "--temperature", "-1"], "temperature must be in [0, 100], got -1"),
        (
            ["acceptance", "--temperature", "1", "--verification", "tree"],
            "verification must be one of token, block, got 'tree'",
        ),
        (["acceptance", "--drafter", "dflash", "--drafter-path", "/no/x"], "/no/x"),
        (
            ["acceptance", "--drafter", "dflash,dspark", "--drafter-path", "x"],
            "dflash and dspark have one each; several are METHOD=DIR,METHOD=DIR",
        ),
        (["acceptance", "--drafter", "ngram", "--drafter-path", "x"], "no drafter asked for has"),
        (
            ["acceptance", "--drafter", "dflash,ngram", "--drafter-path", "dflash=a,eagle3=b"],
            "--drafter-path: eagle3 has none, or is not among --drafter",
        ),
        (["acceptance", "--drafter", "all", "--drafter-path", "x"], "without --drafter-path; name"),
        (["acceptance", "--drafter", "all", "--model", "x"], "without --model; name the drafters"),
        (
            ["acceptance", "--drafter", "eagle3", "--speculative-config", '{"method": "ngram"}'],
            "say the same twice",
        ),
        (
            ["acceptance", "--drafter", "ngram,eagle3", "--draft-vocab", "99"],
            "draft_vocab does not apply to drafter 'ngram'",
        ),
        (["serve", "--config", "/nowhere.yaml"], "--config /nowhere.yaml"),
        (["train", "eagle3"], "--out is missing"),
    ],
)
def test_a_bad_command_line_is_one_line_that_names_the_cause(argv, cause, capsys):
    assert run(argv) == 2
    assert cause in one_line(capsys)


def test_verbose_adds_the_traceback(capsys):
    assert run(["serve", "--port", "99999", "--verbose"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_every_option_of_the_engine_is_an_option_of_the_line():
    known = {option.name for option in (options.MODEL, *options.ENGINE)}
    fields = {field.name for field in msgspec.structs.fields(EngineConfig)}
    not_asked = {"trace", "faults", "drafter_options"}  # --fault, --speculative-config
    assert fields - known == not_asked


def test_every_option_of_training_is_an_option_of_the_line():
    from tandemkv.train import TrainOptions

    fields = {field.name for field in msgspec.structs.fields(TrainOptions)}
    assert fields == {option.name for option in preparing._TRAIN}


def test_training_options_reach_the_trainer_with_their_types():
    from types import SimpleNamespace

    from tandemkv.train import TrainOptions

    values = preparing.train_values(
        SimpleNamespace(out="x", prompts="a,b", pools='[{"name": "p", "rows": 2, "length": 64}]')
    )
    asked = preparing._converted(values, TrainOptions)
    assert asked.prompts == ("a", "b")
    assert asked.pools[0].rows == 2


def test_what_is_left_open_stays_open(given):
    assert engine_config(given()) == EngineConfig()


def test_options_reach_the_configuration(given):
    config = engine_config(
        given(
            *("--drafter", "ngram", "--dtype", "bf16", "--threads", "2", "--no-prefix-caching"),
            *("--fault", "withhold_draft_rows", "--model", "some/where"),
        )
    )
    assert config == EngineConfig(
        drafter="ngram",
        dtype="bfloat16",
        threads=2,
        prefix_caching=False,
        faults=("withhold_draft_rows",),
        model="some/where",
    )


def test_a_file_gives_options_and_the_line_wins(given, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "drafter: ngram\nblock-size: 32\nprefix_caching: false\nmax_tokens: 9\n"
        "speculative_config:\nthreads: 4\n"
    )
    values = given("--config", str(path), "--threads", "1")
    config = engine_config(values)
    assert (config.drafter, config.block_size, config.prefix_caching) == ("ngram", 32, False)
    assert config.threads == 1
    assert values.max_tokens == 9


def test_lists_and_mappings_of_a_file_mean_what_the_line_would(given, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("paths: [cold, warm]\nspeculative-config:\n  method: ngram\n")
    values = given("--config", str(path))
    assert values.paths == "cold,warm"
    assert engine_config(values).drafter == "ngram"


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("thread: 1\n", "unknown key 'thread'; did you mean 'threads'"),
        ("- a\n", "expected options"),
        ("a: [\n", "--config"),
        ("block_size: many\n", "--block-size must be an integer, got 'many'"),
        ("block_size: 1.5\n", "--block-size must be an integer, got '1.5'"),
        ("threads: true\n", "--threads"),
        ("debug: perhaps\n", "--debug must be true or false"),
    ],
)
def test_a_bad_file_is_refused_by_key(content, cause, tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert run(["serve", "--config", str(path)]) == 2
    assert cause in one_line(capsys)


def test_speculative_config_is_read_as_vllm_users_write_it():
    text = json.dumps({"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3})
    assert speculative(text, {}) == {
        "drafter": "eagle3",
        "drafter_path": "a/b",
        "num_draft_tokens": 3,
    }


def test_what_a_drafter_takes_beyond_that_is_handed_on():
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}'
    assert speculative(text, {})["drafter_options"] == {"prompt_lookup_max": 5}


@pytest.mark.parametrize(
    ("text", "values", "cause"),
    [
        ("{", {}, "not JSON"),
        ("[]", {}, "expected an object"),
        ("{}", {}, "method is missing"),
        ('{"method": "medusa"}', {}, "method 'medusa' is not one of"),
        ('{"method": "ngram"}', {"drafter": "eagle3"}, "say the same twice"),
    ],
)
def test_a_bad_speculative_config_is_refused(text, values, cause):
    with pytest.raises(ConfigError, match=cause):
        speculative(text, values)


def test_a_preset_fixes_what_decides_the_number(given):
    asked = lab_options(given("--preset", "gsm8k", "--limit", "5", "--threads", "1"))
    assert (asked.prompts, asked.limit, asked.max_tokens) == ("gsm8k", 5, 256)
    assert asked.cut_loops
    assert asked.paths == ("cold",)
    ks = {name: asked.engine_of(name).num_draft_tokens for name in ("eagle3", "dflash", "none")}
    assert ks == {"eagle3": 4, "dflash": 7, "none": None}


def test_k_that_is_given_holds_for_all_drafters_and_is_theirs_if_left_open(given):
    asked = lab_options(given("--preset", "gsm8k", "--num-draft-tokens", "7"))
    assert {asked.engine_of(name).num_draft_tokens for name in ("eagle3", "dspark")} == {7}
    open_ = lab_options(given("--drafter", "eagle3,dspark"))
    assert {open_.engine_of(name).num_draft_tokens for name in open_.drafters} == {None}
    vllm = lab_options(
        given(
            *("--preset", "gsm8k", "--speculative-config"),
            '{"method": "dspark", "num_speculative_tokens": 3}',
        )
    )
    assert vllm.engine_of("dspark").num_draft_tokens == 3


def test_acceptance_takes_one_drafter_several_or_all(given):
    from tandemkv.lab.options import TRAINED, shipped

    assert lab_options(given()).drafters == ("eagle3",)
    assert lab_options(given("--drafter", "all")).drafters == (*shipped(), "ngram")
    assert set(shipped()) <= set(TRAINED)
    assert lab_options(given("--drafter", "ngram")).drafters == ("ngram",)
    assert lab_options(given("--drafter", "ngram,eagle3")).drafters == ("ngram", "eagle3")
    assert lab_options(given("--speculative-config", '{"method": "ngram"}')).drafters == ("ngram",)


def test_a_checkpoint_goes_to_the_drafter_that_has_one(given):
    asked = lab_options(given("--drafter", "ngram,dspark", "--drafter-path", "a=b"))
    assert asked.engine_of("dspark").drafter_path == "a=b"
    assert asked.engine_of("ngram").drafter_path is None
    asked = lab_options(
        given("--drafter", "eagle3,dflash,dspark", "--drafter-path", "dflash=x,dspark=y")
    )
    paths = [asked.engine_of(name).drafter_path for name in (*asked.drafters, "none")]
    assert paths == [None, "x", "y", None]


def test_sampling_runs_no_plain_decoding_unless_asked_and_a_preset_then_has_a_warm_run(given):
    from tandemkv.lab.options import Sampling

    sampled = ("--temperature", "1", "--top-p", "0.95", "--verification", "block")
    asked = lab_options(given(*sampled, "--seed", "3"))
    assert asked.sampling == Sampling(temperature=1.0, top_p=0.95, verification="block", seed=3)
    assert not asked.plain
    assert lab_options(given(*sampled, "--plain")).plain
    assert lab_options(given(*sampled, "--preset", "gsm8k")).paths == ("cold", "warm")
    assert lab_options(given("--temperature", "0")).sampling is None


def test_branches_are_as_many_and_as_long_as_asked(given):
    asked = lab_options(given("--paths", "branches", "--branches", "3", "--shared-tokens", "4096"))
    assert (asked.paths, asked.branches, asked.shared_tokens) == (("branches",), 3, 4096)


def test_prefill_workers_are_as_many_as_asked(given):
    assert lab_options(given()).num_prefill == 0
    assert lab_options(given("--disaggregate", "1p1d")).num_prefill == 1
    assert lab_options(given("--disaggregate", "3p1d")).num_prefill == 3


def test_workers_share_the_cores_unless_threads_are_said(given, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert lab_options(given()).engine.threads is None
    assert lab_options(given("--disaggregate", "1p1d")).engine.threads == 4
    assert lab_options(given("--disaggregate", "9p1d")).engine.threads == 1
    said = given("--disaggregate", "1p1d", "--threads", "7")
    assert lab_options(said).engine.threads == 7


def test_the_defaults_of_acceptance_that_help_shows_are_those_that_hold():
    from tandemkv.cli import measuring
    from tandemkv.lab import presets
    from tandemkv.lab.options import CONVERSATIONS, PATHS, LabOptions, Sampling

    shown = {option.name: option.default for option in measuring._ACCEPTANCE}
    asked = LabOptions(engine=EngineConfig(), drafters=())
    for name in ("branches", "shared_tokens"):
        assert shown[name] == str(getattr(asked, name))
    assert shown["max_tokens"].startswith(f"{asked.max_tokens}, ")
    assert shown["prompts"].startswith(asked.prompts)
    assert all(path in shown["paths"] for path in CONVERSATIONS)
    assert "branches" not in shown["paths"]
    told = {option.name: option.help for option in measuring._ACCEPTANCE}
    assert told["paths"].startswith(f"Some of {', '.join(PATHS)}")
    for name in ("top_p", "seed"):
        assert float(shown[name]) == getattr(Sampling(), name)
    assert shown["verification"] == Sampling().verification
    assert f"{presets.DRAFT_TOKENS['eagle3']}, for dflash and dspark 7" in told["preset"]
    assert {presets.DRAFT_TOKENS[name] for name in ("dflash", "dspark")} == {7}


def test_the_commands_of_this_release_are_these():
    names = {command.name for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    assert names == {
        "serve",
        "generate",
        "chat",
        "acceptance",
        "explain",
        "convert",
        "train",
        "worker",
        "router",
    }


@pytest.fixture(scope="session")
def tiny(tiny_model, tmp_path_factory):
    """Options that name a tiny model."""
    cache = tmp_path_factory.mktemp("cli")
    return [
        *("--model", str(tiny_model("llama"))),
        *("--cache-dir", str(cache), "--kv-cache-tokens", "4096", "--threads", "1"),
    ]


def test_acceptance_reports_and_writes_its_rows(tiny, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["abcabcabc", "again"]}\n{"turns": ["xyz xyz", "again"]}\n')
    found = tmp_path / "rows.json"
    lab = ["--drafter", "ngram", "--prompts", str(prompts), "--max-tokens", "16"]
    assert run(["acceptance", *tiny, *lab, "--json", str(found)]) == 0
    out = capsys.readouterr().out
    assert "second turn" in out
    assert "Parity held on 3 paths" in out
    content = json.loads(found.read_text())
    assert [row["path"] for row in content["rows"]] == ["cold", "warm", "second_turn", "resumed"]
    assert all(row["output_equal"] for row in content["rows"])
    assert content["provenance"]["options"]["prompts"] == str(prompts)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """dflash and dspark with random weights for the tiny model, windows of 60."""
    import drafting
    import tiny as tiny_models

    from tandemkv.model import dflash_checkpoint

    found = {}
    for method in ("dflash", "dspark"):
        found[method] = tmp_path_factory.mktemp(method)
        shape = drafting.block_config(
            method, vocab_size=tiny_models.VOCAB_SIZE, taps=(0, 1), windows=(60, 60)
        )
        dflash_checkpoint.save(found[method], drafting.block_weights(shape), shape)
    return found


def test_several_drafters_are_measured_each_with_its_checkpoint(
    tiny, checkpoints, tmp_path, capsys
):
    prompts, found = tmp_path / "p.jsonl", tmp_path / "rows.json"
    prompts.write_text("".join(f'{{"prompt": "{c} page"}}\n' for c in "abcd"))
    lab = ["--drafter", "dflash,dspark", "--prompts", str(prompts), "--max-tokens", "12"]
    lab += ["--drafter-path", ",".join(f"{name}={path}" for name, path in checkpoints.items())]
    lab += ["--paths", "cold,branches,branches_evicted", "--branches", "3"]
    lab += ["--shared-tokens", "240", "--json", str(found)]
    assert run(["acceptance", *tiny, *lab]) == 0
    out = capsys.readouterr().out
    assert "dspark, K 4: acceptance by path" in out
    assert "Parity held on 4 paths" in out
    assert "At K 4, cold, on 4 prompts: dflash" in out
    rows = json.loads(found.read_text())["rows"]
    assert [(row["drafter"], row["path"]) for row in rows] == [
        (drafter, path)
        for drafter in ("dflash", "dspark")
        for path in ("cold", "branches", "branches_evicted")
    ]
    for row in rows[2::3]:
        first, *later = row["branches"]
        assert first["recomputed_hole_tokens"] == 59
        assert [branch["recomputed_hole_tokens"] for branch in later] == [0, 0]


def test_the_method_of_a_checkpoint_is_what_its_config_says(given, checkpoints):
    assert lab_options(given("--drafter-path", str(checkpoints["dspark"]))).drafters == ("dspark",)


def test_a_sampled_run_says_that_outputs_are_not_compared(tiny, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{c}abc abc {c}abc"}}\n' for c in "abcdefgh"))
    lab = ["--drafter", "ngram", "--prompts", str(prompts), "--paths", "cold,warm"]
    lab += ["--max-tokens", "16", "--temperature", "1", "--verification", "block"]
    assert run(["acceptance", *tiny, *lab]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "sampled" in out
    assert "drawn anew on each path and are not compared" in out


def test_a_missing_second_turn_is_named_before_any_path_runs(tiny, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "abc"}\n')
    lab = ["--drafter", "ngram", "--prompts", str(prompts), "--max-tokens", "4"]
    assert run(["acceptance", *tiny, *lab, "--paths", "cold,second_turn"]) == 2
    assert "no second turns in" in one_line(capsys)
    assert run(["acceptance", *tiny, *lab]) == 0


def test_a_prompt_too_long_is_named(tiny, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"id": "long one", "prompt": "a" * 9000}) + "\n")
    lab = ["--drafter", "ngram", "--prompts", str(prompts), "--paths", "cold"]
    assert run(["acceptance", *tiny, *lab]) == 2
    assert "prompt long one: " in capsys.readouterr().err


def test_generate_prints_text_to_stdout_and_figures_to_stderr(tiny, capsys):
    assert run(["generate", "abcabc", *tiny, "--drafter", "ngram", "--max-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert "12 tokens" in err
    assert "tokens/s" in err


def test_a_raw_prompt_is_read_from_stdin(tiny, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert run(["generate", "-", "--raw", *tiny, "--max-tokens", "2"]) == 0
    assert "[3 prompt tokens" in capsys.readouterr().err


def test_chat_keeps_its_prefix_and_ends_with_the_input(tiny, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello there\nand more\n"))
    assert run(["chat", *tiny, "--max-tokens", "6", "--system", "be kind"]) == 0
    first, second = capsys.readouterr().err.strip().splitlines()
    assert ", 0 cached;" in first
    assert ", 0 cached;" not in second


def test_explain_gives_reasons_and_origins(tiny, capsys):
    argv = ["explain", *tiny, "--drafter", "ngram", "--prompt", "abcabc", "--then", "abcabc"]
    assert run(argv) == 0
    out = capsys.readouterr().out
    assert "max_running = 32  (default on cpu)" in out
    assert "dtype = float32  (exact on CPU)" in out
    assert "computed" in out
    assert "reused" in out or "copied" in out


def test_convert_prints_where_a_model_lies(tiny, capsys):
    assert run(["convert", tiny[1]]) == 0
    assert capsys.readouterr().out.strip() == tiny[1]


MAIN = [sys.executable, "-c", "from tandemkv.cli import main; main()"]


@contextlib.contextmanager
def popen(*argv):
    """A command in a process of its own, ended whatever happens."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*MAIN, *argv], **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_an_interrupt_that_is_lost_comes_again(monkeypatch, capsys):
    """Raised in a finalizer it cannot pass; the command must end all the same."""
    import time

    from tandemkv.cli import serving

    class Lost:
        def __del__(self):
            raise KeyboardInterrupt

    def ask():
        Lost()
        time.sleep(30)

    monkeypatch.setattr(serving, "engine_config", lambda given: ask())
    assert run(["generate", "x"]) == 130
    assert one_line(capsys) == "tandemkv: interrupted\n"


def test_serve_says_what_it_loads_and_what_answers_and_ends_on_a_signal(tiny):
    with popen("serve", *tiny, "--drafter", "ngram", "--port", "0") as server:
        try:
            assert server.stderr.readline() == f"loading {tiny[1]}, drafter ngram ...\n"
            ready = server.stdout.readline()
            url = re.search(r"http://\S+", ready).group()
            with urllib.request.urlopen(f"{url}/models") as answer:
                assert json.load(answer)["data"]
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        assert server.stderr.read() == ""
    told = "drafter ngram, K 4, float32 on cpu, 1 thread, cache of 4,096 tokens"
    assert ready == f"serving {tiny[1].rsplit('/', 1)[-1]} on {url} ({told})\n"


def test_a_second_interrupt_does_not_wait_for_requests_in_flight(tiny):
    """The first one says how many there are; they would run for longer than the test."""
    argv = ["serve", *tiny, "--drafter", "none", "--port", "0"]
    argv += ["--grace", "3600", "--max-running", "1"]
    sent = {"prompt": ["x"] * 8, "n": 16, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with popen(*argv) as server:
        server.stderr.readline()
        url = re.search(r"http://\S+", server.stdout.readline()).group()
        asked = urllib.request.Request(
            f"{url}/completions", json.dumps(sent).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(asked) as answer:
            answer.readline()
            server.send_signal(signal.SIGINT)
            line = server.stderr.readline()
            assert line == "finishing 1 request; press Ctrl-C again to stop now\n"
            server.send_signal(signal.SIGINT)
            assert server.stderr.read() == "tandemkv: interrupted\n"
            assert server.wait(60) == 130


@pytest.mark.parametrize("argv", [("generate", "x"), ("acceptance", "--limit", "1")])
def test_an_interrupt_while_loading_is_one_line(argv, tiny):
    with popen(*argv, *tiny, "--verbose") as process:
        assert process.stderr.readline().startswith("loading ")
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "tandemkv: interrupted\n"
        assert process.wait(60) == 130


def test_loading_is_told_where_it_is_asked_for_and_never_on_stdout(tiny, capsys):
    argv = ["generate", "abc", *tiny, "--drafter", "none", "--max-tokens", "2"]
    assert run(argv) == 0
    quiet = capsys.readouterr()
    assert run([*argv, "--verbose"]) == 0
    told = capsys.readouterr()
    assert quiet.err.startswith("[")
    assert told.err.startswith(f"loading {tiny[1]}, no drafter ...\n[")
    assert told.out == quiet.out


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "the embedded SmolLM2-135M-Instruct, drafter eagle3"),
        ({"model": "a/b"}, "a/b, no drafter"),
        ({"model": "a/b", "drafter_path": "c"}, "a/b, drafter from c"),
        ({"drafter": "none"}, "the embedded SmolLM2-135M-Instruct, no drafter"),
    ],
)
def test_what_is_loaded_is_what_was_asked_for(asked, told):
    assert loading.asked(EngineConfig(**asked)) == told


def test_cores_that_others_keep_busy_are_warned_of():
    assert "--threads 1" in loading.busy("1.0 1.0 1.0 3/89 6027\n", cores=2)
    assert loading.busy("9.0 9.0 9.0 2/89 6027\n", cores=2) is None
    assert loading.busy("9.0 9.0 9.0 9/89 6027\n", cores=1) is None
    assert loading.busy("9.0 9.0", cores=2) is None


COMMANDS = ("serve", "generate", "chat", "acceptance", "explain")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_groups_the_options_and_ends_with_those_for_tests_and_with_examples(name, capsys):
    assert run([name, "--help"]) == 0
    text = capsys.readouterr().out
    own, engine, testing = (text.index(f"\n{h}") for h in ("Options:", "Engine", "Testing"))
    examples = text.index("\nExamples:")
    assert own < engine < testing < examples
    assert engine < text.index("--threads") < testing < text.index("--debug")
    assert text.index("--fault") < examples < text.index(f"  tandemkv {name}", examples)


def test_each_example_of_help_is_a_command_line_that_is_accepted(capsys):
    """Known commands and options, up to the help that ends it."""
    import shlex

    for name in COMMANDS:
        assert run([name, "--help"]) == 0
        lines = capsys.readouterr().out.partition("\nExamples:\n")[2].splitlines()
        assert lines
        for line in lines:
            words = shlex.split(line.partition(" < ")[0])
            assert words[:2] == ["tandemkv", name]
            assert run([*words[1:], "--help"]) == 0
            capsys.readouterr()


def test_every_option_of_the_engine_and_of_sampling_shows_its_default():
    shown = {option.name: option.default for option in (*options.ENGINE, *options.SAMPLING)}
    assert [name for name, default in shown.items() if not default] == ["speculative_config"]


def test_the_defaults_that_help_shows_are_those_that_hold():
    from tandemkv.base.sampling import SamplingParams
    from tandemkv.cli.serving import DEFAULT_GRACE_S, DEFAULT_MAX_TOKENS
    from tandemkv.engine import resolve, sizing
    from tandemkv.model import checkpoint, draft_head
    from tandemkv.serve import http

    shown = {option.name: option.default for option in (*options.ENGINE, *options.SAMPLING)}
    config, params = EngineConfig(), SamplingParams()
    assert shown["block_size"] == str(config.block_size)
    assert shown["claim_policy"] == config.claim_policy
    assert shown["prefix_caching"] == ("on" if config.prefix_caching else "off")
    for name in ("drafter", "dtype", "device"):
        assert shown[name].startswith(f"{getattr(config, name)}: ")
    assert shown["max_model_len"].endswith(str(resolve.DEFAULT_MAX_MODEL_LEN))
    gib, share = resolve.CPU_BUDGET_BYTES >> 30, resolve.GPU_BUDGET_SHARE
    for name in ("target_page_size", "draft_page_size"):
        assert shown[name].startswith(f"the block size, or 1/{sizing.PAGES_PER_WINDOW} of a window")
    assert f"{gib} GiB" in shown["kv_cache_tokens"]
    assert f"{share:.0%}" in shown["kv_cache_tokens"]
    assert shown["cache_dir"] == str(checkpoint.DEFAULT_CACHE_DIR)
    assert shown["draft_vocab"].startswith(f"{draft_head.DEFAULT_DRAFT_VOCAB} on CPU")
    assert shown["max_tokens"] == str(DEFAULT_MAX_TOKENS)
    for name in ("top_p", "top_k", "min_p"):
        assert float(shown[name]) == getattr(params, name)
    assert http.DEFAULT_GRACE_S == DEFAULT_GRACE_S == 10


def test_the_limits_that_help_shows_are_those_of_an_engine(tiny):
    from tandemkv.engine.engine import Engine

    shown = {option.name: option.default for option in options.ENGINE}
    asked = EngineConfig(model=tiny[1], drafter="ngram", kv_cache_tokens=4096, threads=1)
    resolved = Engine.from_config(asked).resolved
    for name in ("max_running", "max_batch_tokens"):
        assert shown[name].startswith(f"{resolved[name]} on CPU, ")
    assert shown["num_draft_tokens"].startswith(f"the drafter's: {resolved['num_draft_tokens']}, ")


def test_an_interrupted_experiment_writes_what_it_finished(tiny, tmp_path):
    prompts, found = tmp_path / "p.jsonl", tmp_path / "rows.json"
    prompts.write_text("".join(f'{{"prompt": "text {i} {i} {i}"}}\n' for i in range(12)))
    lab = ["--drafter", "ngram", "--prompts", str(prompts), "--max-tokens", "200", "--no-plain"]
    with popen("acceptance", *tiny, *lab, "--json", str(found)) as process:
        line = next(line for line in process.stderr if line.startswith("[2/3] ngram: warm"))
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130, line + rest
    assert "complete, the rest is missing" in rest
    content = json.loads(found.read_text())
    assert [row["path"] for row in content["rows"]] in (["cold"], ["cold", "warm"])
    assert content["provenance"]["interrupted"]


def test_a_port_in_use_is_said_before_a_model_is_loaded(capsys, monkeypatch):
    import socket

    from tandemkv.engine.engine import Engine

    monkeypatch.setattr(Engine, "from_config", lambda config: pytest.fail("a model was loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in one_line(capsys)
