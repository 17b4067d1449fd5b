"""The command line, in this process; without a framework: tests/test_isolation.py."""

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
import termios
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import dualinfer
from dualinfer import embedded
from dualinfer.checkpoint.described.tokenizer import load_tokenizer
from dualinfer.cli import main as cli
from dualinfer.cli import texts
from dualinfer.cli.options import TextOptions
from dualinfer.cli.wording import explain
from dualinfer.engine.fused import FusedEngine
from dualinfer.system.terminal import fold

from .checkpoints import write_byte_tokenizer, write_llama

PROMPT = "héllo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return write_llama(path, write_byte_tokenizer(path))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """A function that runs the command line, and gives its result."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # the callback sets it for good

    def invoke(*arguments: object, **options):
        return CliRunner().invoke(cli.app, [str(a) for a in arguments], **options)

    return invoke


def expected_text(folder: Path, new_tokens: int, quant: str | None = None, **options) -> str:
    """The continuation by generate and one decode at the end."""
    tokenizer = load_tokenizer(folder)
    ids = tokenizer(PROMPT)["input_ids"]
    with dualinfer.init_inference(folder, quant=quant) as engine:
        whole = engine.generate([ids], max_new_tokens=new_tokens, **options)[0].tolist()
    return named(tokenizer.decode(whole, skip_special_tokens=True))


def named(text: str) -> str:
    """A text as commands show it: control characters by their names."""
    is_control = [unicodedata.category(c) == "Cc" and c not in "\n\t" for c in text]
    return "".join(repr(c)[1:-1] if k else c for c, k in zip(text, is_control, strict=True))


