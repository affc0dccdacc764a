"""Help, usage errors, doctor and complete."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

import click
import llama_cpp
import pytest
from fake_rpc import fake_rpc_server
from gguf_edit import edit_gguf

import pyfly_cpp
from pyfly_cpp import _native
from pyfly_cpp.cli import _COMMANDS, cli
from pyfly_cpp.cli.headings import HeadedCommand
from pyfly_cpp.cli.text import repaired
from pyfly_cpp.errors import NativeError
from pyfly_cpp.machine import extra_buffers, kernels

from .conftest import DRAFT, HYBRID, TARGET

ONE_THREAD = ("--n-threads", 1)


def test_version(run):
    assert run("--version").out == f"pyfly-cpp {pyfly_cpp.__version__}\n"


def test_unknown_command_is_usage_with_a_hint(run):
    result = run("chta")
    assert result.code == 2
    assert "Did you mean 'chat'?" in result.err


@pytest.mark.parametrize(
    ("arguments", "here"),
    [
        (["run"], "`chat`"),
        (["pull", "x"], "`models fetch`"),
        (["list"], "`models list`"),
        (["generate"], "`complete`"),
        (["help"], "`--help`"),
        (["a/x.gguf", "-t", 1], "`chat a/x.gguf`"),
        (["models", "rm", "x"], "`models remove`"),
        (["models", "lst"], "'list'"),
        (["chat", "-p", "x"], "`complete PROMPT`"),
        (["-p", "x"], "`complete PROMPT`"),
        (["models", "-p", "x"], "`complete PROMPT`"),
        (["-m", "x.gguf"], "chat -m`"),
        (["complete", "--predict", 5], "`-n`"),
        (["complete", "two", "words"], "quotes"),
        (["explain", "two", "words"], "quotes"),
    ],
)
def test_names_of_other_programs(run, arguments, here):
    result = run(*arguments)
    said = " ".join(result.err.split())
    assert result.code == 2 and said.count(here) == 1 and "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "nowhere.gguf"], 1, "Error: there is no model file 'nowhere.gguf'; check the path."),
        (["--model", ""], 1, "the name of a model is empty; give a path"),
        (["--model", "caf\udce9.gguf"], 1, "is not UTF-8; rename the file."),
        (["--model", "smollm-135m"], 1, "Did you mean 'smollm2-135m'?"),
        (["--model", "hf:o/r:Q4_0"], 1, "is not fetched yet; run `pyfly-cpp models fetch hf:o/r:Q4_0`"),
        (["--model", __file__], 1, "is not a GGUF file"),
        (["--model", TARGET, "--gate", "marign:0.3"], 2, "Did you mean 'margin'?"),
        (["--model", TARGET, "--gate", "all(stochastic,margin)"], 2, "there is nothing to combine; use it alone"),
        (["--model", TARGET, "--drafter", "lookup", "--p-min", 0.5], 2, "--p-min is for --drafter draft or"),
        (["--model", TARGET, "--gate", "stochastic", "--window", 3], 1, "has no use for the window agree:3; leave it"),
        (
            ["--model", TARGET, "--drafter", "draft"],
            1,
            "needs a draft model; write draft:FILE, or give it with",
        ),
        (["--model", TARGET, "--drafter", "eagle3"], 1, "needs an EAGLE-3 head; write eagle3:FILE, or give it with"),
        (["--model", TARGET, "--drafter", "eagel3"], 2, "Did you mean 'eagle3'?"),
        (["--model", TARGET, "--drafter", "foo"], 2, "A drafter is written auto, "),
        (["--model", TARGET, "--drafter", f"eagle3:{DRAFT}"], 1, "use --drafter draft."),
        (["--model", TARGET, "--cache-type-v", "q8_0", "--no-flash-attn"], 1, "--cache-type-v"),
        (["--preset", __file__], 1, "correct it, or take one of "),
        (["--model", TARGET, "--draft", DRAFT, "--drafter", "lookup"], 2, "contradict"),
        (["--model", TARGET, "--draft-max", 5000], 1, "--draft-max is 5000, but a batch of 512 tokens (--n-batch)"),
        (["--model", TARGET, "--max-tokens", 2**31], 2, "is too large; the largest is 2147483647"),
        (["--model", TARGET, "--temperature", "nan"], 2, "nan is not a finite number"),
        (["--model", TARGET, "--chat-format", "chatmll"], 2, "Did you mean 'chatml'? The formats are "),
        (["--model", TARGET, "--raw", "--system", "x"], 2, "leave out --raw or --system"),
        (["--model", TARGET, "--rpc", "box"], 2, "an RPC server is written HOST:PORT, such as 192.168.0.7:50052, not"),
        (["--model", TARGET, "--devices", "CUDA0,"], 2, "has an empty name"),
        (["--model", TARGET, "--devices", "Cuda77"], 1, "there is no device 'Cuda77'"),
        (["--model", TARGET, "--draft", DRAFT, "--draft-devices", "Cuda77"], 1, "there is no device 'Cuda77'"),
        (
            ["--model", TARGET, "--devices", "none", "--tensor-split", "3,1"],
            1,
            "tensor_split has 2 shares for 0 devices",
        ),
        (["--model", TARGET, "--no-such-option"], 2, "--no-such-option"),
        (["--model", TARGET, "--stop", ""], 2, "--stop"),
        (["--model", TARGET, "--drafter", "mtp"], 1, "--draft"),
    ],
)
def test_errors(run, arguments, code, message):
    result = run("complete", *arguments, *ONE_THREAD, "a prompt")
    assert result.code == code
    assert message in result.err
    assert result.out == ""
    if code == 1:
        assert len(result.err.splitlines()) == 1


def test_too_many_threads_are_wrong_usage(run):
    result = run("complete", "-m", TARGET, "-t", 999, "x")
    assert result.code == 2 and "'-t' / '--n-threads': '999' is not a number of threads in 1..512" in result.err


def test_debug_brings_the_traceback_back(monkeypatch):
    done = subprocess.run(
        [sys.executable, "-m", "pyfly_cpp", "complete", "-m", "nowhere.gguf", "x"],
        env={**__import__("os").environ, "PYFLY_DEBUG": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("package", ["click", "rich"])
def test_without_the_packages_of_the_command_line(package):
    block = f"import sys; sys.modules['{package}'] = None; sys.argv = ['pyfly-cpp', 'chat', '-m', {str(TARGET)!r}]\n"
    block += "import pyfly_cpp\nfrom pyfly_cpp.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert done.stderr == f"Error: the command line needs {package}; run `pip install 'pyfly-cpp[cli]'`.\n"


# ---- complete --------------------------------------------------------------------------------------------------------


def complete(run, *arguments, stdin=""):
    """Continues a text, unless --chat is among the arguments."""
    result = run("complete", "--raw", "--model", TARGET, *ONE_THREAD, "--max-tokens", 24, *arguments, stdin=stdin)
    assert result.code == 0, result.err
    return result


def test_complete_takes_an_argument_or_stdin(run):
    by_argument = complete(run, "Natalia sold")
    assert by_argument.out.strip()
    assert by_argument.err == ""
    assert complete(run, stdin="Natalia sold\n").out == by_argument.out
    assert complete(run, "-", stdin="Natalia sold\n").out == by_argument.out


def test_complete_joins_what_is_piped_in_files_and_the_prompt(run, tmp_path):
    (tmp_path / "a.txt").write_text("Tom has 3 apples.")
    expected = complete(run, "Tom has 3 apples.\nNatalia sold").out
    assert complete(run, "Natalia sold", stdin="Tom has 3 apples.\n").out == expected
    assert complete(run, "-f", tmp_path / "a.txt", "Natalia sold").out == expected
    both = complete(run, "Tom has 3 apples.\nNatalia\nsold").out
    assert complete(run, "sold", "--file", tmp_path / "a.txt", stdin="Natalia").out == both
    for bad, message in (
        (tmp_path / "none.txt", "none.txt' cannot be read (No such file"),
        (TARGET, "is not UTF-8 at"),
    ):
        result = run("complete", "-m", TARGET, "-f", bad, "x")
        assert result.code == 1 and message in result.err and len(result.err.splitlines()) == 1


def test_complete_with_an_adapter_and_other_caches(run, lora, tmp_path):
    plain = complete(run, "Natalia sold").out
    assert complete(run, "--lora", lora, "Natalia sold").out != plain
    assert complete(run, "--tensor-split", "3,1", "Natalia sold").out == plain
    quantised = json.loads(
        complete(run, "--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "--json", "Natalia sold").out
    )
    assert quantised["text"] and quantised["settings"]["type_k"] == "q8_0"
    for arguments, code, message in (
        (["--lora", tmp_path / "none.gguf"], 1, "LoRA adapter '"),
        (["--lora", TARGET], 1, "it is damaged, or was not made for "),
        (["--cache-type-v", "q8_0", "--no-flash-attn"], 1, "needs flash attention; add --flash-attn"),
        (["--cache-type-k", "q9"], 2, "'q9' is not one of"),
        (["--tensor-split", "1,x"], 2, "write one number for each GPU"),
        (["--tensor-split", "0,0"], 2, "write one number for each GPU"),
    ):
        result = run("complete", "-m", TARGET, *arguments, "x")
        assert result.code == code and message in result.err, result.err


def test_a_prompt_cache(run, tmp_path, monkeypatch):
    file, prompt = tmp_path / "prompt.cache", "Natalia sold clips to 48 of her friends in April."
    first = json.loads(complete(run, "--json", "--prompt-cache", file, prompt).out)
    again = json.loads(complete(run, "--json", "--prompt-cache", file, prompt).out)
    longer = json.loads(complete(run, "--json", "--prompt-cache", file, f"{prompt} And in May?").out)
    assert first["stats"]["prefilled"] > 10 and again["stats"]["prefilled"] == 0 and again["text"] == first["text"]
    assert longer["stats"]["prefilled"] < 10
    assert longer["text"] == json.loads(complete(run, "--json", f"{prompt} And in May?").out)["text"]
    assert "will be overwritten" in complete(run, "-c", 512, "--prompt-cache", file, prompt).err
    monkeypatch.setattr(llama_cpp, "__version__", "0.1.2")
    assert "will be overwritten" in complete(run, "-c", 512, "--prompt-cache", file, prompt).err
    damaged = file.read_bytes()
    file.write_bytes(damaged[:-1])
    other = tmp_path / "precious.txt"
    other.write_text("mine")
    for path, message in (
        (file, "is damaged; delete it"),
        (other, "not a prompt cache of pyfly-cpp"),
        (tmp_path, "cannot be read"),
    ):
        result = run("complete", "-m", TARGET, *ONE_THREAD, "-n", 2, "--prompt-cache", path, "x")
        assert result.code == 1 and message in result.err and len(result.err.splitlines()) == 1
    assert other.read_text() == "mine"


def test_a_prompt_cache_of_a_rotated_cache(run, tmp_path, monkeypatch):
    q8 = [
        "--cache-type-k",
        "q8_0",
        "--cache-type-v",
        "q8_0",
        "--flash-attn",
        "Natalia sold clips to 48 of her friends.",
    ]
    file = tmp_path / "prompt.cache"
    complete(run, "--prompt-cache", file, *q8)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    other = complete(run, "--prompt-cache", file, *q8)
    assert "overwritten" in other.err and other.out == complete(run, *q8).out
    assert "overwritten" not in complete(run, "--prompt-cache", file, *q8).err


def test_utf8_that_was_read_as_ascii_is_right():
    read = "caf\u00e9 \U0001f600".encode().decode("ascii", "surrogateescape")
    assert repaired(read, "the message") == "caf\u00e9 \U0001f600"


def test_complete_repairs_what_is_not_utf8(run):
    for arguments, stdin in ((["caf\udce9"], ""), ([], b"caf\xe9"), (["--stop", "\ud800", "cafe"], "")):
        result = run("complete", "-m", TARGET, *ONE_THREAD, "-n", 4, *arguments, stdin=stdin)
        assert result.code == 0 and "not valid UTF-8: one character was replaced" in result.err, result.err


def test_complete_is_lossless_by_default(run):
    drafted = complete(run, "--draft", DRAFT, "Natalia sold")
    assert drafted.out == complete(run, "--drafter", "none", "Natalia sold").out


def test_complete_json(run):
    options = ("--draft", DRAFT, "--draft-max", "4", "--no-adaptive", "--gate", "margin:0.5")
    result = json.loads(complete(run, "--json", *options, "Natalia sold").out)
    assert result["finish_reason"] == "length"
    assert result["usage"]["completion_tokens"] == 24
    assert result["stats"]["committed"] == 24  # not what a window that closed late accepted behind the limit
    assert result["stats"]["drafted"] > 0
    assert result["settings"]["gate"] == "margin:0.5"
    assert result["settings"]["window"] == "agree:0"
    assert result["text"]


def test_complete_samples_anew_at_every_start(run):
    """And says with which seed, which gives the same text again."""
    one, other = (json.loads(complete(run, "--json", "--temperature", 1.5, "Natalia sold").out) for _ in range(2))
    assert one["text"] != other["text"]
    seed = one["settings"]["seed"]
    again = complete(run, "--json", "--temperature", 1.5, "--seed", seed, "Natalia sold")
    assert json.loads(again.out)["text"] == one["text"]
    said = complete(run, "--stats", "--temperature", 1.5, "--seed", seed, "Natalia sold").err
    assert f"seed {seed}" in said
    assert "seed" not in complete(run, "--stats", "Natalia sold").err


def test_complete_chat_and_stop(run):
    text = json.loads(complete(run, "--chat", "--json", "How many apples has Tom?").out)["text"]
    word = text.split()[2]
    stopped = json.loads(complete(run, "--chat", "--json", "--stop", word, "How many apples has Tom?").out)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.index(word)]


def test_complete_answers_by_the_chat_template_if_there_is_one(run, tmp_path):
    bare = edit_gguf(TARGET, tmp_path / "bare.gguf", {"tokenizer.chat_template": None})

    def ask(*arguments):
        result = run("complete", "--json", *ONE_THREAD, "-n", 8, *arguments, "How many apples has Tom?")
        assert result.code == 0, result.err
        said = json.loads(result.out)
        return said["text"], said["usage"]["prompt_tokens"], said["settings"]["chat"]

    answered, continued = ask("-m", TARGET, "--chat"), ask("-m", TARGET, "--raw")
    assert answered[2] and not continued[2] and answered[1] > continued[1]
    assert ask("-m", TARGET) == answered
    assert ask("-m", bare) == continued
    assert ask("-m", bare, "--chat-format", "chatml")[2] and ask("-m", bare, "--chat")[2]
    for flag in ("--chat", "--raw"):
        said = run("complete", "-m", bare, *ONE_THREAD, flag, "-n", 2, "How?").err
        assert ("no chat template" in said) == (flag == "--chat")
    with_system = ask("-m", TARGET, "--system", "Be brief.")
    assert with_system[1] > answered[1]
    refused = run("complete", "-m", bare, *ONE_THREAD, "--system", "Be brief.", "How?")
    assert refused.code == 1 and "--chat-format" in refused.err and len(refused.err.splitlines()) == 1


def test_complete_grammar_and_schema(run, tmp_path):
    grammar = tmp_path / "digits.gbnf"
    grammar.write_text('root ::= [0-9] [0-9] "."\n')
    assert complete(run, "--grammar", grammar, "2 + 2 =").out.strip()[-1] == "."
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}')
    assert "n" in json.loads(complete(run, "--json-schema", schema, "A number:").out)
    assert "n" in json.loads(complete(run, "--json-schema", schema.read_text(), "A number:").out)
    assert run("complete", "-m", TARGET, "--json-schema", "{", "x").code == 1
    schema.write_text("{")
    assert run("complete", "-m", TARGET, "--json-schema", schema, "x").code == 1
    assert run("complete", "-m", TARGET, "--json-schema", schema, "--grammar", grammar, "x").code == 2


@pytest.mark.parametrize("content", ["[]", '{"type": "foo"}', '{"properties": 3}', "[" * 9999], ids=len)
def test_a_schema_that_is_none_is_one_line(run, tmp_path, content):
    schema = tmp_path / "schema.json"
    schema.write_text(content)
    result = run("complete", "-m", TARGET, "--json-schema", schema, "x")
    assert result.code == 1 and "schema.json" in result.err and len(result.err.splitlines()) == 1


def test_a_grammar_that_is_not_utf8_is_one_line(run, tmp_path):
    (tmp_path / "g.gbnf").write_bytes(b'root ::= "\xff"')
    result = run("complete", "-m", TARGET, "--grammar", tmp_path / "g.gbnf", "x")
    assert result.code == 1 and "g.gbnf' is not UTF-8 at byte 10; save the file as UTF-8." in result.err


def test_a_grammar_that_does_not_parse_is_one_line(tmp_path):
    (tmp_path / "g.gbnf").write_text("no rules, private text")
    command = [
        sys.executable,
        "-m",
        "pyfly_cpp",
        "complete",
        "-m",
        TARGET,
        *ONE_THREAD,
        "--grammar",
        tmp_path / "g.gbnf",
    ]
    done = subprocess.run([*map(str, command), "x"], capture_output=True, text=True)
    assert done.returncode == 1 and "g.gbnf" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_a_batch_that_memory_does_not_hold(run, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("pyfly_cpp.cli.complete.FlyLlama", fail)
    result = run("complete", "-m", TARGET, *ONE_THREAD, "--n-batch", 100_000_000, "x")
    assert result.code == 1 and "--n-batch 100000000; lower it" in result.err


def test_closed_pipe_is_no_traceback():
    command = f"{sys.executable} -m pyfly_cpp complete --raw -m {TARGET} -t 1 -n 300 'Natalia sold' | head -c 5"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert len(done.stdout) == 5
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["complete -n 4 Natalia", "chat -n 4"])
def test_closed_streams_are_no_traceback(command, closed):
    line = f"echo Natalia | {sys.executable} -m pyfly_cpp {command} -m {TARGET} -t 1 {closed}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert bool(done.stdout.strip()) == (">&-" not in closed.split() and not ("chat" in command and "<&-" in closed))


def test_a_context_that_is_too_long_or_rounded_up_says_so(run):
    result = run("complete", "-m", TARGET, *ONE_THREAD, "-n", 2, "-c", 3000, "Natalia sold")
    assert result.code == 0
    (line,) = result.err.splitlines()
    assert line.startswith(
        "Warning: tiny-llama-target-f16.gguf was trained on contexts of 2048 tokens, and --n-ctx asks"
    )
    for command in (("complete", "--raw"), ("complete",)):
        result = run(*command, "-m", TARGET, *ONE_THREAD, "--n-ctx", 64, "many words " * 100)
        assert result.code == 1 and "holds 256 (64, rounded up)" in result.err, result.err


def test_the_end_of_the_context_is_told(run):
    for more in ((), ("--json",)):
        raw = ("complete", "--raw", "-m", TARGET, *ONE_THREAD)
        result = run(*raw, "-n", 300, "-c", 8, *more, "many words " * 84)
        assert result.code == 0
        rounded, full = result.err.splitlines()
        assert "--n-ctx 8 is rounded up to 256" in rounded and "the context is full; raise --n-ctx" in full
        result = run(*raw, "-n", 2, "-c", 256, *more, "many words " * 84)
        assert "is full" not in result.err, "the prompt has 254 tokens, and it has all that was asked for"
    assert complete(run, "-n", 3, "many words").err == ""


def test_a_draft_that_the_model_s_own_head_leaves_unused_is_told(run):
    options = ("-m", HYBRID, "-d", DRAFT, *ONE_THREAD, "-n", 2, "many words")
    (line,) = run("complete", *options).err.splitlines()
    assert "--draft is not used: the model has an MTP head; choose it with --drafter draft" in line


def test_a_model_that_is_refused_once_it_is_loaded_is_freed_in_order():
    """Else the process would end with a signal, behind the error."""
    command = [sys.executable, "-m", "pyfly_cpp", "complete", "-m", str(TARGET), "--draft-max", "5000", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "--draft-max is 5000" in done.stderr


def test_an_interrupt_is_one_line(run, monkeypatch):
    from pyfly_cpp.cli import complete

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(complete.cache, "load", interrupted)
    result = run("complete", "-m", TARGET, "--prompt-cache", "x", "x")
    assert (result.code, result.err) == (130, "Interrupted.\n")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_ctrl_c_is_heard_though_llama_cpp_logs(run, monkeypatch, tmp_path):
    """A signal comes while C runs in the first step, and C logs before Python can hear it."""
    fifo, step = tmp_path / "fifo", _native.Batch.step_alone
    os.mkfifo(fifo)
    is_in_c, is_over = threading.Event(), threading.Event()

    def interrupt():
        is_in_c.wait()
        os.kill(os.getpid(), signal.SIGINT)
        pipe = os.open(fifo, os.O_RDWR)  # C waits for somebody who writes
        is_over.wait()
        os.close(pipe)

    def first_step(batch):
        monkeypatch.setattr(_native.Batch, "step_alone", step)
        thread = threading.Thread(target=interrupt)
        thread.start()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(60)  # the other thread runs when this one is in C
        try:
            params = llama_cpp.llama_model_default_params()
            is_in_c.set()
            assert not llama_cpp.llama_model_load_from_file(bytes(fifo), params)
        finally:
            sys.setswitchinterval(interval)
            is_over.set()
            thread.join()
        return batch.step_alone()

    monkeypatch.setattr(_native.Batch, "step_alone", first_step)
    result = run("complete", "-m", TARGET, *ONE_THREAD, "-n", 4, "Tom")
    assert (result.code, result.out, result.err) == (130, "", "Interrupted.\n")


@pytest.mark.parametrize("module", ["numpy", "click", "pyfly_cpp.cli.chat_command"])
def test_an_interrupt_while_modules_are_imported(module):
    block = f"""
import sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
sys.argv = ["pyfly-cpp", "chat", "-m", {str(TARGET)!r}]
from pyfly_cpp.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 130 and "Traceback" not in done.stderr


def every_command():
    """(name, command) of all commands, and of the commands in them."""

    def walk(name, command):
        yield name, command
        for inner, other in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {inner}", other)

    for name in _COMMANDS:
        yield from walk(name, cli.get_command(None, name))


def test_one_name_for_one_option_on_every_command():
    long_of, takes_value = {}, {}
    for name, command in every_command():
        for option in (param for param in command.params if param.param_type_name == "option"):
            first, *_ = (opt for opt in option.opts if opt.startswith("--"))
            for short in (opt for opt in option.opts if not opt.startswith("--")):
                assert long_of.setdefault(short, first) == first, f"{short} of {name}"
            assert takes_value.setdefault(first, not option.is_flag) is not option.is_flag, f"{first} of {name}"
    assert long_of == {
        "-m": "--model", "-d": "--draft", "-c": "--n-ctx", "-t": "--n-threads", "-n": "--max-tokens",
        "-o": "--output", "-f": "--file", "-s": "--setting", "-y": "--yes", "-md": "--draft", "-ngl": "--n-gpu-layers",
    }  # fmt: skip
    assert not takes_value["--json"] and not takes_value["--force"]


