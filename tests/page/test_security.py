"""Who may do what."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from replicast.errors import ServeRefused
from replicast.page import security
from replicast.page.app import ROWS
from replicast.page.web_server import PageSettings, read_token
from tests.page.conftest import BEARER, TOKEN, Client, Serve
from tests.page.prompt_run import PromptRun

FIRST = "/api/runs/first"
_PARTS = {"which": "x", "update_id": "x", "worker": 0, "name": "dense/bias"}
ACTIONS = [FIRST + one.target(_PARTS) for one in ROWS if one.method == "POST"]
READS = ["/api/runs", *(FIRST + one.target(_PARTS) for one in ROWS if one.method == "GET")]


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit recovers, however long the test takes."""
    monkeypatch.setattr(security.time, "monotonic", lambda: 1.0)


async def pieces() -> AsyncIterator[bytes]:
    """A body without a length."""
    for _ in range(20):
        yield b"x" * 100


@pytest.mark.parametrize("path", ACTIONS)
def test_no_action_without_the_token_and_none_on_a_server_without_one(
    serve: Serve, run: PromptRun, path: str
) -> None:
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        answer = serve().post(path, headers=given)
        assert (answer.status_code, "Bearer" in answer.headers["www-authenticate"]) == (401, True)
    answer = serve(token=None).post(path)
    assert (answer.status_code, "--token-file" in answer.json()["error"]["remedy"]) == (403, True)
    assert run.done == []


@pytest.mark.parametrize("path", [*READS, f"{FIRST}/events", "/metrics"])
def test_reading_from_elsewhere_or_from_a_private_server_needs_the_token(serve: Serve, path: str) -> None:
    for client in (serve(host="10.1.2.3:8080", peer="10.9.9.9"), serve(private=True)):
        assert client.get(path).status_code == 401
        assert client.get("/api/runs", headers=BEARER).status_code == 200


@pytest.mark.parametrize("path", ["/", "/first", "/healthz", "/openapi.json", "/static/main.js"])
def test_the_page_itself_holds_no_data_and_is_free(serve: Serve, path: str) -> None:
    answer = serve(host="10.1.2.3:8080", peer="10.9.9.9").get(path)
    assert answer.status_code == 200
    assert "training" not in answer.text.partition("<body>")[2]


@pytest.mark.parametrize("header", ["Forwarded", "Via", "X-Forwarded-For", "X-Real-IP"])
def test_a_proxy_on_this_machine_speaks_for_others(client: Client, header: str) -> None:
    assert client.get("/api/runs", headers={header: "for=10.9.9.9"}).status_code == 401
    assert client.get("/api/runs", headers={header: "for=10.9.9.9", **BEARER}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "a b"])
