"""Who may come in."""

from __future__ import annotations

import pytest
from serving import EXACT, running

from pyfly_cpp import FlyBatch, PromptLookup

BODY = {"prompt": "Hi", "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded(batch):
    with running(
        batch, keys=("first key", "sécond"), origins=("https://page.example",), hosts=("Known.example",)
    ) as one:
        yield one


def headers(key):
    return {"Authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize("key", ["first key", "sécond"])
def test_a_key(guarded, key):
    assert guarded.http.post("/v1/completions", json=BODY, headers=headers(key)).status_code == 200
    assert guarded.http.get("/v1/models", headers={"X-Api-Key": key.encode()}).status_code == 200


@pytest.mark.parametrize("key", ["", "first", "first key2", "FIRST KEY", "\xff"])
def test_no_key(guarded, key):
    for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing", "/tokenizer_info"):
        response = guarded.http.get(path, headers=headers(key) if key else {})
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer", path
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_what_needs_no_key(guarded):
    for path in ("/health", "/v1/health"):
        assert guarded.http.get(path).json()["status"] == "ok"
    assert guarded.http.get("/").status_code == 200


@pytest.mark.parametrize(
    "host, status",
    [("localhost", 200), ("LOCALHOST:80", 200), ("127.0.0.1:9", 200), ("[::1]:80", 200), ("192.168.1.7", 200),
     ("known.example", 200), ("attacker.example", 403), ("attacker.example:8080", 403), ("", 403),
     ("localhost.attacker.example", 403), ("127.0.0.1.attacker.example", 403), ("[attacker.example]", 403),
     ("[::1", 403), ("[::1]attacker.example", 403), ("127.0.0.1:80:80", 403), ("127.0.0.1:attacker.example", 403),
     ("127.0.0.1]", 403), ("[::1]:", 200)],
)  # fmt: skip
def test_names(guarded, host, status):
    assert guarded.http.get("/health", headers={"Host": host}).status_code == status
    assert guarded.http.get("/nothing", headers={"Host": host}).status_code == (403 if status == 403 else 401)


def test_web_pages_elsewhere(server, guarded):
    def ask(one, origin, **options):
        return one.http.get("/health", headers={"Origin": origin}, **options)

    for origin in ("https://page.example", "null", "http://localhost:1", "http://attacker.example"):
        assert ask(server, origin).status_code == 403
    assert ask(server, server.url).status_code == 200
    assert "access-control-allow-origin" not in ask(server, server.url).headers
    answer = ask(guarded, "https://page.example")
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://page.example"
    assert ask(guarded, "https://other.example").status_code == 403
    before = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST",
              "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    assert guarded.http.options("/v1/completions", headers=before).status_code == 200


def test_each_key_has_a_lookup_memory(tiny_target_f32):
    def ask(key):
        body = {"prompt": "Natalia sold clips to", "max_tokens": 40, "temperature": 0}
        one.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).raise_for_status()
        text = one.http.get("/metrics", headers={"Authorization": f"Bearer {key}"}).text
        return float(text.split("\npyfly_accepted_from_answers_total ")[1].split()[0])

    batch = FlyBatch(tiny_target_f32, 2, drafter=PromptLookup(), adaptive=False, **EXACT)
    with batch, running(batch, keys=("one", "other")) as one:
        assert ask("one") == ask("other") == 0  # the other's answer is not found
        assert ask("one") > 20


def test_keys_share_no_prompt(batch):
    def n_cached(key):
        body = {"prompt": "Natalia sold clips to 48 of her friends in April. " * 4, "max_tokens": 2}
        answer = one.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with running(batch, keys=("none", "one", "other")) as one:
        assert max(n_cached("one"), n_cached("other")) < 5  # more would tell that somebody has sent the same
        assert n_cached("one") > 40 and n_cached("other") > 40


def test_the_page(server, guarded):
    answer = server.http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "nosniff" in server.http.get("/page/main.js").headers["x-content-type-options"]
    assert "javascript" in guarded.http.get("/page/kept/marked.js").headers["content-type"]  # needs no key
    for outside in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page/none.js"):
        assert server.http.get(outside).status_code == 404