HEADED = {name: command for name, command in every_command() if isinstance(command, HeadedCommand)}


@pytest.mark.parametrize(
    ("name", "word"), [*((name, "--help") for name, _ in every_command()), *((name, "--help-all") for name in HEADED)]
)
def test_a_help_fits_80_columns(run, name, word):
    result = run(*name.split(), word)
    assert result.code == 0 and max(map(len, result.out.splitlines())) <= 80
    assert not re.search(r"\w-\n", result.out), "names are not broken at their hyphens"


@pytest.mark.parametrize("name", HEADED)
def test_a_help_lists_what_most_need_and_another_everything(run, name):
    def listed(word):
        options = run(name, word).out.partition("\nOptions:\n")[2]
        records = re.findall(r"^  (-\S.*?)(?:  .*)?$", options, re.MULTILINE)
        return {option for record in records for option in re.findall(r"--[\w-]+", record)}

    options = [param for param in HEADED[name].params if param.param_type_name == "option" and not param.hidden]
    few, everything = listed("--help"), listed("--help-all")
    n_few = sum(bool(few & {*param.opts}) for param in options)
    assert 6 <= n_few <= 14 and "--help-all" in few
    assert all(few & {*param.opts} for param in options if param.required)
    assert everything == {opt for param in options for opt in (*param.opts, *param.secondary_opts)
                          if opt.startswith("--")} | {"--help"}  # fmt: skip