def one_message(result) -> str:
    """The message of a command that failed cleanly."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_generate_streams_prompt_and_greedy_text(run, folder, backend):
    result = run("generate", folder, PROMPT, "--backend", backend, "--max-new-tokens", 20)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected_text(folder, 20, do_sample=False) + "\n"
    said = r"20 new tokens, [\d,]+ tokens/s: LlamaForCausalLM, fused mode, (.+)"
    found = re.fullmatch(said, " ".join(result.stderr.split()))
    assert found and found[1].startswith(f"{backend}, float32, ")


def test_generate_reads_standard_input(run, folder):
    result = run("generate", folder, "-", "--max-new-tokens", 4, input=PROMPT + "\n")
    assert result.stdout == expected_text(folder, 4, do_sample=False) + "\n"
    assert "--kernels" not in result.stderr


def test_generate_says_that_no_kernels_run_here(run, folder):
    result = run("generate", folder, PROMPT, "--max-new-tokens", 4, "--kernels")
    with dualinfer.init_inference(folder, replace_with_kernel_inject=True) as engine:
        (note,) = [n for n in engine.report().notes if n.startswith("no kernels run, plain")]
    assert "and this is a CPU" in note
    assert result.exit_code == 0 and f"--kernels: {note}" in " ".join(result.stderr.split())


def test_generate_on_both_shows_one_after_the_other(run, folder):
    result = run("generate", folder, PROMPT, "--backend", "both", "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    text = expected_text(folder, 8, do_sample=False)
    assert result.stdout.count(text) == 2
    assert result.stdout.index(" torch ") < result.stdout.index(" jax ")
    assert result.stderr.endswith("The texts agree.\n")


def test_generate_samples_the_same_text_from_one_seed(run, folder):
    options = ("--seed", 7, "--temperature", 0.9, "--top-k", 40, "--top-p", 0.95)
    texts = [
        run("generate", folder, PROMPT, "--max-new-tokens", 12, "--backend", b, *options).stdout
        for b in ("torch", "jax")
    ]
    own = {"do_sample": True, "seed": 7, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
    assert texts == [expected_text(folder, 12, **own) + "\n"] * 2


def test_generate_says_the_seed_it_drew(run, folder):
    first = run("generate", folder, PROMPT, "--temperature", 1.0, "--max-new-tokens", 12)
    seed = re.search(r"^To get this again: --seed (\d+)$", first.stderr, re.MULTILINE)
    assert seed
    again = ("--temperature", 1.0, "--max-new-tokens", 12, "--seed", seed[1])
    assert run("generate", folder, PROMPT, *again).stdout == first.stdout


def test_generate_ends_at_a_stop_string(run, folder):
    whole = expected_text(folder, 30, do_sample=False)
    stop = next(c for c in whole[len(PROMPT) :] if c.isascii() and c.isprintable())
    result = run("generate", folder, PROMPT, "--max-new-tokens", 30, "--stop", stop)
    assert result.stdout == whole[: whole.index(stop, len(PROMPT)) + 1] + "\n"


def test_generate_runs_a_model_that_fused_mode_does_not_know(run, tmp_path):
    import torch
    import transformers as hf

    vocab = write_byte_tokenizer(tmp_path)
    sizes = dict(vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    sizes |= dict(max_position_embeddings=128)
    ends = dict(pad_token_id=2, bos_token_id=0, eos_token_id=1)
    ends |= dict(num_attention_heads=4, num_key_value_heads=4)
    torch.manual_seed(0)
    model = hf.Emu3ForCausalLM(hf.Emu3TextConfig(**sizes, **ends)).eval()
    model.save_pretrained(tmp_path)
    tokenizer = cli.load_tokenizer(tmp_path)
    ids = tokenizer(PROMPT, return_tensors="pt")
    text = named(tokenizer.decode(model.generate(**ids, max_new_tokens=9, do_sample=False)[0]))
    result = run("generate", tmp_path, PROMPT, "--max-new-tokens", 9)
    assert (result.exit_code, result.stdout) == (0, text + "\n")
    sampled = ("--seed", 3, "--max-new-tokens", 9)
    first, again = (run("generate", tmp_path, PROMPT, *sampled).stdout for _ in range(2))
    assert first == again != result.stdout
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert "the model takes 128" in run("chat", tmp_path, input="x" * 200).stderr


def test_generate_shows_the_answer_alone_of_a_model_that_translates(run, tmp_path):
    import torch
    import transformers as hf

    vocab = write_byte_tokenizer(tmp_path)
    ends = dict(pad_token_id=2, eos_token_id=1, decoder_start_token_id=0)
    sizes = dict(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=vocab, **sizes, **ends))
    model.eval().save_pretrained(tmp_path)
    ids = load_tokenizer(tmp_path)(PROMPT, return_tensors="pt")
    new = model.generate(**ids, max_new_tokens=9, do_sample=False)[0]
    text = load_tokenizer(tmp_path).decode(new, skip_special_tokens=True)
    assert text and PROMPT not in text
    result = run("generate", tmp_path, PROMPT, "--max-new-tokens", 9)
    assert (result.exit_code, result.stdout) == (0, named(text) + "\n")
    with dualinfer.init_inference(tmp_path) as engine:
        options = dict(max_new_tokens=9, do_sample=False)
        assert engine.generate_text(PROMPT, **options) == text
        assert "".join(engine.stream_text(PROMPT, **options)) == text


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ('{"model_type": "emu3_text_model"}', "'emu3_text_model' is not supported"),
        ('{"model_type": "llama", "odd": 1}', "config.json has odd=1"),
    ],
)
@pytest.mark.parametrize("command", [("parity",), ("generate", "x", "--backend", "both")])
def test_what_jax_does_not_run_is_refused_before_anything_is_loaded(
    run, tmp_path, command, config, why
):
    (tmp_path / "config.json").write_text(config)
    message = one_message(run(command[0], tmp_path, *command[1:]))
    assert why in message and "JAX does not run it" in message


@pytest.mark.parametrize("command", ["generate", "chat", "demo"])
def test_control_characters_of_a_model_are_named(run, talking, monkeypatch, command):
    def pieces(self, *args, **options):
        yield from ("\x1b[31mred\x1b]0;title\x07", "\r\x9b2J\x7f", "\tta\u3000b\n")

    shown = "\\x1b[31mred\\x1b]0;title\\x07\\r\\x9b2J\\x7f\tta\u3000b\n\n"
    if command == "demo":
        table = cli._side_by_side(Console(), "\x1b", {"one": cli._Run(None, "".join(pieces(None)))})
        text = str(next(iter(table.columns[0].cells)))
        assert text == "\\x1b" + shown.removesuffix("\n")
        return
    monkeypatch.setattr(FusedEngine, "stream_text", pieces)
    monkeypatch.setattr(FusedEngine, "stream_chat", pieces)
    arguments = ("\x1bc",) if command == "generate" else ()
    result = run(command, talking, *arguments, input="hello")
    assert result.stdout == ("\\x1bc" if arguments else "") + shown


def test_generate_fits_the_default_length_to_the_model(run, folder):
    long = "x" * 120  # of 128 positions
    result = run("generate", folder, long)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(long)


def test_generate_with_one_argument_continues_it_with_the_embedded_model(run, folder, monkeypatch):
    monkeypatch.setattr(embedded, "path", lambda: folder)
    result = run("generate", PROMPT, "--max-new-tokens", 5)
    assert result.stdout == expected_text(folder, 5, do_sample=False) + "\n"


def test_generate_asks_whether_the_prompt_should_be_quoted(run):
    assert "Did you mean to quote the prompt?" in one_message(run("generate", "import", "os"))
    result = run("generate", "a", "b", "c")
    assert result.exit_code == 2 and "Did you mean to quote the prompt?" in result.stderr


def test_the_hint_at_the_prompt_is_for_words_and_near_names_are_said(
    run, folder, tmp_path, monkeypatch
):
    """A folder without a model, a path, an adapter and a quoted prompt have no part in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder, tmp_path / "my-model")
    for arguments, said in [
        (("empty", "x"), "holds neither config.json"),
        (("nowhere", "a b"), "'nowhere' is no folder here"),
        (("nowhere/x", "y"), "'nowhere/x' is no folder here"),
        ((folder, "x", "--adapter", "nowhere"), "'nowhere' is no folder here"),
        (("nowhere", "x", "--revision", "main"), "'nowhere' is no folder here"),
        (("./my-modle", "x"), "('my-model' does)"),
        (("my-modle", "x"), "'my-modle' is no folder here ('my-model' is)"),
    ]:
        message = one_message(run("generate", *arguments))
        assert said in message and "quote the prompt" not in message


