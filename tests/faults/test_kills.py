"""Sessions, runner, writer and kernel are killed at random moments: no record is lost, doubled or half there."""

import os
import random
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import killing, quick_session
from faults.killing import Account, Campaign
from faults.ledger import Ledger

from decodegap import plan, records, runner
from decodegap.paths import HERE

REAL_KILLS, QUICK_KILLS = 40, 160
MANY = 20  # kills, of which some must have hit a writer in the act
QUICK_RUN = """
import sys
from pathlib import Path
from decodegap import plan, runner
from decodegap.errors import DecodeGapError
req = plan.request(gpu='cpu', models='tiny-llama,tiny-qwen2', contexts='8,16,24', sessions=3)
try:
    runner.run(plan.baseline(req, 'cpu'), Path(sys.argv[1]), module='faults.quick_session')
except DecodeGapError as error:
    sys.exit(f'decode-gap: {error}')
"""


def environment(temporary: Path, **settings: str) -> dict[str, str]:
    """What a campaign's runs see: none of this call's settings, and a machine of their own to lock."""
    kept = {key: value for key, value in os.environ.items() if key not in ("GPU", "MODELS", "CONTEXTS", "SESSIONS")}
    path = os.pathsep.join([str(HERE.root / "artifact"), str(HERE.root / "tests")])
    temporary.mkdir()
    return kept | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary)} | settings


def expected(models: str, contexts: str, sessions: int) -> list[plan.Task]:
    return plan.baseline(plan.request(gpu="cpu", models=models, contexts=contexts, sessions=sessions), "cpu")


def complete(tasks: list[plan.Task], store: Path) -> bool:
    return all(records.path_of(store, task.cell, task.session).exists() for task in tasks)


SILENT = {
    "session": "nothing: the same run measures it again, and names it at the end if it dies three times",
    "writer": "nothing: the same run measures it again, and names it at the end if it dies three times",
    "runner": "nothing more, it is gone: the next run measures what is missing",
    "kernel": "nothing",
}


def note(faults: Ledger, what: str, account: Account) -> None:
    names = {
        "session": "a session",
        "writer": "a session as it writes",
        "runner": "the runner",
        "kernel": "papermill's kernel",
    }
    for (kind, sent), times in sorted(account.kills.items()):
        heard = account.said.get((kind, sent), "") if kind in ("runner", "kernel") else ""
        faults.note(f"{sent} of {names[kind]}{what}", heard or SILENT[kind], injected=times)
    faults.rows[-1].lost += len(account.lost)
    faults.rows[-1].wrong += len(account.wrong)


@dataclass(frozen=True)
class Ended:
    """A campaign that is over: what it did, what was to be measured, and where."""

    account: Account
    wanted: int
    tasks: list[plan.Task]
    store: Path
    temporary: Path


def real(folder: Path, dice: random.Random, per_cent: int) -> Ended:
    """Kill real sessions of the CPU plan, papermill's kernel and the runner, as `make measure` starts them."""
    store, temporary = folder / "store", folder / "tmp"
    models, contexts = "tiny-qwen2,tiny-llama,tiny-mistral" if per_cent >= 100 else "tiny-llama", "24,32"
    plan_of = {"GPU": "cpu", "MODELS": models, "CONTEXTS": contexts, "SESSIONS": "1"}
    tasks, account, wanted = expected(models, contexts, 1), Account(), -(-REAL_KILLS * per_cent // 100)
    campaign = Campaign(
        command=[sys.executable, "-m", "decodegap", "measure"],
        env=environment(temporary, EXPERIMENTS="baseline", RESULTS=str(store), **plan_of),
        store=store,
        targets={"session": 0.6, "kernel": 0.2, "runner": 0.2},
        marks={"session": "decodegap.session", "kernel": "ipykernel_launcher"},
        horizon_s=6.0,
    )
    killing.ravage(campaign, wanted, dice, account, lambda: complete(tasks, store), lambda: shutil.rmtree(store))
    return Ended(account, wanted, tasks, store, temporary)


def quick(folder: Path, dice: random.Random, per_cent: int) -> Ended:
    """Kill runner, sessions and writers of sessions that skip only the model."""
    store, temporary = folder / "store", folder / "tmp"
    tasks, account = expected("tiny-llama,tiny-qwen2", "8,16,24", 3), Account()
    wanted = -(-QUICK_KILLS * per_cent // 100)
    campaign = Campaign(
        command=[sys.executable, "-c", QUICK_RUN, str(store)],
        env=environment(temporary),
        store=store,
        targets={"session": 0.4, "writer": 0.3, "runner": 0.3},
        marks={"session": "faults.quick_session"},
        horizon_s=1.0,
    )
    killing.ravage(campaign, wanted, dice, account, lambda: complete(tasks, store), lambda: shutil.rmtree(store))
    return Ended(account, wanted, tasks, store, temporary)


CAMPAIGNS = {"test_kills_of_real_sessions_their_kernel_and_papermill": real, "test_kills_of_runner_and_writer": quick}


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The campaigns of the tests that were asked for, at once: each waits for its victims most of the time."""
    per_cent = int(request.config.getoption("--kills"))
    seed = int(request.config.getoption("--seed") or random.SystemRandom().randrange(2**32))
    asked = {item.name for item in request.session.items}
    print(f"\nkills: --seed {seed}")
    with ThreadPoolExecutor() as pool:
        yield {
            name: pool.submit(campaign, tmp_path_factory.mktemp(campaign.__name__), random.Random(seed), per_cent)
            for name, campaign in CAMPAIGNS.items()
            if name in asked
        }


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_of_real_sessions_their_kernel_and_papermill(
    ends: dict[str, Any], request: pytest.FixtureRequest, faults: Ledger
) -> None:
    end = ends[request.node.name].result()
    note(faults, " (real sessions)", end.account)
    found = records.load_all(end.store, "cpu")
    assert end.account.total >= end.wanted
    assert (end.account.lost, end.account.wrong) == ([], [])
    names = sorted(task.cell.file_name(task.session) for task in end.tasks)
    assert sorted(r.cell.file_name(r.session) for r in found) == names
    assert all(runner.valid_record(task, end.store) for task in end.tasks)
    assert len({tuple(killing.samples(path)) for path in records.files(end.store, "cpu")}) == len(end.tasks)
    assert not list(end.temporary.glob("decode-gap-*/")), "the last run swept what the killed ones left"
    assert not list(end.store.rglob("*.partial"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_kills_of_runner_and_writer(ends: dict[str, Any], request: pytest.FixtureRequest, faults: Ledger) -> None:
    end = ends[request.node.name].result()
    account = end.account
    note(faults, " (all but the model)", account)
    print(f"{account.total} kills, {account.half_written} of them in the middle of writing a record")
    for task in end.tasks:
        written = records.load(records.path_of(end.store, task.cell, task.session))
        assert written.model_copy(update={"content_hash": ""}) == quick_session.made(task)
    assert len(records.load_all(end.store, "cpu")) == len(end.tasks)
    assert account.total >= end.wanted
    assert account.half_written or account.total < MANY, "no kill hit a writer in the act"
    assert (account.lost, account.wrong) == ([], [])
    assert not list(end.store.rglob("*.partial"))