def test_the_help_of_complete_has_what_one_looks_for_first(run):
    shown, everything = (run("complete", word).out for word in ("--help", "--help-all"))
    assert all(f" {option} " in shown for option in ("--seed", "-t,", "-ngl,", "--stop", "--stats"))
    assert all(
        f" {option} " in everything and f" {option} " not in shown for option in ("--preset PRESET", "--drafter WORD")
    )


def test_a_help_has_the_defaults_of_its_command(run):
    def default_of(option, command):
        text = " ".join(run(command, "--help-all").out.split())
        return re.search(rf"{option} X .*?\[default: ([^];]*)", text)[1]

    for option, in_chat, elsewhere in (("--temp", "0.7", "0.0"), ("--top-p", "0.95", "0.95")):
        assert default_of(option, "chat") == f"the model's own recommendation, or {in_chat}"
        assert default_of(option, "complete") == default_of(option, "serve") == elsewhere


def test_tab_completion_is_as_the_help_tells(run, monkeypatch, tmp_path):
    (script,) = re.findall(r'eval "\$\((\w+)=(bash)_source pyfly-cpp\)"', run("--help").out)
    variable, shell = script
    monkeypatch.setenv(variable, f"{shell}_complete")
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(DRAFT, models / "qwen.gguf")
    for words, expected in (
        ("pyfly-cpp ch", ["plain,chat"]),
        ("pyfly-cpp chat --draft-m", ["plain,--draft-max"]),
        ("pyfly-cpp chat -m ", ["file,"]),
        ("pyfly-cpp chat ./mod", ["file,./mod"]),
        ("pyfly-cpp chat -d qw", ["file,qw", "plain,qwen"]),
        ("pyfly-cpp chat --preset f", ["file,f", "plain,fast"]),
        ("pyfly-cpp chat --gate marg", ["plain,margin"]),
        ("pyfly-cpp chat --drafter loo", ["plain,lookup"]),
        ("pyfly-cpp eval gsm", ["plain,gsm8k"]),
        ("pyfly-cpp models remove qw", ["plain,qwen"]),
        ("pyfly-cpp no-such-command x", [""]),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(f"{words}.".split()) - 1))
        result = run()
        assert (result.out.splitlines(), result.err) == (expected, ""), words