def test_a_browser_that_was_lured_here_under_another_name_is_refused(client: Client, host: str) -> None:
    assert client.get("/api/runs", headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1", "[::1]:8080", "10.0.0.7:80", "jobs.example"])
def test_its_own_names_and_addresses_are_known(serve: Serve, host: str) -> None:
    client = serve(allowed_hosts=("jobs.example",))
    assert client.get("/api/runs", headers={"Host": host, **BEARER}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["evil.example", "127.0.0.1:9999", "127.0.0.1", "[", "null", "127.0.0.1:8080"]
)
def test_a_page_of_another_site_cannot_act_even_with_the_token(
    client: Client, run: PromptRun, origin: str
) -> None:
    is_address = origin not in ("null", "127.0.0.1:8080")
    given = {"Origin": f"http://{origin}" if is_address else origin, **BEARER}
    assert (client.post(f"{FIRST}/audit", headers=given).status_code, run.done) == (403, [])
    own = {"Origin": "http://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin", **BEARER}
    assert client.post(f"{FIRST}/audit", headers=own).status_code == 200
    assert client.post(f"{FIRST}/audit", headers={**own, "Sec-Fetch-Site": "cross-site"}).status_code == 403


def test_values_of_a_running_job_need_the_token_since_all_workers_stop_for_them(
    client: Client, run: PromptRun
) -> None:
    assert (client.get(f"{FIRST}/variables/dense/bias").status_code, run.done) == (401, [])
    assert client.get(f"{FIRST}/variables/dense/bias", headers=BEARER).status_code == 200


def test_another_site_gets_no_answer_that_it_could_read(client: Client) -> None:
    answer = client.request("OPTIONS", f"{FIRST}/audit", headers={"Origin": "http://evil.example"})
    assert answer.status_code == 403
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.usefixtures("stopped_clock")
def test_wrong_tokens_are_slowed_down_and_the_right_one_passes_from_the_same_address(client: Client) -> None:
    wrong = {"Authorization": "Bearer wrong-wrong-wrong-wrong"}
    answers = [client.get("/api/runs", headers=wrong) for _ in range(12)]
    assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 2
    assert int(answers[-1].headers["retry-after"]) > 0
    for headers in ({}, BEARER):
        assert client.get("/api/runs", headers=headers).status_code == 200
    assert client.post(f"{FIRST}/audit", headers=BEARER).status_code == 200


@pytest.mark.parametrize(
    ("named", "separately"), [(("127.0.0.1",), True), (("127.0.0.0/8", "10.1.0.0/16"), True), ((), False)]
)
@pytest.mark.usefixtures("stopped_clock")
def test_wrong_tokens_are_counted_per_caller_only_behind_a_proxy_that_was_named(
    serve: Serve, named: tuple[str, ...], separately: bool
) -> None:
    client = serve(trusted_proxies=named)

    def tried(forwarded: str) -> int:
        headers = {"Authorization": "Bearer wrong", "X-Forwarded-For": forwarded}
        return client.get("/api/runs", headers=headers).status_code

    # What the caller itself claims stands first, and counts for nothing.
    assert [tried("10.7.7.7, 10.9.9.9") for _ in range(12)][-1] == 429
    assert tried("10.6.6.6, 10.9.9.9") == 429
    assert tried("10.8.8.8") == (401 if separately else 429)


def test_a_named_proxy_never_counts_as_this_machine_and_its_callers_are_recorded(
    serve: Serve, run: PromptRun
) -> None:
    client = serve(trusted_proxies=("127.0.0.1",))
    assert client.get("/api/runs").status_code == 401
    for forwarded in ("10.9.9.9", "10.6.6.6, 10.9.9.9", "127.0.0.1", "what"):
        headers = {"X-Forwarded-For": forwarded}
        assert client.get("/api/runs", headers=headers).status_code == 401
        client.post(f"{FIRST}/audit", headers={**headers, **BEARER})
    assert run.authors == ["page@10.9.9.9"] * 2 + ["page@127.0.0.1"] * 2


@pytest.mark.usefixtures("stopped_clock")
def test_actions_are_limited(client: Client, run: PromptRun) -> None:
    answers = [client.post(f"{FIRST}/audit", headers=BEARER).status_code for _ in range(62)]
    assert answers[-1] == 429
    assert len(run.done) <= security.ACTIONS_PER_MINUTE


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/main.js", "/nothing/here", f"{FIRST}/updates/x"])
def test_every_answer_has_the_security_headers(client: Client, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "set-cookie" not in headers
    assert "server" not in headers


def test_a_body_that_is_too_large_is_refused_before_it_is_read(serve: Serve, run: PromptRun) -> None:
    client = serve(max_upload_bytes=1000)
    answer = client.post(f"{FIRST}/updates?operation=add", content=b"x" * 1001, headers=BEARER)
    assert answer.status_code == 413
    answer = client.post(f"{FIRST}/updates?operation=add", content=pieces(), headers=BEARER)
    assert answer.status_code == 413
    assert list((run.path / "inbox").glob("*upload*")) == []
    answer = client.post(f"{FIRST}/learning-rate", content=b" " * 70_000, headers=BEARER)
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"host": "0.0.0.0"}, "can be reached from other machines"),
        ({"token": "short"}, "has 5 characters"),
        ({"token": "ünd so weiter und so fort"}, "a header cannot carry"),
        ({"private": True}, "--private needs a token"),
        ({"trusted_proxies": ("*",)}, "--trusted-proxy expects an address"),
        ({"trusted_proxies": ("10.0.0.1/8",)}, "--trusted-proxy expects an address"),
        ({"certfile": Path("cert.pem")}, "a certificate and its key"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ServeRefused, match=problem):
        PageSettings(**settings)
    assert PageSettings(host="0.0.0.0", token=TOKEN).host == "0.0.0.0"
    assert PageSettings(host="::1").token is None


def test_a_token_comes_from_the_environment_or_a_file_that_is_made_for_its_owner_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "token"
    made = read_token(path, {})
    assert made is not None
    assert (len(made) >= 32, path.stat().st_mode & 0o777) == (True, 0o600)
    assert read_token(path, {"REPLICAST_TOKEN": "another"}) == made
    path.chmod(0o644)
    with pytest.raises(ServeRefused, match="Other users may read"):
        read_token(path, {})
    assert read_token(None, {"REPLICAST_TOKEN": f" {TOKEN}\n"}) == TOKEN
    assert read_token(None, os.environ) is None
