"""Models on other machines: names of devices, servers that cannot be used, and (marker `rpc`) real rpc-servers.

    PYFLY_RPC_SERVER=/path/to/ggml-rpc-server pytest -m rpc tests/end_to_end/test_rpc.py

needs a llama-cpp-python that was built with CMAKE_ARGS=-DGGML_RPC=on, and rpc-server of the same sources (docs/rpc.md).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import llama_cpp
import pytest
from fake_rpc import fake_rpc_server
from teacher_forcing import teacher_forcing_gap

from pyfly_cpp import DraftModel, FlyBatch, FlyLlama
from pyfly_cpp.decoding import Decoding
from pyfly_cpp.decoding.presets import Preset, load_preset, save_preset
from pyfly_cpp.engine.costs import setup_of
from pyfly_cpp.errors import RpcError
from pyfly_cpp.machine.placement import Placement
from pyfly_cpp.machine.releases import RPC_PROTOCOLS
from pyfly_cpp.machine.rpc import devices_of, split_address

OPTIONS = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
TOLERANCE = 1e-3


def text(llm, **arguments):
    return llm.create_completion(PROMPT, **{"max_tokens": 60, "temperature": 0, **arguments})["choices"][0]["text"]


def nowhere():
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


# ---- Names -----------------------------------------------------------------------------------------------------------


def test_addresses():
    assert split_address("192.168.0.7:50052") == ("192.168.0.7", 50052)
    assert split_address("box.local:1") == ("box.local", 1)


@pytest.mark.parametrize(
    "address",
    ["", "box", "box:", ":1", "box:0", "box:65536", "box:1x", "box:-1", "::1", "::1:50052", "[::1]:1",
     "a b:1", "a/b:1", "box:²", "box:" + "9" * 5000, "http://box:1", "a\n:1", "box:1/0"],
)  # fmt: skip
def test_what_is_no_address_is_refused(tiny_target, address):
    with pytest.raises(ValueError, match="an RPC server is written HOST:PORT, such as"):
        FlyLlama(tiny_target, rpc_servers=[address], **OPTIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rpc_servers": "box:1"}, "rpc_servers must be a list of texts, not 'box:1'."),
        ({"rpc_servers": [1]}, "rpc_servers must be a list of texts"),
        ({"rpc_servers": ["box:1", "box:1"]}, "rpc_servers names 'box:1' twice; leave one out."),
        ({"devices": "CUDA0"}, "devices must be a list of texts, not 'CUDA0'."),
        ({"devices": ["Cuda77"]}, "there is no device 'Cuda77'; this machine has"),
        ({"devices": ["CPU"]}, "there is no device 'CPU'"),
        ({"devices": ["x", "x"]}, "devices names 'x' twice"),
        ({"devices": [], "tensor_split": [1]}, "tensor_split has 1 shares for 0 devices; give one for each."),
        ({"tensor_split": [1, -1]}, r"tensor_split must hold shares >= 0, such as \[3, 1\], not \[1, -1\]."),
        ({"tensor_split": [float("nan")]}, "tensor_split must hold shares >= 0"),
        ({"tensor_split": ["x"]}, "tensor_split must be a list of numbers, one for each device, not"),
        ({"tensor_split": 1}, "tensor_split must be a list of numbers"),
    ],
)
def test_arguments_that_mean_nothing(tiny_target, arguments, message):
    for load in (FlyLlama, FlyBatch):
        with pytest.raises(ValueError, match=message):
            load(tiny_target, **arguments, **OPTIONS)


def test_a_draft_has_devices_of_its_own(tiny_target, tiny_draft, tmp_path):
    with pytest.raises(ValueError, match="devices must be a list of texts"):
        DraftModel(tiny_draft, devices="CUDA0")
    drafter = DraftModel(tiny_draft, devices=["box:1"])
    assert drafter.devices == ("box:1",)
    save_preset(Preset(Decoding(drafter=drafter)), tmp_path / "preset.json")
    assert load_preset(tmp_path / "preset.json").decoding.drafter == drafter
    with pytest.raises(ValueError, match="there is no device 'Cuda77'"):
        FlyLlama(tiny_target, drafter=DraftModel(tiny_draft, devices=["Cuda77"]), **OPTIONS)


def test_no_devices_are_the_cpu(tiny_target, tiny_draft):
    llm = FlyLlama(tiny_target, **OPTIONS)
    expected = text(llm)
    llm.close()
    llm = FlyLlama(tiny_target, devices=[], drafter=DraftModel(tiny_draft, devices=[]), **OPTIONS)
    assert text(llm) == expected
    again = pickle.loads(pickle.dumps(llm))
    assert text(again) == expected
    assert again._placement.addresses == []
    again.close()
    llm.close()


def test_costs_hang_on_the_devices(tiny_target, tiny_draft):
    llm = FlyLlama(tiny_target, **OPTIONS)
    assert Placement().describe() == []
    assert Placement(devices=[]).describe() != []
    setups = [
        setup_of(tiny_target, [(DraftModel(tiny_draft, devices=names), 4)], llm.model_params, llm.context_params)
        for names in (None, [], ["box:1"])
    ]
    assert setups[0] != setups[1] != setups[2]
    llm.close()


# ---- Servers that cannot be used, with any build of llama.cpp --------------------------------------------------------


@pytest.mark.skipif(llama_cpp.llama_supports_rpc(), reason="this llama-cpp-python has RPC")
def test_a_build_without_rpc_says_so(tiny_target, tiny_draft):
    message = 'was built without RPC; to use box:1 build it with CMAKE_ARGS="-DGGML_RPC=on"'
    with pytest.raises(ValueError, match=message):
        FlyLlama(tiny_target, rpc_servers=["box:1"], **OPTIONS)
    with pytest.raises(ValueError, match=message):
        FlyBatch(tiny_target, 2, devices=["box:1/0"], **OPTIONS)
    llm = FlyLlama(tiny_target, **OPTIONS)
    with pytest.raises(ValueError, match=message):
        llm.drafter = DraftModel(tiny_draft, devices=["box:1"])
    assert llm.drafter is None
    assert text(llm)
    llm.close()


def test_the_version_of_the_protocol_is_that_of_this_release():
    header = Path(llama_cpp.__file__).parents[1] / "include" / "ggml-rpc.h"
    if not header.exists():
        pytest.skip("llama-cpp-python was installed without its headers")
    numbers = dict(re.findall(r"define RPC_PROTO_(MAJOR|MINOR)_VERSION +(\d+)", header.read_text()))
    assert (int(numbers["MAJOR"]), int(numbers["MINOR"])) == RPC_PROTOCOLS[llama_cpp.__version__]


def test_the_devices_of_a_server():
    with fake_rpc_server() as address:
        for _ in range(2):
            found = devices_of(address)
            assert [device.name for device in found] == [f"{address}/0", f"{address}/1"]
            assert {(device.memory_free, device.memory_total, device.address) for device in found} == {
                (3 << 30, 4 << 30, 0)
            }


def test_servers_that_cannot_be_used(monkeypatch):
    def why(address):
        with pytest.raises(RpcError) as failure:
            devices_of(address)
        assert address in str(failure.value)
        return str(failure.value)

    assert "start rpc-server" in why(nowhere()) and "start rpc-server" in why("no-such-host.invalid:1")
    with fake_rpc_server(version=(6, 1, 2)) as address:
        assert "version 6.1.2" in why(address)
    with fake_rpc_server(n_devices=0) as address:
        assert "does not answer like an rpc-server" in why(address)
    monkeypatch.setattr("pyfly_cpp.machine.rpc._SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as busy:  # takes nobody
        assert "one program at a time" in why(f"127.0.0.1:{busy.getsockname()[1]}")


# ---- Real servers ----------------------------------------------------------------------------------------------------

rpc = pytest.mark.rpc


class Server:
    """An rpc-server on this machine."""

    def __init__(self, program):
        self._program = program
        self.address = nowhere()
        self.start()

    def start(self):
        port = self.address.rpartition(":")[2]
        self._process = subprocess.Popen(
            [self._program, "-p", port, "-t", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(200):
            with contextlib.suppress(RpcError):
                devices_of(self.address)
                return
            time.sleep(0.05)
        raise AssertionError(f"{self._program} does not serve {self.address}")

    def kill(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def program():
    if not llama_cpp.llama_supports_rpc() or not os.environ.get("PYFLY_RPC_SERVER"):
        pytest.skip("needs a llama-cpp-python with RPC, and PYFLY_RPC_SERVER, the path of its rpc-server")
    return os.environ["PYFLY_RPC_SERVER"]


@pytest.fixture(scope="module")
def servers(program):
    """Two of them that nobody kills."""
    both = [Server(program), Server(program)]
    yield [server.address for server in both]
    for server in both:
        server.kill()


@pytest.fixture
def mortal(program):
    """One that may be killed."""
    server = Server(program)
    yield server
    server.kill()


def check_split(path, servers, n, tolerance, drafter=None):
    llm = FlyLlama(path, rpc_servers=servers, tensor_split=[1, 1], drafter=drafter, adaptive=False, **OPTIONS)
    tokens = llm.tokenize(PROMPT.encode())
    n_prompt = len(tokens)
    stream = llm.generate(tokens, temp=0.0)
    tokens += [next(stream) for _ in range(n)]
    stream.close()
    stats = llm.stats
    llm.close()
    assert teacher_forcing_gap(path, tokens, n_prompt).max() <= tolerance
    return stats


@rpc
def test_a_model_on_two_servers(servers, tiny_target, tiny_draft):
    check_split(tiny_target, servers, 150, TOLERANCE)
    here = check_split(tiny_target, servers, 150, TOLERANCE, DraftModel(tiny_draft, draft_max=4))
    there = check_split(tiny_target, servers, 150, TOLERANCE, DraftModel(tiny_draft, draft_max=4, devices=servers[1:]))
    assert here.matched == there.matched > 20


@rpc
def test_all_parts_are_where_they_were_put(servers, tiny_target, tiny_draft):
    expected = text(FlyLlama(tiny_target, **OPTIONS))
    for arguments in (
        {"rpc_servers": servers},
        {"devices": servers[:1]},
        {"devices": [f"{servers[1]}/0"], "drafter": DraftModel(tiny_draft, devices=servers[:1])},
        {"rpc_servers": servers, "devices": servers[1:], "flash_attn": True},
        {"rpc_servers": servers, "n_gpu_layers": 1},
        {"drafter": DraftModel(tiny_draft, devices=servers)},
    ):
        llm = FlyLlama(tiny_target, **arguments, **OPTIONS)
        assert text(llm) == expected
        again = pickle.loads(pickle.dumps(llm))
        assert text(again) == expected
        again.close()
        llm.close()
    with pytest.raises(ValueError, match=f"there is no device '{servers[0]}/1'; that server's are {servers[0]}."):
        FlyLlama(tiny_target, devices=[f"{servers[0]}/1"], **OPTIONS)
    with pytest.raises(ValueError, match="RPC servers take whole layers; leave out split_mode"):
        FlyLlama(tiny_target, rpc_servers=servers, split_mode=llama_cpp.LLAMA_SPLIT_MODE_TENSOR, **OPTIONS)
    with pytest.raises(ValueError, match="tensor_split has 1 shares for 2 devices"):
        FlyLlama(tiny_target, rpc_servers=servers, tensor_split=[1], **OPTIONS)


@rpc
def test_heads_are_where_the_target_is(servers, tiny_target, tiny_qwen35):
    from heads import EAGLE3

    from pyfly_cpp import MTP, Eagle3

    for path, drafter in ((tiny_qwen35, MTP(draft_max=1)), (tiny_target, Eagle3(EAGLE3, draft_max=3))):
        expected = text(FlyLlama(path, **OPTIONS))
        llm = FlyLlama(path, rpc_servers=servers, tensor_split=[1, 1], drafter=drafter, **OPTIONS)
        assert text(llm) == expected
        assert llm.stats.matched > 0
        llm.close()


@rpc
def test_many_texts_on_two_servers(servers, tiny_target, tiny_draft):
    llm = FlyLlama(tiny_target, **OPTIONS)
    expected = text(llm)
    llm.close()
    with FlyBatch(tiny_target, 3, rpc_servers=servers, drafter=DraftModel(tiny_draft), **OPTIONS) as batch:
        answers = batch.complete([PROMPT] * 5, max_tokens=60, temperature=0)
    assert [answer["choices"][0]["text"] for answer in answers] == [expected] * 5


@rpc
def test_a_saved_state_comes_from_the_servers(servers, tiny_target):
    llm = FlyLlama(tiny_target, rpc_servers=servers, **OPTIONS)
    tokens = llm.tokenize(PROMPT.encode())
    llm.eval(tokens)
    state = llm.save_state()
    expected = text(llm)
    llm.load_state(state)
    assert text(llm) == expected
    llm.close()


@rpc
def test_models_of_one_program_share_a_server_and_others_wait(servers, tiny_target):
    one = FlyLlama(tiny_target, rpc_servers=servers, **OPTIONS)
    two = FlyLlama(tiny_target, rpc_servers=servers[:1], **OPTIONS)
    assert text(two) == text(one)
    with pytest.raises(RpcError, match="one program at a time"):
        devices_of(servers[0])
    two.close()
    one.close()
    assert devices_of(servers[0])


@rpc
def test_a_server_that_is_started_again(mortal, tiny_target):
    arguments = {**OPTIONS, "rpc_servers": [mortal.address]}
    llm = FlyLlama(tiny_target, **arguments)
    expected = text(llm)
    llm.close()
    mortal.kill()
    with pytest.raises(RpcError, match=mortal.address):
        FlyLlama(tiny_target, **arguments)
    mortal.start()
    llm = FlyLlama(tiny_target, **arguments)
    assert text(llm) == expected
    llm.close()


@rpc
def test_a_lost_server_ends_the_process(mortal, tiny_target):
    """As it does in llama.cpp, whose client aborts in a thread of its own."""
    code = textwrap.dedent(
        """
        import sys
        from pyfly_cpp import FlyLlama
        llm = FlyLlama(sys.argv[1], rpc_servers=sys.argv[2:], n_ctx=512, n_threads=1, verbose=False)
        for chunk in llm.create_completion("a", max_tokens=400, stream=True):
            print("x", flush=True)
        """
    )
    command = [sys.executable, "-c", code, tiny_target, mortal.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        program.stdout.read(10)
        mortal.kill()
        assert b"Remote RPC server crashed" in program.stderr.read()
    assert program.returncode == -signal.SIGABRT