def test_a_shell_completes_files():
    """Wherever a value is one."""
    kinds = {"FILE", "FOLDER", "PATH", "MODEL", "[MODEL]", "TARGET", "[TARGET]", "PRESET"}
    context, seen = click.Context(cli), set()
    for name, command in every_command():
        for param in command.params:
            kind = param.make_metavar(context)
            if kind in kinds and not isinstance(param.type, click.Path):
                seen.add(kind)
                assert "file" in [item.type for item in param.shell_complete(context, "x")], f"{param.name} of {name}"
    assert seen == kinds


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_json(run):
    result = run("doctor", "--json")
    report = json.loads(result.out)
    assert result.code == 0
    assert report["versions"]["pyfly-cpp"] == pyfly_cpp.__version__
    assert report["machine"]["physical_cores"] >= 1
    assert report["machine"]["extra_buffers"]["reason"]
    assert report["devices"][0]["name"]
    assert report["devices"][0]["memory_total"] > 0


def test_doctor_on_rpc_servers(run):
    with fake_rpc_server() as address, socket.create_server(("127.0.0.1", 0)) as listener:
        nowhere = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.close()
        result = run("doctor", "--json", "--rpc", address)
        devices = [device for device in json.loads(result.out)["devices"] if device["backend"] == "RPC"]
        assert result.code == 0
        assert [(d["name"], d["kind"], d["memory_free"], d["memory_total"]) for d in devices] == [
            (f"{address}/{i}", "remote", 3 << 30, 4 << 30) for i in range(2)
        ]
        result = run("doctor", "--rpc", f"{nowhere},{address}")
    assert result.code == 1
    assert f"server {nowhere} the RPC server {nowhere} " in result.out
    assert f"device {address}/1 remote, device of an RPC server, 3.2 GB of 4.3 GB free" in result.out


