"""`specgate canary`: where rollouts stand, and by hand where they go."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

ACTIONS = ("promote", "pause", "resume", "rollback")


class CanaryError(Exception):
    """It did not work; the message is one sentence."""


def add_canary_arguments(parser: argparse.ArgumentParser, default_url: str) -> None:
    """Options of the command."""
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    status = actions.add_parser("status", help="every rollout, or the one named")
    status.add_argument("name", nargs="?", metavar="NAME")
    helps = {
        "promote": "to the next stage now", "pause": "stay at this stage, but still roll back by itself",
        "resume": "go on; or begin anew after a rollback", "rollback": "everybody back to the configuration",
    }  # fmt: skip
    commands = [status]
    for action in ACTIONS:
        command = actions.add_parser(action, help=helps[action])
        command.add_argument("name", metavar="NAME")
        commands.append(command)
    for command in commands:
        command.add_argument("--url", default=default_url, help=f"the server (default {default_url})")
        command.add_argument(
            "--token", default=os.environ.get("SPECGATE_TOKEN"), help="admin token (default $SPECGATE_TOKEN)"
        )


def run_canary(args: argparse.Namespace) -> None:
    """Ask the server and print. Raises CanaryError."""
    from rich.console import Console, Group

    from specgate.canary_view import render

    if args.action == "status":
        rollouts = _ask(args, "GET", "/admin/state")["canary"]
        if args.name is not None:
            if args.name not in rollouts:
                known = ", ".join(rollouts) or "none"
                raise CanaryError(f"there is no rollout {args.name!r}; there are: {known}")
            rollouts = {args.name: rollouts[args.name]}
    else:
        rollouts = _ask(args, "POST", f"/admin/canary/{args.name}/{args.action}")
    if not rollouts:
        Console().print("no rollouts: point canary.folder at a folder of rollout files")
        return
    Console(soft_wrap=False).print(Group(*(render(name, rollout) for name, rollout in rollouts.items())))


def _ask(args: argparse.Namespace, method: str, path: str) -> dict[str, Any]:
    import httpx

    headers = {"Authorization": f"Bearer {args.token}"} if args.token else {}
    send: Callable[..., Any] = httpx.request
    try:
        response = send(method, f"{args.url.rstrip('/')}{path}", headers=headers, timeout=30)
        answer = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise CanaryError(f"no server answers at {args.url}: run `make serve` or give --url") from error
    if response.status_code != 200:
        raise CanaryError(f"{args.url} answered {response.status_code}: {answer['error']['message']}")
    return dict(answer)
