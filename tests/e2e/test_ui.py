"""The web console in headless Chromium, against a gateway that listens."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from specgate.config import AuthConfig, Config, KeyConfig
from tests.specgate.gateway import Running, make_config, running

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
PAGES = ("overview", "decisions", "guards", "model", "rollouts", "costs", "explain", "chat")


@dataclass
class Console:
    """A page of the console, and what went wrong in it."""

    page: Any
    server: Running
    faults: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    async def go(self, name: str) -> None:
        """To one of its pages, which is drawn once its link is the current one."""
        await self.page.goto(f"{self.server.url}/ui#/{name}")
        await self.page.wait_for_selector(f'nav a[href="#/{name}"][aria-current="page"]')
        await self.page.wait_for_selector("main .grid")

    async def text(self, selector: str = "main") -> str:
        return str(await self.page.inner_text(selector))


@asynccontextmanager
async def console(config: Config | None = None, **options: Any) -> AsyncIterator[Console]:
    """A server, a browser and the console in it. At the end nothing may have gone wrong."""
    async with running(config, step_s=0.003) as server, playwright.async_playwright() as tool:
        browser = await tool.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = await browser.new_context(**{"locale": "en-US"} | options)
        context.set_default_timeout(60_000)
        page = await context.new_page()
        shown = Console(page, server)
        page.on("pageerror", lambda error: shown.faults.append(str(error)))
        page.on("console", lambda said: shown.faults.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: shown.hosts.add(request.url.split("/")[2]))
        try:
            yield shown
            assert shown.faults == []
            assert shown.hosts <= {server.url.removeprefix("http://")}
        finally:
            await browser.close()


async def test_every_page_is_drawn_and_shows_what_was_served() -> None:
    async with console() as shown:
        answer = await shown.server.chat(max_tokens=9, specgate={"policy": "ngram"})
        request_id = answer.headers["X-Request-Id"]
        for name in PAGES:
            await shown.go(name)
        await shown.go("decisions")
        row = shown.page.locator("tr.decision").first
        assert "ngram" in await row.inner_text()
        await row.click()
        detail = await shown.text("tr.detail")
        assert request_id in detail
        assert "Why not" in detail
        assert "override" in await row.inner_text()
        await row.click()
        assert await shown.page.locator("tr.detail").count() == 0
        await shown.go("costs")
        assert "ngram" in await shown.text()
        await shown.go("overview")
        await shown.page.wait_for_selector(".events >> text=the server started")


async def test_a_pasted_request_is_explained_and_a_wrong_one_refused() -> None:
    async with console() as shown:
        await shown.go("explain")
        await shown.page.click("#explain-run")
        await shown.page.wait_for_selector("#explain-result table")
        told = await shown.text("#explain-result")
        assert "would be chosen" in told
        assert {"baseline", "ngram", "draft"} <= set(told.split())
        await shown.page.fill("#explain-body", "{")
        await shown.page.press("#explain-body", "Control+Enter")
        await shown.page.wait_for_selector("text=This is not JSON")
        assert (await shown.server.metric("specgate_output_tokens_total")) == 0  # nothing ran


async def test_the_chat_streams_and_colours_accepted_tokens() -> None:
    async with console() as shown:
        await shown.go("chat")
        await shown.page.select_option("#chat-policy", "ngram")
        await shown.page.fill("#chat-box", "hello")
        await shown.page.press("#chat-box", "Enter")
        await shown.page.wait_for_selector(".chat .facts")
        assert await shown.text("[data-answer]") == "Hello there, 世界! Bye."
        accepted = await shown.page.locator("[data-answer] .acc").all_inner_texts()
        assert "".join(accepted) == "Helothre 世! ye"  # two of every three, as the script says
        facts = await shown.text(".chat .facts")
        assert "7 target steps for 21 tokens" in facts
        assert await shown.page.is_enabled("#chat-send")
        await shown.go("costs")
        await shown.go("chat")  # what was said is still there
        assert await shown.text("[data-answer]") == "Hello there, 世界! Bye."


async def test_the_kill_switch_asks_acts_and_is_lifted() -> None:
    async with console() as shown:
        await shown.go("overview")
        switches = shown.server.gateway.switches
        await shown.page.click("#kill")
        await shown.page.wait_for_selector("dialog[open]")
        await shown.page.keyboard.press("Escape")
        await shown.page.wait_for_selector("dialog:not([open])", state="attached")
        assert switches.forced_policy is None
        await shown.page.click("#kill")
        await shown.page.click("#dialog-yes")
        await shown.page.wait_for_selector('#kill[aria-pressed="true"]')
        assert switches.forced_policy == "baseline"
        await shown.page.wait_for_selector(".events >> text=everything decodes as baseline")
        await shown.page.click("#kill")
        await shown.page.click("#dialog-yes")
        await shown.page.wait_for_selector('#kill[aria-pressed="false"]')
        assert switches.forced_policy is None


async def test_both_languages_and_both_themes_are_remembered() -> None:
    async with console(color_scheme="dark") as shown:
        await shown.go("guards")
        background = "getComputedStyle(document.body).backgroundColor"
        assert await shown.page.evaluate(background) == "rgb(17, 21, 27)"  # as the system says
        await shown.page.select_option("#theme", "light")
        await shown.page.click('[data-key="lang-zh"]')
        await shown.page.wait_for_selector("h2:has-text('护栏')")
        await shown.page.reload()
        await shown.page.wait_for_selector("h2:has-text('护栏')")
        assert await shown.page.evaluate(background) == "rgb(246, 247, 249)"
        assert await shown.page.get_attribute("html", "lang") == "zh-CN"
        await shown.page.click('[data-key="lang-en"]')
        await shown.page.wait_for_selector("h2:has-text('Guards')")


async def test_a_chinese_browser_gets_chinese() -> None:
    async with console(locale="zh-CN") as shown:
        for name in PAGES:
            await shown.go(name)
        assert "试用" in await shown.text("nav")


async def test_the_keyboard_reaches_everything() -> None:
    async with console() as shown:
        await shown.server.chat(max_tokens=3)
        await shown.go("decisions")
        await shown.page.wait_for_selector("tr.decision")
        await shown.page.evaluate("document.activeElement.blur()")
        await shown.page.keyboard.press("Tab")
        assert await shown.page.evaluate("document.activeElement.id") == "skip"
        await shown.page.keyboard.press("Enter")
        assert await shown.page.evaluate("document.activeElement.id") == "main"
        for _ in range(4):  # two filters, then the first row's button
            await shown.page.keyboard.press("Tab")
            if await shown.page.evaluate("document.activeElement.className") == "fold":
                break
        await shown.page.keyboard.press("Enter")
        await shown.page.wait_for_selector('tr.decision button[aria-expanded="true"]')
        assert await shown.page.locator("tr.detail").count() == 1
        await shown.page.focus('[data-key="nav-guards"]')
        await shown.page.keyboard.press("Enter")
        await shown.page.wait_for_selector('nav a[href="#/guards"][aria-current="page"]')
        # the focus stays where it is while numbers are drawn anew
        assert await shown.page.evaluate("document.activeElement.dataset.key") == "nav-guards"


async def test_a_server_with_keys_asks_for_them_once_and_forgets_them_with_the_tab() -> None:
    auth = AuthConfig(
        api_keys=(KeyConfig(name="acme", sha256=hashlib.sha256(b"api-secret").hexdigest()),),
        admin_keys=(KeyConfig(name="ops", sha256=hashlib.sha256(b"admin-secret").hexdigest()),),
    )
    async with console(make_config(auth=auth)) as shown:
        await shown.page.goto(f"{shown.server.url}/ui")
        await shown.page.wait_for_selector("dialog[open]")
        await shown.page.fill("#admin-token", "admin-secret")
        await shown.page.fill("#api-key", "api-secret")
        await shown.page.click("#dialog-yes")
        await shown.page.wait_for_selector("main .grid")
        await shown.go("chat")
        await shown.page.press("#chat-box", "Enter")
        await shown.page.wait_for_selector(".chat .facts")
        kept = await shown.page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]")
        assert "admin-secret" in kept[0]
        assert "admin-secret" not in kept[1]
        assert "admin-secret" not in await shown.page.evaluate("document.cookie + location.href")
        # the browser itself notes that the first call was refused
        assert all("401" in fault for fault in shown.faults)
        shown.faults.clear()