def test_devices_of_the_commands(run):
    where = ["--devices", "none", "--draft", DRAFT, "--draft-devices", "none"]
    result = run("complete", "--model", TARGET, *where, *ONE_THREAD, "--max-tokens", 5, "Tom has")
    assert result.code == 0
    few = ("--limit", 1, "--max-tokens", 4, "--without-plain", "--details")
    result = run("bench", "--model", TARGET, *where, *ONE_THREAD, *few)
    assert result.code == 0 and result.out.count("┏") > 1 and "draft of a step" in result.out
    assert "layers on the GPU, devices: none, draft_devices: none" in result.out


@pytest.mark.parametrize("is_tried, more", [(True, ()), (False, ("--kernels", "stock"))])
def test_the_first_start_tells_that_it_tries_the_kernels(run, monkeypatch, is_tried, more):
    monkeypatch.setattr(kernels, "is_untried", lambda: True)
    result = run("complete", "-m", TARGET, *ONE_THREAD, "-n", 1, *more, "Tom has")
    assert result.code == 0
    assert result.err.count("Trying the kernels on this machine, once (") == is_tried
    monkeypatch.setattr(kernels, "is_untried", lambda: is_tried)
    assert run("doctor", "--json").err.count("Trying the kernels") == is_tried


@pytest.fixture
def broken_amx(monkeypatch):
    """A machine with AMX that cannot be left out; see tests/test_extra_buffers.py."""

    def refuse(_):
        raise NativeError("the kernels are not installed")

    def forget():
        extra_buffers.usable.cache_clear()
        extra_buffers.verdict.cache_clear()

    monkeypatch.delenv(extra_buffers.VARIABLE, raising=False)
    monkeypatch.setattr(extra_buffers, "_library_has_amx", lambda: True)
    monkeypatch.setattr(extra_buffers, "cpu_fields", lambda: {"model name": "Xeon", "flags": "amx_int8"})
    monkeypatch.setattr(_native, "leave_out", refuse)
    forget()
    yield
    forget()