def test_commands_leave_out_what_imports_say(run):
    assert run("env").exit_code == 0
    for name, text in [("torchao", "Failed to load a.so"), ("torch.utils._pytree", "is an Enum")]:
        records = [logging.makeLogRecord({"msg": said}) for said in (f"{text} subclass", "else")]
        assert [bool(logging.getLogger(name).filter(record)) for record in records] == [False, True]


def test_no_option_has_its_own_name_for_its_value():
    def walk(command):
        yield command
        for under in getattr(command, "commands", {}).values():
            yield from walk(under)

    given = [p for c in walk(typer.main.get_command(cli.app)) for p in c.params if p.metavar]
    same = [p.name for p in given if p.param_type_name == "option" and p.metavar.lower() == p.name]
    assert len(given) > 90 and not same  # typer 0.27 would call `--url URL` --URL


def test_generate_takes_kernels_or_none(run, folder, monkeypatch):
    asked = []

    def init_inference(*args, replace_with_kernel_inject, **options):
        asked.append(replace_with_kernel_inject)
        return dualinfer.init_inference(*args, **options)

    monkeypatch.setattr(texts, "init_inference", init_inference)
    for option in ((), ("--kernels",), ("--no-kernels",)):
        assert run("generate", folder, PROMPT, "--max-new-tokens", 1, *option).exit_code == 0
    assert asked == [None, True, False]


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a chat template."""
    path = tmp_path_factory.mktemp("talking")
    write_llama(path, write_byte_tokenizer(path))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def answers(folder: Path, *chats: str) -> list[str]:
    """What follows these texts, by generate."""
    with dualinfer.init_inference(folder) as engine:
        return [engine.generate_text(chat, max_new_tokens=6) for chat in chats]


def test_generate_applies_the_chat_template(run, talking, folder):
    result = run("generate", talking, "hello", "--chat", "--max-new-tokens", 6)
    assert result.stdout == named(answers(talking, "user: hello|")[0]) + "\n"
    message = one_message(run("generate", folder, "hello", "--chat"))
    assert "no chat template" in message
    template = ("--chat-template", talking / "chat_template.jinja", "--max-new-tokens", 6)
    assert run("generate", folder, "hello", "--chat", *template).stdout == result.stdout
    refused = run("generate", folder, "hello", *template)
    assert refused.exit_code == 2 and "pass --chat as well" in refused.stderr


def test_chat_keeps_the_history_and_obeys(run, talking):
    first, again = answers(talking, "system: Be kind.|user: hello|", "system: New.|user: you|")
    (second,) = answers(talking, f"system: Be kind.|user: hello|assistant: {first}|user: more|")
    lines = "/retry", "hello", "more", "/retry", "/help", "/what", "/system", "/reset", "/retry"
    lines += "/system New.", "you", "", "/exit", "never"
    options = ("--system", "Be kind.", "--max-new-tokens", 6)
    result = run("chat", talking, *options, input="\n".join(lines))
    assert result.exit_code == 0, result.output
    assert result.stdout == named("".join(f"{text}\n" for text in (first, second, second, again)))
    assert result.stderr.count("There is no answer yet.") == 2
    assert result.stderr.count(" tokens/s: ") == 4
    assert "There is no /what." in result.stderr and "Be kind." in result.stderr


def test_chat_stops_an_answer_and_goes_on(talking, monkeypatch, capsys):
    with dualinfer.init_inference(talking) as engine:
        talk = texts._Talk(engine, None, 6, TextOptions(), None)
        real = type(engine).stream_chat

        def stopped(self, *args, **options):
            yield next(real(self, *args, **options)) + "a"
            raise KeyboardInterrupt

        monkeypatch.setattr(type(engine), "stream_chat", stopped)
        for line in ("one", "two"):
            talk._messages.append({"role": "user", "content": line})
            talk._answer()
        assert [m["role"] for m in talk._messages] == ["user", "assistant"] * 2
        assert talk._messages[1]["content"].endswith("a")
        assert capsys.readouterr().out.count(" [stopped]\n") == 2


def test_chat_in_a_pipe_says_what_is_too_long_and_goes_on(run, talking):
    """Here of 129 tokens; the text of an answer may be more tokens when it is read again."""
    (first,) = answers(talking, "user: hello|")
    long = "x" * 200
    options = ("--max-new-tokens", 6)
    result = run("chat", talking, *options, input=f"hello\n{long}\n/reset\nhello")
    assert (result.exit_code, result.stdout) == (1, named(first + "\n") * 2)
    error = " ".join(result.stderr.split())
    assert "error: This message is too long" in error and "has 207 tokens" in error
    result = run(
        "chat", talking, "--max-new-tokens", 100, "--system", "Be kind.", input="hello\nyou"
    )
    assert result.exit_code == 1 and result.stdout.count("\n") == 1
    assert "The conversation is too long" in result.stderr or "No room" in result.stderr
    for way in ("/reset", "--max-new-tokens", "--system"):
        assert way in result.stderr
    assert run("chat", talking, *options, input="hello").exit_code == 0


def test_an_answer_leaves_room_for_the_next_turn(run, talking):
    """Where nobody names its length, it takes half of what is left."""
    result = run("chat", talking, "--stop", "|", input="hello")
    count = int(re.match(r"(\d+) new tokens", result.stderr)[1])
    assert result.exit_code == 0 and count <= (129 - len("user: hello|") + 1) // 2


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_standard_input_that_is_no_text_is_told(run, talking, command):
    arguments = ("-",) if command == "generate" else ()
    message = one_message(run(command, talking, *arguments, input=b"a\xff\xfe"))
    assert "Standard input is no text" in message


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("parity", "MODEL", "a text"), "dualinfer parity MODEL --prompt 'a text'"),
        (("demo", "a text"), "dualinfer demo --prompt 'a text'"),
        (("chat", "MODEL", "a text"), "echo 'a text' | dualinfer chat MODEL"),
    ],
)
def test_a_text_in_the_wrong_place_is_answered_by_the_right_one(run, arguments, hint):
    result = run(*arguments)
    assert result.exit_code == 2 and hint in re.sub(r"[\s│]+", " ", result.stderr)
    assert "--prompt 'a text'" in one_message(run("parity", "a text"))


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("backend='torch', dtype=\"bf16\"", "--backend torch, --dtype bf16"),
        ("with replace_with_kernel_inject=True", "with --kernels"),
        ("replace_with_kernel_inject=False", "--no-kernels"),
        ("Without replace_with_kernel_inject it runs.", "Without --kernels it runs."),
        ("temperature=-0.5; top_k='x'", "--temperature -0.5; --top-k x"),
        ("a seed, its own backend, /a/dtype=x/b", "a seed, its own backend, /a/dtype=x/b"),
        ("Ask for less, cut it, or set a larger max_out_tokens.", "Ask for less or cut it."),
        ("It has none. Use generate_text() instead, or set tokenizer.chat_template.",
         "It has none. Use `dualinfer generate` without --chat instead."),
        ("No such field. Load it and pass the module, with backend='torch'.",
         "No such field. In Python, load it and pass the module, with backend='torch'."),
        ("Use --tp 2, or set CUDA_VISIBLE_DEVICES= to run.",
         "Use --tp 2, or set CUDA_VISIBLE_DEVICES= to run."),
    ],
)  # fmt: skip
def test_errors_speak_of_options(message, typed):
    commands = typer.main.get_command(cli.app).commands
    assert explain(message, commands["generate"]) == typed
    if "backend" in message:
        assert "--backend" not in explain(message, commands["demo"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--cache-tokens many", "expected a number from 1, or auto"),
        ("--cache-tokens 0", "expected a number from 1, or auto"),
        ("--memory-fraction 1.5", "above 0 and at most 1"),
        ("--memory-fraction 0.1 --max-sequences 4", "and --max-sequences 4 does"),
        ("--memory-fraction 0.1 --cache-tokens 64", "and --cache-tokens 64 does"),
    ],
)
def test_a_size_of_the_cache_that_is_none_is_refused_before_anything_is_opened(run, options, said):
    result = run("serve", "no/model", *options.split())
    assert result.exit_code == 2 and said in re.sub(r"[\s│]+", " ", result.stderr)


def test_chat_needs_a_template(run, folder):
    assert "no chat template" in one_message(run("chat", folder, input="hello"))


HELP = {
    (): "COMMAND [ARGS]...",
    ("generate",): "[MODEL] PROMPT",
    ("chat",): "MODEL",
    ("demo",): "",
    ("parity",): "[MODEL]",
    ("plan",): "MODEL",
    ("launch",): "SCRIPT [ARGUMENT]...",
    ("env",): "",
    ("bench",): "COMMAND [ARGS]...",
    ("bench", "decode"): "[MODEL]",
    ("bench", "ops"): "[NAME]",
}


@pytest.mark.parametrize("command", HELP, ids=" ".join)
def test_help_is_whole_at_80_columns_and_in_one_style(run, command):
    shown = run(*command, "-h").stdout
    assert re.search(r"\[OPTIONS\] ?(.*)", shown)[1] == HELP[command]  # pyright: ignore
    assert not re.search(r"…|\.\.\.$|[<{]\w", shown.partition("\n")[2], re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= 80
    takes_auto = command and command[0] in ("generate", "chat", "parity", "plan")
    assert bool(re.search(r"\bauto\b", shown)) == bool(takes_auto)


def test_long_lines_break_between_words_alone():
    path = "/a path/with blanks/and a name that is much longer than a line of 40 columns.json"
    text = (
        f"error: {path!r} is the model's, and `dualinfer plan a --tp 4` shows it:\n    - indented"
    )
    text += " lines stay in, users' words are no quotes; see https://example.org/a-very-long-name/x"
    lines = fold(text, 40).split("\n")
    assert " ".join(line.strip() for line in lines) == " ".join(text.split()).replace("\n    ", " ")
    assert f"{path!r}" in lines and any("`dualinfer plan a --tp 4`" in line for line in lines)
    assert "https://example.org/a-very-long-name/x" in [line.strip() for line in lines]
    at = next(i for i, line in enumerate(lines) if "- indented" in line)
    assert all(line.startswith("    ") for line in lines[at:])
    assert all(len(line) <= 40 or " " not in line.strip().replace(repr(path), "") for line in lines)


def test_warnings_are_told_without_lines_of_code(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(cli, "app", lambda obj: warnings.warn("long " * 20, stacklevel=1))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        cli.main()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [" ".join(["warning:", *["long"] * 14]), " ".join(["long"] * 6)]


def test_errors_are_folded_to_the_width(run, tmp_path):
    lines = run("parity", tmp_path / ("x" * 90) / "model").stderr.splitlines()
    assert len(lines) > 2 and lines[0] == "error:"
    assert all(len(line) <= 80 for line in lines if "xxx" not in line)


def test_output_that_cannot_be_written_is_one_message(monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["dualinfer", "--version"])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which main sets
    full = Path("/dev/full").open("w")  # noqa: SIM115 (main closes it)
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    said = "error: the output cannot be written: No space left on device.\n"
    assert (ended.value.code, capfd.readouterr().err) == (1, said)


def test_a_prompt_of_other_bytes_than_text_is_told(run, folder):
    said = one_message(run("generate", folder, "caf\udce9", "--max-new-tokens", 1))
    assert "was read from bytes that are no UTF-8" in said


def test_version(run):
    assert run("--version").stdout == f"dualinfer {dualinfer.__version__}\n"


def test_generate_notices_a_forgotten_prompt(run, folder):
    result = run("generate", folder)
    assert result.exit_code == 2
    assert "the prompt is missing" in re.sub(r"[\s│]+", " ", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere", "x"), "'nowhere' is no folder here"),
        (("MODEL", ""), "The prompt is empty"),
        (("MODEL", "x", "--max-new-tokens", 500), "fewer new tokens or shorten the prompt."),
        (("MODEL", "x", "--dtype", "int3"), "--dtype int3: a model computes in"),
        (
            ("MODEL", "x", "--quant", "int5"),
            "input should be 'int8', 'int4', 'fp8', 'nvfp4', 'mxfp4', ",
        ),
        (("MODEL", "x", "--temperature", 0), "expected a number above 0"),
        (("MODEL", "x", "--max-new-tokens", 0), "--max-new-tokens 0"),
        (("MODEL", "x", "--stop", ""), "--stop ['']; expected non-empty strings"),
    ],
)
def test_generate_fails_with_one_clean_message(run, folder, arguments, message):
    given = [folder if a == "MODEL" else a for a in arguments]
    assert message in one_message(run("generate", *given))


def test_generate_fails_cleanly_without_a_tokenizer(run, tmp_path):
    assert "holds no tokenizer" in one_message(run("generate", write_llama(tmp_path, 50), "x"))


def test_demo_shows_both_texts_and_says_that_they_are_equal(run, folder, monkeypatch):
    monkeypatch.setattr(embedded, "path", lambda: folder)
    result = run("demo", "--max-new-tokens", 16, "--prompt", PROMPT)
    assert result.exit_code == 0, result.output
    assert re.search(r"^. torch +. jax", result.stdout, re.MULTILINE)
    summary = re.search(
        r"All (\d+) new tokens are equal; logits differ by (\S+) relative RMS; "
        r"tokens per second: torch [\d,]+, jax [\d,]+\.",
        " ".join(result.stdout.split()),
    )
    assert summary, result.stdout
    assert 1 <= int(summary[1]) <= 16
    assert float(summary[2]) < 1e-4
    assert "no benchmark" in result.stdout


def test_demo_fails_where_tokens_differ(run, folder, tmp_path, monkeypatch):
    other = write_llama(tmp_path, write_byte_tokenizer(tmp_path), dtype="bfloat16")
    real = cli.init_inference

    def unequal(model, backend, **options):
        return real(other if backend == "jax" else model, backend=backend, **options)

    monkeypatch.setattr(embedded, "path", lambda: folder)
    monkeypatch.setattr(cli, "init_inference", unequal)
    result = run("demo", "--max-new-tokens", 16)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output


def test_parity_prints_a_row_a_layer(run, folder):
    result = run("parity", folder, "--prompt", PROMPT)
    assert result.exit_code == 0, result.output
    for name in ("embedding", "layer 0", "layer 1", "logits"):
        assert name in result.stdout
    assert not re.search(r"[ \t]$", result.stdout, re.MULTILINE)
    assert "Best token equal at 6 of 6 positions" in result.stdout


def test_quant_is_what_the_config_field_is(run, folder, monkeypatch):
    asked = []
    monkeypatch.setattr(texts, "init_inference", spy := seen(texts.init_inference, asked))
    monkeypatch.setattr(cli, "init_inference", spy)
    made = run("generate", folder, PROMPT, "--quant", "INT4", "--max-new-tokens", 4)
    assert made.exit_code == 0 and made.stdout == expected_text(folder, 4, quant="int4") + "\n"
    result = run("parity", folder, "--prompt", PROMPT, "--quant", "nvfp4")
    assert result.exit_code == 0 and "jax against torch, float32, quantized to nvfp4" in (
        " ".join(result.stdout.split())
    )
    schemes = [{kind.split(",")[0] for kind in weights} for weights in asked]
    assert schemes == [
        {"float32", "int4", "int8", "head"},
        *[{"float32", "fp4", "int8", "head"}] * 2,
    ]
    message = one_message(run("parity", folder, "--quant", "q4"))
    assert "--quant q4: input should be 'int8', 'int4', 'fp8', 'nvfp4', 'mxfp4', " in message


def seen(make, reports):
    """`init_inference` that notes how the engines that it makes hold their weights."""

    def noting(*args, **kwargs):
        engine = make(*args, **kwargs)
        reports.append(engine.report().weights)
        return engine

    return noting


def test_parity_fails_where_the_backends_are_apart(run, folder, tmp_path, monkeypatch):
    """Here because one of them has other weights."""
    other = write_llama(tmp_path, write_byte_tokenizer(tmp_path), dtype="bfloat16")
    real = cli.init_inference

    def unequal(model, backend, **options):
        return real(other if backend == "jax" else model, backend=backend, **options)

    monkeypatch.setattr(cli, "init_inference", unequal)
    result = run("parity", folder, "--prompt", PROMPT)
    assert result.exit_code == 1
    assert "Apart by more than rounding" in result.stdout


def test_speed_is_that_of_new_tokens(monkeypatch):
    clock = [0.0]

    class Engine:
        def generate(self, ids, max_new_tokens, do_sample):
            clock[0] += 100.0 if not clock[0] else 4.0  # the first call compiles
            return np.zeros((1, ids.shape[1] + max_new_tokens), np.int64)

    monkeypatch.setattr(cli.time, "perf_counter", lambda: clock[0])
    assert cli._tokens_per_second(Engine(), np.zeros((1, 30), np.int64), 20) == 5.0


def test_parity_without_a_tokenizer_takes_plain_ids(run, tmp_path):
    result = run("parity", write_llama(tmp_path, 50))
    assert result.exit_code == 0, result.output
    assert "16 of 16 positions" in result.stdout


def test_env_shows_versions_devices_and_whether_kernels_can_run(run):
    result = run("env")
    assert result.exit_code == 0, result.output
    for part in ("python", "transformers", "torch devices", "jax devices", "cpu"):
        assert part in result.stdout
    assert "plain operations" in result.stdout
    assert "Triton: not usable" in result.stdout
    assert not re.search(r"[ \t]$", result.stdout, re.MULTILINE)


def test_no_arguments_show_help(run):
    result = run()
    for command in ("generate", "demo", "parity", "bench", "env"):
        assert command in result.output


def test_bench_shows_its_workloads_and_shapes(run):
    result = run("bench")
    for command in ("decode", "prefill", "forward", "ops"):
        assert command in result.output
    help_text = run("bench", "decode", "--help").stdout
    for part in ("--shape", "llama-3-8b", "--peer", "hf-compile", "--json", "--plot"):
        assert part in help_text


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal of its own")
@pytest.mark.parametrize(("rows", "is_paged"), [(24, True), (200, False)])
def test_help_that_is_longer_than_the_terminal_is_paged(rows, is_paged):
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (rows, 80))
    own = {k: v for k, v in os.environ.items() if k not in ("LINES", "COLUMNS", "MANPAGER")}
    own |= {"PAGER": "sed s/^/paged:/", "TERM": "xterm"}
    command = [sys.executable, "-m", "dualinfer", "generate", "--help"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=own)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
        while piece := os.read(ours, 4096):
            said += piece
    os.close(ours)
    assert process.wait(60) == 0 and b"Usage:" in said
    assert (b"paged:" in said) == is_paged


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_embedded_model_writes_python(run, backend):
    result = run("generate", "import os\nimport ", "--max-new-tokens", 12, "--backend", backend)
    assert result.exit_code == 0, result.output
    assert re.search(r"^import \w+$", result.stdout.removeprefix("import os\n"), re.MULTILINE)


def test_demo_runs_with_the_embedded_model(run):
    result = run("demo", "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    assert "All 8 new tokens are equal" in result.stdout
