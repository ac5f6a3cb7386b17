"""docs/load_balancer.md and docs/pd.md name what there is, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path

from radixpd.mini_lb.app import ANYWHERE, GENERATING, ROUTED
from radixpd.mini_lb.settings import LbSettings, read

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "load_balancer.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (gauge|counter|histogram) \| (.*?) \|", re.MULTILINE)


async def test_every_metric_has_its_row(stubs, balance) -> None:
    p, d = await stubs("p", "d")
    lb = await balance("--prefill", p.url, "--decode", d.url)
    await lb.up(2)
    await lb.post()
    lb.parts.metrics.retried("broken")
    async with lb.http.get("/metrics") as response:
        text = await response.text()
    kinds = dict(re.findall(r"^# TYPE radixpd_lb_(\w+) (\w+)$", text, re.MULTILINE))
    assert {name: kind for name, kind, _ in ROW.findall(PAGE)} == kinds
    for name, kind, labels in ROW.findall(PAGE):
        sample = re.search(rf"^radixpd_lb_{name}{'_count' if kind == 'histogram' else ''}(?:{{(.*)}})? ", text, re.MULTILINE)
        assert sample, name
        assert set(re.findall(r"`(\w+)`", labels)) == set(re.findall(r'(\w+)="', sample[1] or "")), name


def test_every_route_is_named() -> None:
    paths = {path for _, path in (*GENERATING, *ANYWHERE)} | {route.path for module in ROUTED for route in module.ROUTES}
    aliases = {"/page/{name}", "/v1/models/{id:[^/]+(?:/[^/]+)*}", "/get_server_info", "/v1/tokenize", "/v1/detokenize"}
    for path in paths - aliases:
        assert f"{path.partition('/{')[0]}" in PAGE, path


def test_the_flags_that_the_pages_name_exist() -> None:
    known = {flag for group in ("fleet", "retry", "door", "observe") for flag in getattr(LbSettings(), group).__dataclass_fields__}
    named = {name.removeprefix("no-") for name in re.findall(r"`--([a-z-]+)", PAGE)}
    others = {"disaggregation-bootstrap-port", "salt-from-key", "help"}
    assert {name.replace("-", "_") for name in named - others} <= known


def test_the_commands_of_the_pages_can_be_read() -> None:
    commands = re.findall(r"radixpd\.mini_lb (--.*?)$", PAGE + (DOCS / "pd.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        read(command.removesuffix(" &").split())