def test_doctor_on_broken_amx(run, broken_amx):
    result = run("doctor", "--json")
    report = json.loads(result.out)["machine"]["extra_buffers"]
    assert (result.code, result.err) == (0, "")
    assert report["usable"] is False
    assert "AMX" in report["reason"]
    assert "PYFLY_EXTRA_BUFFERS=1" in report["remedy"]
    line = next(line for line in run("doctor").out.splitlines() if line.startswith("extra buffers"))
    assert line.split(maxsplit=2)[2] == f"not used: {report['reason']}; {report['remedy']}"


def test_a_command_on_broken_amx_warns_in_one_line(run, broken_amx):
    result = run("complete", "-m", TARGET, "-d", DRAFT, "-n", 4, *ONE_THREAD, "Natalia sold")
    assert result.code == 0
    assert result.out.strip()
    assert [line[:8] for line in result.err.splitlines()] == ["Warning:"]
    assert "PYFLY_EXTRA_BUFFERS=1" in result.err


def test_doctor_model_and_draft(run):
    report = json.loads(run("doctor", "--json", "-m", TARGET, "-d", DRAFT).out)
    model = report["model"]
    assert report["draft_fits"] is True
    assert (model["architecture"], model["quantisation"], model["n_layer"]) == ("llama", "F16", 6)
    assert (model["n_ctx_train"], model["n_vocab"], model["n_protected"]) == (2048, 1536, 3)
    assert model["chat_template"] and not model["is_recurrent"]
    llm = pyfly_cpp.FlyLlama(TARGET, n_ctx=64, n_threads=1, verbose=False)
    assert model["n_protected"] == len(llm.protected)
    llm.close()


def test_doctor_on_a_hybrid_with_a_head(run):
    report = json.loads(run("doctor", "--json", "-m", HYBRID).out)
    assert report["model"]["n_layer_mtp"] == 1
    assert report["model"]["is_recurrent"]
    shown = run("doctor", "-m", HYBRID).out
    assert "recurrent state is rolled back" in shown and "with an MTP head" in shown


def test_doctor_leaves_out_what_is_as_usual(run):
    shown = run("doctor", "-m", TARGET).out
    assert "llama, 6 layers\n" in shown
    assert not re.search("MTP|protected|vector code", shown)
    assert ("extra buffers" in shown) == (not extra_buffers.verdict().usable)


def test_doctor_names_the_difference(run, tmp_path):
    other = tmp_path / "other.gguf"
    data = DRAFT.read_bytes()
    at = data.index(b"<|im_start|>")
    other.write_bytes(data[:at] + b"<|in_start|>" + data[at + 12 :])
    result = run("doctor", "-m", TARGET, "-d", other)
    assert result.code == 1
    assert "draft fits" in result.out and "or --drafter cross" in result.out
    assert run("complete", "-m", TARGET, "-d", other, "--drafter", "cross", "-n", 4, "x").code == 0
    # The same words as when the draft is loaded.
    loaded = run("complete", "-m", TARGET, "-d", other, "x")
    problem = json.loads(run("doctor", "--json", "-m", TARGET, "-d", other).out)["draft_problem"]
    assert problem in loaded.err


# ---- Drafters --------------------------------------------------------------------------------------------------------


def test_lookup_texts_and_memory(run, tmp_path):
    text, memory = tmp_path / "text.md", tmp_path / "answers.bin"
    text.write_text("Natalia sold clips to 48 of her friends in April.\n" * 20)
    options = ("--drafter", "lookup", "--min-ngram-size", 2, "--no-adaptive", "--json")

    def drafted(*more):
        return json.loads(complete(run, *options, *more, "Natalia sold clips to").out)["stats"]["drafted"]

    alone = drafted()
    assert drafted("--lookup-texts", text) > alone
    assert drafted("--lookup-memory", memory) == alone
    assert drafted("--lookup-memory", memory) > alone
    memory.write_bytes(memory.read_bytes()[:-4])
    for more, named in (("--lookup-memory", memory), str(memory)), (("--lookup-texts", "missing"), "missing"):
        broken = run("complete", "-m", TARGET, *options, *more, "x")
        assert broken.code == 1 and named in broken.err and len(broken.err.splitlines()) == 1
    unused = run("complete", "-m", TARGET, "--drafter", "none", "--lookup-texts", text, "x")
    assert unused.code == 2 and "--lookup-texts" in unused.err


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 100000\n"


def test_a_broken_neighbour_is_not_spoken_of(run, tmp_path):
    """A pointer of Git LFS, and half a model, beside the model that is loaded."""
    (tmp_path / "pointer.gguf").write_text(POINTER)
    (tmp_path / "half.gguf").write_bytes(DRAFT.read_bytes()[:100_000])
    target = tmp_path / "target.gguf"
    target.write_bytes(TARGET.read_bytes())
    python = (
        "import sys; from pyfly_cpp import FlyLlama; FlyLlama(sys.argv[1], drafter='auto', verbose=False, n_ctx=64)"
    )
    for command in (["-m", "pyfly_cpp", "complete", "-n", "2", "Tom", "-m"], ["-c", python]):
        done = subprocess.run([sys.executable, *command, str(target)], capture_output=True, text=True, check=True)
        assert done.stderr == ""
    target.write_bytes(TARGET.read_bytes()[:-100_000])
    result = run("complete", "-m", target, "-t", 1, "-n", 2, "Tom")
    assert result.code == 1 and "pointer" not in result.err and "half" not in result.err
    assert "target.gguf" in result.err and "truncated" in result.err


@pytest.mark.parametrize("option", ["-m", "-d"])
def test_files_that_are_no_models_have_reasons(run, tmp_path, option):
    pointer, half = tmp_path / "pointer.gguf", tmp_path / "half.gguf"
    pointer.write_text(POINTER)
    half.write_bytes(DRAFT.read_bytes()[:-100_000])
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(DRAFT.read_bytes()[:1000])
    unknown = edit_gguf(DRAFT, tmp_path / "unknown.gguf", {"general.architecture": "zzama"})
    target = ("-m", TARGET) if option == "-d" else ()
    for file, reason in (
        (pointer, "git lfs pull"),
        (half, "truncated; download it again."),
        (damaged, "llama.cpp reports: .*; download or convert it again."),
        (unknown, "'zzama'; install a newer release"),
    ):
        result = run("complete", *target, option, file, "-t", 1, "-n", 2, "Tom")
        assert result.code == 1 and re.search(reason, result.err) and file.name in result.err


def test_gpu_layers_without_a_gpu_are_told(run):
    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this build has a GPU")
    assert "CPU" in run("complete", "-m", TARGET, "-t", 1, "-n", 2, "--n-gpu-layers", 20, "Tom").err


def test_doctor_does_not_take_used_memory_for_free(run):
    cpus = [one for one in json.loads(run("doctor", "--json").out)["devices"] if one["kind"] == "CPU"]
    assert all(0 < one["memory_free"] < one["memory_total"] for one in cpus)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_an_answer_that_cannot_be_written():
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "pyfly_cpp", "complete", "-m", TARGET, "-n", "2", "A"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("Error: ")
